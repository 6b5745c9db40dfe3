"""Records the policy's view and vLLM's actions as decisions for `cbatch.replay.replay`."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cbatch.plan import Plan
from cbatch.record import StepRecord
from cbatch.replay.decisions import Decision, Recorded, Seen, StepEnd, look, read
from cbatch.request import FinishReason, spec_of
from cbatch.vllm.request import ServedRequest
from cbatch.vllm.settings import Recorder
from cbatch.vllm.view import VllmView


class Recording:
    """Records the tokens that vLLM scheduled in each iteration, which may be fewer than planned."""

    def __init__(self, recorder: Recorder, view: VllmView) -> None:
        self._recorder, self._view = recorder, view
        self._seen: Seen | None = None
        self._preempted: list[int] = []
        kv, drafts = view.kv, view.limits.max_drafts > 0
        run = Recorded(view.limits, kv.num_blocks, kv.block_size, real_tokens=drafts, num_ahead=kv.num_ahead)
        recorder.begin(run)

    def arrived(self, request: ServedRequest) -> None:
        """Adds `extra["waited"]`: seconds since the API server received the request. vLLM takes requests only between iterations."""
        spec, waited = spec_of(request), max(time.time() - request.source.arrival_time, 0.0)
        self._recorder.request(replace(spec, extra={**spec.extra, "waited": waited}))

    def look(self) -> None:
        """Snapshots the view. Call right before planning."""
        self._seen = look(self._view)
        self._preempted.clear()

    def preempted(self, request: ServedRequest) -> None:
        self._preempted.append(request.id)

    def launched(self, plan: Plan | None, requests: Sequence[ServedRequest], scheduled: Mapping[str, int]) -> None:
        """Records vLLM's batch. scheduled: tokens by vLLM's id. plan: the plan that vLLM carried out; None if vLLM decided."""
        assert self._seen is not None
        entries = tuple((request.id, scheduled[request.vllm_id]) for request in requests)
        preempt, seen = tuple(self._preempted), self._seen
        decided = read(Plan() if plan is None else plan)._replace(entries=entries, preempt=preempt, pad_to=None)
        # with nothing in flight, vLLM schedules in a busy loop
        waits = seen.num_in_flight and (seen.waiting or seen.running)
        if entries or preempt or decided.reject or waits:
            self._recorder.event(Decision(self._view.iteration, seen, decided))

    def ended(self, record: StepRecord, receivers: Iterable[ServedRequest], finished: Iterable[ServedRequest]) -> None:
        stopped = tuple(request.id for request in finished if request.finish_reason is FinishReason.STOP)
        self._recorder.event(StepEnd(record, tuple(request.id for request in receivers), stopped))

    def finished(self, request: ServedRequest) -> None:
        self._recorder.finish(request.id, request.num_output_tokens)

    def close(self) -> None:
        self._recorder.close()
