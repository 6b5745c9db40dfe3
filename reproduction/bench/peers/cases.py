"""The work that other engines are measured on: the requests of our benchmarks `async`, `graphs`, `pd` and `trace`."""

from collections.abc import Sequence
from typing import NamedTuple

from cbatch import ConfigError, ModelSpec, Request
from cbatch.model.checkpoint import Vocabulary
from experiments.setup.servers import equal_requests
from experiments.workloads import ClosedBatch, TraceReplay

UNITS = {
    "trace": "prompt and output tokens/s",
    "decode": "ms per iteration",
    "one_request": "output tokens/s",
    "pd": "prompt and output tokens/s",
    "prefixes": "s",
}
"""How the speed of each kind of work is stated. The keys are sections of the page (`bench.page`)."""


class Case(NamedTuple):
    """One piece of work under one setting of the engine.

    work: a key of `UNITS`.
    batch: requests that may run at once.
    budget: tokens of an iteration, at most.
    new: output tokens of a request, where the work leaves them open.
    """

    work: str
    model: str
    batch: int
    budget: int
    new: int = 0

    def row(self, loop: str) -> str:
        """Returns what follows the engine's name in the page's table. loop: sync or async."""
        budget = f", {self.budget} tokens an iteration"
        ends = {"trace": f", batch {self.batch}{budget}", "decode": f", {loop}", "pd": budget}
        return ends.get(self.work, "")

    def section(self, name: str) -> list[str]:
        """Returns the page's section, and what precedes the engine's name there. name: of the case."""
        before = {"decode": [f"{self.new} new"], "prefixes": [name]}
        return [self.work, *before.get(self.work, [])]


CASES = {
    "trace-256-2048": Case("trace", "llama-3.1-8b", batch=256, budget=2048),
    "trace-128-2048": Case("trace", "llama-3.1-8b", batch=128, budget=2048),
    "decode-2048": Case("decode", "llama-3.1-8b", batch=32, budget=8192, new=2048),
    "one": Case("one_request", "llama-2-7b", batch=1, budget=2048, new=512),
    "pd-256": Case("pd", "llama-13b", batch=18, budget=256),
}
"""The most important first; the keys name results files."""


def requests_of(case: Case, spec: ModelSpec, path: str = "") -> Sequence[Request]:
    """Returns all requests of a case, queued at once. path: of the trace, for cases that replay it."""
    if case.work in ("decode", "one_request"):
        return equal_requests(case.batch, 256 if case.work == "decode" else 32, case.new, spec.vocab_size)
    if case.work == "pd":
        return ClosedBatch(length=1024, pd_ratio=14, batch=case.batch, num_requests=144).requests(Vocabulary(spec))
    if not path:
        raise ConfigError("trace: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    return TraceReplay(path=path, num_requests=512, queued=True).requests(Vocabulary(spec))


def speed(case: Case, requests: Sequence[Request], seconds: float) -> float:
    """Returns the speed of a case in its unit, from the seconds that its requests took."""
    if case.work == "decode":
        return seconds / case.new * 1e3
    both = case.work != "one_request"
    return sum(request.max_tokens if both else request.max_new_tokens for request in requests) / seconds
