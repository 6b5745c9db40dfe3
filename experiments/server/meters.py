"""The content of `/metrics` in Prometheus format: vLLM's names with the prefix `cbatch:`. Times are on the engine's clock."""

from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cbatch.request import SERVED, FinishReason
from experiments.server.clients import Turn

M = TypeVar("M", Counter, Gauge, Histogram)

_GAUGES = {
    "num_requests_running": "Requests admitted",
    "num_requests_waiting": "Requests that wait for admission",
    "kv_cache_usage_perc": "Share of the KV blocks in use; 1 is all",
}
_TOKENS = {"generation_tokens": "Tokens generated and received"}
_PROMPTS = {
    "prompt_tokens": "Prompt tokens of requests that have ended, or moved to another replica, with at least a token",
    "prefix_cache_queries": "Prompt tokens of requests that were admitted and have ended or moved to another replica",
    "prefix_cache_hits": "Prompt tokens of these requests that the prefix cache held",
}
_STEPS = {
    "num_preemptions": "Preemptions, counted when the next iteration has ended",
    "spec_decode_num_drafts": "Requests that had drafts, once for each iteration",
    "spec_decode_num_draft_tokens": "Their drafts",
    "spec_decode_num_accepted_tokens": "Drafts that became tokens",
}
_REASONS = {FinishReason.CANCELLED: "abort"}  # vLLM's name
_TIMES = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Meters(CollectorRegistry):
    """Counts the events that the engine reports. Times cover served requests, as in a summary; counters cover all requests.

    A request that moves counts where its prompt was computed, where each token was, and, with its times, where it ends.
    rejections: by the server. The other meters have a label `replica` if there are several.
    """

    def __init__(self, num_replicas: int = 1) -> None:
        super().__init__()
        self._labels = ["replica"] * (num_replicas > 1)

        def made(kind: type[M], name: str, text: str, **options: Any) -> list[M]:
            """Returns a meter for each replica."""
            meter = kind(f"cbatch:{name}", text, self._labels, registry=self, **options)
            return [meter.labels(number) for number in range(num_replicas)] if self._labels else [meter]

        self._gauges = [made(Gauge, name, text) for name, text in _GAUGES.items()]
        self._counters = {name: made(Counter, name, text) for name, text in (_TOKENS | _PROMPTS | _STEPS).items()}
        self.rejections = Counter("cbatch:admission_rejections", "Requests beyond max_open", registry=self)
        by_reason = [*self._labels, "finished_reason"]
        self._ended = Counter("cbatch:request_success", "Requests that have ended", by_reason, registry=self)
        text = "As in docs/metrics.md"
        self._times = [made(Histogram, f"{name}_seconds", text, buckets=_SECONDS) for name in _TIMES]

    def count(self, turn: Turn) -> None:
        place = turn.replica
        for gauge, value in zip(self._gauges, turn.state, strict=True):
            gauge[place].set(value)
        count = {name: counter[place] for name, counter in self._counters.items()}
        count["generation_tokens"].inc(len(turn.ids))
        for name, number in zip((*_PROMPTS, *_STEPS), (*turn.prompts, *turn.steps), strict=True):
            count[name].inc(number)
        for end in turn.ended:
            reason = end.finish_reason and _REASONS.get(end.finish_reason, end.finish_reason.value)
            self._ended.labels(*[place] * len(self._labels), reason).inc()
            first, last = end.token_times
            if first is not None and last is not None and end.finish_reason in SERVED:
                ttft, tpot, end_to_end = (times[place] for times in self._times)
                ttft.observe(first - end.arrival_time)
                end_to_end.observe(last - end.arrival_time)
                if end.num_output_tokens > 1:
                    tpot.observe((last - first) / (end.num_output_tokens - 1))
