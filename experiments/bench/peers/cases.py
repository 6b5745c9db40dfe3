"""The work that other engines are measured on: the requests that our benchmarks `async`, `graphs`, `pd` and `trace` serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cbatch import ConfigError, Request
from cbatch.model import ModelSpec
from cbatch.vocabulary import Vocabulary
from experiments.config.servers import equal_requests
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
    """What to serve, and how its speed is stated.

    requests: made from a case, a vocabulary and the path of the trace.
    value: speed of a case from the requests and the seconds that they took.
    section: the table of docs/performance.md to which a case belongs, as keys of peers.json.
    row: its row there, after the engine's name.
    """

    requests: Callable[[Case, Vocabulary, str], list[Request]]
    value: Callable[[Case, Sequence[Request], float], float]
    unit: str
    section: Callable[[Case], tuple[str, ...]]
    row: Callable[[Case], str]


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


def requests_of(case: Case, spec: ModelSpec, path: str = "") -> list[Request]:
    """All requests of a case, queued at once.

    Raises:
        ConfigError: the case replays a trace and `path` is empty.
    """
    return WORKS[case.work].requests(case, Vocabulary(spec), path)


def tokens_per_second(case: Case, requests: Sequence[Request], seconds: float) -> float:
    """Prompt and output tokens per second."""
    return sum(request.max_tokens for request in requests) / seconds


def _decode(case: Case, vocabulary: Vocabulary, path: str) -> list[Request]:
    return equal_requests(case.batch, 256, case.new, vocabulary.size)


def _one(case: Case, vocabulary: Vocabulary, path: str) -> list[Request]:
    return equal_requests(case.batch, 32, case.new, vocabulary.size)


def _pd(case: Case, vocabulary: Vocabulary, path: str) -> list[Request]:
    return ClosedBatch(length=1024, pd_ratio=14, batch=case.batch, num_requests=144).requests(vocabulary)


def _trace(case: Case, vocabulary: Vocabulary, path: str) -> list[Request]:
    if not path:
        raise ConfigError("trace: give the trace's file, path=azure_llm_2023_conv.csv.gz")
    return TraceReplay(path=path, num_requests=512, queued=True).requests(vocabulary)


WORKS = {
    "trace": Work(
        _trace,
        tokens_per_second,
        PROMPT_AND_OUTPUT,
        section=lambda case: ("trace",),
        row=lambda case: f", batch {case.batch}, {case.budget} tokens an iteration",
    ),
    "decode": Work(
        _decode,
        lambda case, requests, seconds: seconds / case.new * 1e3,
        "ms per iteration",
        section=lambda case: ("decode", f"{case.new} new"),
        row=lambda case: ", async",
    ),
    "one": Work(
        _one,
        lambda case, requests, seconds: case.batch * case.new / seconds,
        "output tokens/s",
        section=lambda case: ("one_request",),
        row=lambda case: "",
    ),
    "pd": Work(
        _pd,
        tokens_per_second,
        PROMPT_AND_OUTPUT,
        section=lambda case: ("pd",),
        row=lambda case: f", {case.budget} tokens an iteration",
    ),
}
