"""Steady states of equal requests on simulated hardware: device seconds per request.

Every value comes from a run of the engine with the real policy and KV accounting; `closed_form_gain` computes the same
steady state by hand, as a check of the runs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import gcd
from typing import Any, Literal

from cbatch import BatchShape, KVSize, Limits, Policy, Request, RunRecord, Server
from cbatch.kv import blocks_for
from cbatch.sim import ProfileCost, SimExecutor
from experiments.workloads import ClosedBatch
from experiments.workloads.base import Vocabulary
from policies.chunking import Fixed, TileAligned
from policies.chunking.steady_state import steady_state_seconds
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from reproduction.experiment_files import composed

BLOCK = 16
WARM_UP, COUNTED = 2, 2
"""Generations, of as many requests as the batch holds, before measuring and measured. The states repeat exactly."""

Scheme = Literal["baseline", "orca_best", "orca_worst", "sarathi", "sarathi_unaligned"]
Stagger = float | Literal["even"]
"""Iterations between the first arrivals, see `ClosedBatch`."""


@dataclass(frozen=True)
class Load:
    """Equal requests: `length` = P + D tokens at P:D = `pd_ratio`, `batch` at a time."""

    length: int
    batch: int
    pd_ratio: float

    @property
    def output(self) -> int:
        """D, in whole tokens."""
        return int(self.length / (1 + self.pd_ratio) + 0.5)


def load_of(experiment: str, pd_ratio: float) -> Load:
    """The closed batch that conf/experiment/<experiment>.yaml serves, at this P:D."""
    workload = composed(experiment).keys["workload"]
    return Load(workload["length"], workload["batch"], pd_ratio)


@dataclass(eq=False)
class SteadyState:
    """Measures the paper's schemes on one simulated GPU; repeated loads are cached."""

    cost: ProfileCost
    _known: dict[Any, float] = field(default_factory=dict)

    def seconds(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Seconds per finished request."""
        key = (scheme, load, chunk if scheme.startswith("sarathi") else 0)
        if key not in self._known:
            self._known[key] = self._run(scheme, load, chunk)
        return self._known[key]

    def gain(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Throughput over the baseline's."""
        return self.seconds("baseline", load) / self.seconds(scheme, load, chunk)

    def provenance(self) -> dict[str, Any]:
        return self.cost.provenance()

    def close(self) -> None:
        """Releases nothing."""

    def _run(self, scheme: Scheme, load: Load, chunk: int) -> float:
        policy, tile = policy_of(scheme, chunk), tile_of(self.cost, chunk)
        return seconds_per_request(self.cost, policy, load, stagger=stagger_of(scheme), tile=tile)


def seconds_per_request(
    cost: ProfileCost, policy: Policy, load: Load, *, stagger: Stagger = 0, tile: int | None = None
) -> float:
    """Device seconds per finished request once the batch is in its steady state.

    tile: the one that the policy sees; None: the hardware's.
    """
    begin, end = find_span(simulate(SimExecutor(cost), cost, policy, load, stagger, tile), load, COUNTED)
    return (end - begin) / (COUNTED * load.batch)


def simulate(
    executor: SimExecutor, cost: ProfileCost, policy: Policy, load: Load, stagger: Stagger = 0, tile: int | None = None
) -> RunRecord:
    """Serve the generations that warm up, those measured, and one more, which keeps the batch full until these end.

    The loop is synchronous, as the paper's systems were: the KV cache holds no more than the batch, and an asynchronous
    loop frees blocks an iteration later. The host takes no time.
    """
    limits = limits_of(load, tile or cost.profile.ceilings.tile)
    kv = KVSize(load.batch * blocks_for(load.length, BLOCK), BLOCK)
    server = Server(executor, limits, cost, kv, asynchronous=False)
    return server.serve(policy, requests_of(load, WARM_UP + COUNTED + 1, stagger))


def limits_of(load: Load, tile: int) -> Limits:
    """Limits that bind nothing but the batch."""
    return Limits(load.batch, max_tokens=load.batch * load.length, max_request_tokens=load.length, tile=tile)


def tile_of(cost: ProfileCost, chunk: int) -> int:
    """The tile that policies see: one that divides the chunk. It does not change what tiles cost."""
    return gcd(cost.profile.ceilings.tile, chunk)


def stagger_of(scheme: Scheme) -> Stagger:
    return "even" if scheme == "orca_best" else 0


def requests_of(
    load: Load, generations: int, stagger: Stagger = 0, vocabulary: Vocabulary | None = None
) -> Sequence[Request]:
    """As many requests as the batch holds, `generations` times."""
    return ClosedBatch(**asdict(load), num_requests=generations * load.batch, stagger=stagger).requests(vocabulary)


def find_span(record: RunRecord, load: Load, generations: int) -> tuple[float, float]:
    """(begin, end) in seconds of the time in which `generations` ended, after those of the warm-up."""
    ends = [request.finished_at or 0.0 for request in record.requests]
    first = WARM_UP * load.batch - 1
    return ends[first], ends[first + generations * load.batch]


def closed_form_gain(cost: ProfileCost, load: Load, chunk: int) -> float:
    """Sarathi's gain by hand: a request lives through n = P / C' chunks with B - 1 decodes beside each."""
    prompt, decodes = load.length - load.output, load.output - 1  # the prefill samples the first token
    context = prompt + load.output // 2
    prefill = cost.predict(BatchShape(((prompt, 0),) * load.batch)) / load.batch
    decode = cost.predict(BatchShape((), load.batch, load.batch * context)) / load.batch
    mixed = steady_state_seconds(cost, chunk, load.batch, prompt, load.output)
    return (prefill + decodes * decode) / mixed


def policy_of(scheme: Scheme, chunk: int) -> Policy:
    match scheme:
        case "baseline":
            return RequestLevel()
        case "sarathi":
            return Sarathi(TileAligned(chunk))
        case "sarathi_unaligned":
            return Sarathi(Fixed(chunk))
        case _:
            return Orca()
