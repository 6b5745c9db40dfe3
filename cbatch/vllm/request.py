"""The policy's view of the requests that vLLM serves: counters are read from vLLM's requests.

The sets of waiting, running and decoding requests are updated after each action of vLLM's scheduler.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, cast

from cbatch.request import FinishReason, Request, Status
from cbatch.request_spec import SLO, RequestSpec
from cbatch.request_table import Queues
from cbatch.vllm.settings import log

_RANGE = 1e-9, 1e9  # accepted range of seconds and tokens: sums, products and quotients in a policy remain finite

_SLO = {f"slo_{name}": name for name in SLO.__slots__}


class ServedRequest(Request):
    """A request that vLLM serves.

    source: vLLM's request; None after the end. num_cached: returns a waiting request's tokens in the prefix cache.
    announced: whether `on_arrival` was called. ends_at: tokens computed or in flight from which on the last token by length is being sampled.
    num_drafts: drafts in flight, which the counters hold until vLLM knows which of them were accepted.
    """

    __slots__ = ("announced", "ends_at", "num_cached", "num_drafts", "source", "vllm_id")

    source: Any
    vllm_id: str
    announced: bool
    ends_at: int
    num_drafts: int
    num_cached: Callable[["ServedRequest"], int]

    @classmethod
    def of(
        cls, source: Any, id_: int, now: float, max_model_len: int, num_cached: Callable[["ServedRequest"], int]
    ) -> "ServedRequest":
        request = cls.from_spec(spec_from(source, id_, now, max_model_len))
        request.source, request.vllm_id, request.num_cached = source, source.request_id, num_cached
        request.announced, request.ends_at, request.num_drafts = False, request.max_tokens - 1, 0
        return request

    @property
    def num_known(self) -> int:
        return super().num_known if self.source is None else int(self.source.num_tokens)

    @property
    def num_tokens(self) -> int:
        source = self.source
        return super().num_tokens if source is None else int(source.num_tokens + source.num_output_placeholders)

    @property
    def num_computed(self) -> int:
        if self.source is None:
            return 0
        return self.num_cached(self) if self.status is Status.WAITING else int(self.source.num_computed_tokens)

    @property
    def num_ready(self) -> int:
        total = self.num_tokens
        return 0 if self.source is None or total - self.num_drafts >= self.max_tokens else total - self.num_computed

    def receive(self, now: float) -> None:
        """Records the time of a token that the request received."""
        first = self.token_times[0]
        self.token_times = (now if first is None else first, now)

    def end(self, reason: FinishReason, why: str, now: float) -> None:
        self.num_output_tokens = self.source.num_output_tokens
        self.count_recomputed(self.source.num_computed_tokens)
        self.status, self.finish_reason, self.reject_reason, self.finished_at = Status.FINISHED, reason, why, now
        self.source = None


def served(requests: Iterable[Request]) -> list[ServedRequest]:
    """Returns the same requests, cast: every request that policies see here is a `ServedRequest`."""
    return cast(list[ServedRequest], requests)


class Population(Queues):
    """The requests that have not ended. by_id: all of them by vLLM's id. Each has a `row`, which a later request takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.by_id: dict[str, ServedRequest] = {}
        self._free_rows: list[int] = []

    def submit(self, request: ServedRequest) -> None:
        request._row = self._free_rows.pop() if self._free_rows else len(self.by_id)
        self.by_id[request.vllm_id] = request

    def preempt(self, request: ServedRequest) -> None:
        """Moves a request to the waiting ones. Call before vLLM frees the request's blocks."""
        self.leave(request)
        request.lose(request.source.num_computed_tokens)
        self.wait(request)

    def advance(self, requests: list[ServedRequest], scheduled: Mapping[str, int], now: float) -> None:
        """Updates the queues for an iteration that vLLM has scheduled. requests: in the order of the plan. scheduled: tokens by vLLM's id."""
        decodes = served(self.decoding.members)
        num_decodes = len(decodes)
        for request in requests[num_decodes:] if requests[:num_decodes] == decodes else requests:
            if request.status is Status.WAITING:
                self.admit(request, now)
                found = request.source.num_computed_tokens - scheduled[request.vllm_id]
                if request.num_preemptions:
                    request.resume(found)
                else:
                    request.num_cached_tokens = found
            if request in self.prefilling and not request.source.is_prefill_chunk:
                self.begin_decoding(request)

    def leave_ending(self) -> None:
        """Removes decoding requests whose last token is in flight, since no token is left to compute."""
        decodes = served(self.decoding.members)
        for request in decodes[:]:
            if request.source.num_computed_tokens - request.num_drafts >= request.ends_at:
                self.leave(request)

    def end(self, source: Any, rejected: str | None, cancelled: bool, now: float) -> ServedRequest:
        """Records that vLLM has ended a request. rejected: why it was not served. cancelled: whether its client has left, or vLLM has failed it."""
        request = self.by_id.pop(source.request_id)
        self._free_rows.append(request._row)
        self.leave(request)
        reason = FinishReason.LENGTH if source.num_tokens >= request.max_tokens else FinishReason.STOP
        if cancelled:
            reason = FinishReason.CANCELLED
        request.end(reason if rejected is None else FinishReason.REJECTED, rejected or "", now)
        return request


def spec_from(source: Any, id_: int, now: float, max_model_len: int) -> RequestSpec:
    """Returns the specification of a vLLM client's request. It arrives when the scheduler receives the request.

    Client, session, tier, predicted_new_tokens, slo_ttft, slo_tbt, slo_total and slo_tpot (seconds) come from the API's `vllm_xargs`
    (`SamplingParams.extra_args`). The sign of priorities is inverted: in vLLM a lower priority is more urgent, here a higher.
    """
    params = source.sampling_params
    extra = params.extra_args or {}
    prompt: int = source.num_prompt_tokens
    most = max(min(source.max_tokens, max_model_len - prompt), 1)
    predicted = _number(extra, "predicted_new_tokens", source)
    return RequestSpec(
        id_,
        prompt,
        most,
        arrival_time=now,
        prompt=source.prompt_token_ids,
        stop_tokens=tuple(params.all_stop_token_ids),
        client=_text(extra, "client"),
        session=_text(extra, "session"),
        tier=_text(extra, "tier"),
        priority=-source.priority,
        slo=SLO(**{field: _number(extra, name, source) for name, field in _SLO.items()}),
        predicted_new_tokens=None if predicted is None else min(max(round(predicted), 1), most),
        extra=extra,
    )


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    return None if value is None else str(value)


def _number(extra: Mapping[str, Any], name: str, source: Any) -> float | None:
    """Returns a number in `_RANGE`. Other values are logged and ignored, so that no client's input can end the engine."""
    value = extra.get(name)
    if value is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        if _RANGE[0] <= (number := float(value)) <= _RANGE[1]:
            return number
    wanted = f"give a number from {_RANGE[0]:g} to {_RANGE[1]:g}"
    log.warning("request %s: %s=%.50r is left out; %s", source.request_id, name, value, wanted)
    return None
