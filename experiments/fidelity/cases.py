"""The cases by which simulation is validated: three workloads, each under four policies, served and then simulated."""

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

    def fits(self, other: "Case") -> bool:
        """Whether an executor built for the other case serves this one too."""
        return (self.model, self.batch, self.max_tokens) == (other.model, other.batch, other.max_tokens)


SERVE = "sarathi_serve, 512 tokens"
LLAMA = ("llama-3.1-8b", 128, 16384)
OPEN_POLICIES = (SERVE, "orca", "prefill_first", "sarathi, 512 tokens")

CASES = (
    Case("pd", "llama-13b", 18, 18 * 1024, ("request_level", "orca", "sarathi, 256 tokens", SERVE)),
    Case("trace", *LLAMA, (SERVE, "orca", "prefill_first", "longest_first, 512 tokens")),
    Case("poisson at 60%", *LLAMA, OPEN_POLICIES, load=0.6),
    Case("poisson at 90%", *LLAMA, OPEN_POLICIES, load=0.9),
)


def workload(case: Case, path: str, numbers: Mapping[str, int], capacity: float | None) -> Workload:
    """Returns the workload of a case.

    path: a trace, for its lengths. numbers: requests by the first word of the case's name.
    capacity: requests per second; open loops without it raise ConfigError.
    """
    number = numbers[case.name.split()[0]]
    if case.name == "pd":
        return ClosedBatch(length=1024, pd_ratio=14, batch=case.batch, num_requests=number)
    if case.load is None:
        return TraceReplay(path=path, num_requests=number, queued=True)
    if capacity is None:
        problem = "arrives at a share of the capacity, which case trace measures; add trace to cases"
        raise ConfigError(f"fidelity: case {case.name!r} {problem}")
    arrivals = GammaArrivals(rate=case.load * capacity)
    return OpenLoop(arrivals=arrivals, lengths=TraceLengths(path=path), num_requests=number)


def chosen_cases(cases: str, policies: str = "") -> list[Case]:
    """Returns the cases and their policies whose names begin with one of those given, separated by ";"; empty: all."""
    wanted = beginning_with("cases", cases, [case.name for case in CASES])
    allowed = beginning_with("policies", policies, POLICIES)
    chosen = []
    for case in CASES:
        policies_of = tuple(name for name in case.policies if name in allowed)
        if case.name in wanted and policies_of:
            chosen.append(replace(case, policies=policies_of))
    return chosen
