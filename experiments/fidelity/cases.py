"""The cases by which simulation is validated: three workloads, each under four policies, served and then simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from cbatch import ConfigError, Policy
from experiments.config.command_line import beginning_with
from experiments.workloads import ClosedBatch, GammaArrivals, OpenLoop, TraceLengths, TraceReplay, Workload
from policies.chunking import TileAligned
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "request_level": RequestLevel,
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi, 256 tokens": lambda: Sarathi(TileAligned(256)),
    "sarathi, 512 tokens": lambda: Sarathi(TileAligned(512)),
    "sarathi_serve, 512 tokens": lambda: SarathiServe(TileAligned(512)),
    "longest_first, 512 tokens": lambda: LongestFirst(TileAligned(512)),
}

CAPACITY_OF = ("trace", "sarathi_serve, 512 tokens")
"""The case and policy whose requests per second are the capacity; open loads are shares of it."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload.

    model: a preset. batch, max_tokens: of an iteration.
    policies: names in `POLICIES`.
    load: share of the capacity at which requests of an open loop arrive; None: all arrive at the start.
    """

    name: str
    model: str
    batch: int
    max_tokens: int
    policies: tuple[str, ...]
    load: float | None = None

    def fits(self, other: Case) -> bool:
        """Whether an executor built for the other case serves this one too."""
        return (self.model, self.batch, self.max_tokens) == (other.model, other.batch, other.max_tokens)


CASES = (
    Case(
        "pd", "llama-13b", 18, 18 * 1024, ("request_level", "orca", "sarathi, 256 tokens", "sarathi_serve, 512 tokens")
    ),
    Case(
        "trace",
        "llama-3.1-8b",
        128,
        16384,
        ("sarathi_serve, 512 tokens", "orca", "prefill_first", "longest_first, 512 tokens"),
    ),
    Case(
        "poisson at 60%",
        "llama-3.1-8b",
        128,
        16384,
        ("sarathi_serve, 512 tokens", "orca", "prefill_first", "sarathi, 512 tokens"),
        0.6,
    ),
    Case(
        "poisson at 90%",
        "llama-3.1-8b",
        128,
        16384,
        ("sarathi_serve, 512 tokens", "orca", "prefill_first", "sarathi, 512 tokens"),
        0.9,
    ),
)


def workload(case: Case, path: str, numbers: Mapping[str, int], capacity: float | None) -> Workload:
    """Returns the workload of a case.

    Args:
        path: a trace, for its lengths. numbers: requests by the first word of the case's name.
        capacity: requests per second; needed by open loops.

    Raises:
        ConfigError: the capacity is not known.
    """
    number = numbers[case.name.split()[0]]
    if case.name == "pd":
        return ClosedBatch(length=1024, pd_ratio=14, batch=case.batch, num_requests=number)
    if case.load is None:
        return TraceReplay(path=path, num_requests=number, queued=True)
    if capacity is None:
        raise ConfigError(
            f"fidelity: case {case.name!r} arrives at a share of the capacity, which case trace measures; "
            "add trace to cases"
        )
    return OpenLoop(
        arrivals=GammaArrivals(rate=case.load * capacity), lengths=TraceLengths(path=path), num_requests=number
    )


def chosen_cases(cases: str, policies: str = "") -> list[Case]:
    """Returns the cases whose names begin with one of `cases`, each with those of its policies that begin with one of `policies`.

    Args:
        cases, policies: beginnings of names, separated by ";"; empty: all.

    Raises:
        ConfigError: a name fits none.
    """
    wanted = beginning_with("cases", cases, [case.name for case in CASES])
    allowed = beginning_with("policies", policies, POLICIES)
    chosen = [
        replace(case, policies=tuple(name for name in case.policies if name in allowed))
        for case in CASES
        if case.name in wanted
    ]
    return [case for case in chosen if case.policies]
