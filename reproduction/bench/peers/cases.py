"""The work that other engines are measured on: the requests of our benchmarks `async`, `graphs`, `pd` and `trace`."""

from collections.abc import Sequence
from typing import NamedTuple

from cbatch import ConfigError, ModelSpec, Request
from cbatch.model.checkpoint import Vocabulary
from experiments.settings.servers import equal_requests
from experiments.workloads import ClosedBatch, TraceReplay

PROMPT_AND_OUTPUT = "prompt and output tokens/s"


class Case(NamedTuple):
    """One piece of work under one setting of the engine.

    work: a key of `WORKS`.
    batch: requests that may run at once.
    budget: tokens of an iteration, at most.
    new: output tokens of a request, where the work leaves them open.
    """

    work: str
    model: str
    batch: int
    budget: int
    new: int = 0


class Work(NamedTuple):
    """How the speed of a piece of work is stated.

    section: its table of the page (`bench.page`), as keys of peers.json. row: its row there, after the engine's name.
    Both are formatted with a case's fields, and `loop`: sync or async.
    """

    unit: str
    section: tuple[str, ...]
    row: str = ""


WORKS = {
    "trace": Work(PROMPT_AND_OUTPUT, ("trace",), ", batch {batch}, {budget} tokens an iteration"),
    "decode": Work("ms per iteration", ("decode", "{new} new"), ", {loop}"),
    "one": Work("output tokens/s", ("one_request",)),
    "pd": Work(PROMPT_AND_OUTPUT, ("pd",), ", {budget} tokens an iteration"),
}

CASES = {
    "trace-256-2048": Case("trace", "llama-3.1-8b", batch=256, budget=2048),
    "trace-128-2048": Case("trace", "llama-3.1-8b", batch=128, budget=2048),
    "trace-128-8192": Case("trace", "llama-3.1-8b", batch=128, budget=8192),
    "decode-2048": Case("decode", "llama-3.1-8b", batch=32, budget=8192, new=2048),
    "decode-8192": Case("decode", "llama-3.1-8b", batch=32, budget=8192, new=8192),
    "one": Case("one", "llama-2-7b", batch=1, budget=2048, new=512),
    "pd-256": Case("pd", "llama-13b", batch=18, budget=256),
    "pd-512": Case("pd", "llama-13b", batch=18, budget=512),
}
"""The most important first; the keys name results files."""


def requests_of(case: Case, spec: ModelSpec, path: str = "") -> Sequence[Request]:
    """All requests of a case, queued at once. path: of the trace; only cases that replay it need one."""
    if case.work in ("decode", "one"):
        return equal_requests(case.batch, 256 if case.work == "decode" else 32, case.new, spec.vocab_size)
    if case.work == "pd":
        return ClosedBatch(length=1024, pd_ratio=14, batch=case.batch, num_requests=144).requests(Vocabulary(spec))
    if not path:
        raise ConfigError("trace: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    return TraceReplay(path=path, num_requests=512, queued=True).requests(Vocabulary(spec))


def speed(case: Case, requests: Sequence[Request], seconds: float) -> float:
    """The speed of a case, in the unit of its work, from the seconds that its requests took."""
    unit = WORKS[case.work].unit
    if unit == "ms per iteration":
        return seconds / case.new * 1e3
    both = unit == PROMPT_AND_OUTPUT
    return sum(request.max_tokens if both else request.max_new_tokens for request in requests) / seconds
