"""The requests that vLLM serves: which wait, run and decode, updated after each action of its scheduler."""

from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList

from cbatch.request import FinishReason, Status
from cbatch.request_table import RequestSet
from cbatch.vllm.request import ServedRequest, served


class Population:
    """waiting, running, decoding, prefilling: as in `View`. by_id: every request that has not ended, by vLLM's id."""

    def __init__(self) -> None:
        self.by_id: dict[str, ServedRequest] = {}
        self.waiting: SortedKeyList[ServedRequest, tuple[float, int]] = SortedKeyList(
            key=attrgetter("arrival_time", "id")
        )
        self.running, self.decoding, self.prefilling = RequestSet(), RequestSet(), RequestSet()

    def wait(self, request: ServedRequest) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)

    def preempt(self, request: ServedRequest) -> None:
        """vLLM is about to take its blocks."""
        self._leave(request)
        request.num_preemptions += 1
        request.num_recomputed_tokens += request.source.num_computed_tokens
        self.wait(request)

    def advance(self, scheduled: list[ServedRequest], now: float) -> None:
        """Follow an iteration that vLLM has scheduled, its requests in the order of the plan."""
        decodes = served(self.decoding.members)
        num_decodes = len(decodes)
        for request in scheduled[num_decodes:] if scheduled[:num_decodes] == decodes else scheduled:
            if request.status is Status.WAITING:
                self._admit(request, now)
            if request in self.prefilling and not request.source.is_prefill_chunk:
                self.prefilling.discard(request)
                self.decoding.add(request)

    def leave_ending(self) -> None:
        """Requests whose last token is in flight have none left to compute."""
        decodes = served(self.decoding.members)
        for request in [request for request in decodes if request.source.num_computed_tokens >= request.ends_at]:
            self._leave(request)

    def end(self, source: Any, rejected: str | None, cancelled: bool, now: float) -> ServedRequest:
        """vLLM has ended a request. rejected: why it was not served. cancelled: its client has left."""
        request = self.by_id.pop(source.request_id)
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self._leave(request)
        reason = FinishReason.LENGTH if source.num_tokens >= request.max_tokens else FinishReason.STOP
        if cancelled:
            reason = FinishReason.CANCELLED
        request.end(reason if rejected is None else FinishReason.REJECTED, rejected or "", now)
        return request

    def _admit(self, request: ServedRequest, now: float) -> None:
        self.waiting.remove(request)
        if request.admitted_at is None:
            request.admitted_at = now
        request.status = Status.RUNNING
        self.running.add(request)
        self.prefilling.add(request)

    def _leave(self, request: ServedRequest) -> None:
        for part in (self.running, self.decoding, self.prefilling):
            part.discard(request)
