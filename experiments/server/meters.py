"""What `/metrics` shows, in the format of Prometheus: vLLM's names with the prefix `cbatch:`. Times are the engine's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from cbatch.request import SERVED
from experiments.server.engine import Turn

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Meters:
    """Counts what the engine reports. Prompts and latencies are of served requests, as in a summary."""

    def __init__(self) -> None:
        self.registry = into = CollectorRegistry()
        self._running = Gauge("cbatch:num_requests_running", "Requests admitted", registry=into)
        self._waiting = Gauge("cbatch:num_requests_waiting", "Requests that wait for admission", registry=into)
        self._kv = Gauge("cbatch:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all", registry=into)
        self._prompt = Counter("cbatch:prompt_tokens", "Prompt tokens", registry=into)
        self._generated = Counter("cbatch:generation_tokens", "Tokens generated and received", registry=into)
        self._preempted = Counter("cbatch:num_preemptions", "Preemptions of requests that have ended", registry=into)
        self.refused = Counter("cbatch:admission_rejections", "Requests beyond max_open", registry=into)
        self._ended = Counter("cbatch:request_success", "Requests that have ended", ["finished_reason"], registry=into)
        names = ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
        self._ttft, self._tpot, self._end_to_end = (
            Histogram(f"cbatch:{name}_seconds", "As in docs/metrics.md", registry=into, buckets=_SECONDS)
            for name in names
        )

    def count(self, turn: Turn) -> None:
        self._running.set(turn.num_running)
        self._waiting.set(turn.num_waiting)
        self._kv.set(turn.kv_use)
        self._generated.inc(turn.num_tokens)
        for end in turn.ended:
            if end.finish_reason is None:  # it was refused
                continue
            self._ended.labels(end.finish_reason.value).inc()
            self._preempted.inc(end.num_preemptions)
            if end.finish_reason in SERVED and end.first_token_at is not None and end.last_token_at is not None:
                self._prompt.inc(end.num_prompt_tokens)
                self._ttft.observe(end.first_token_at - end.arrival_time)
                self._end_to_end.observe(end.last_token_at - end.arrival_time)
                if end.num_output_tokens > 1:
                    self._tpot.observe((end.last_token_at - end.first_token_at) / (end.num_output_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)
