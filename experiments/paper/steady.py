"""Steady states of equal requests on simulated hardware: seconds of device time that one request takes.

Every figure comes from a run of the engine with the real policy and KV accounting; `closed_form` is the exact steady
state by hand, as a check of the runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal

from cbatch import BatchShape, Engine, Limits, Policy, Request, RunRecord
from cbatch.kv import blocks_for
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from experiments.workloads import ClosedBatch
from experiments.workloads.base import Vocabulary
from policies.chunking import Fixed, TileAligned
from policies.chunking.steady_state import steady_state_seconds
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi

BLOCK = 16
WARM_UP, COUNTED = 2, 2
"""Generations of requests - as many as the batch holds - before measuring, and measured. The states repeat exactly."""

Scheme = Literal["baseline", "orca_best", "orca_worst", "sarathi", "sarathi_unaligned"]


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


@dataclass(eq=False)
class SteadyState:
    """Measures loads on one simulated GPU; asks for the same one twice cost nothing.

    num_asked: loads that were asked for; whoever wants to know sets it to 0 before.
    """

    cost: ProfileCost
    num_asked: int = 0
    _known: dict[Any, float] = field(default_factory=dict)

    def seconds(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Seconds for each request ended."""
        self.num_asked += 1
        key = (scheme, load, chunk if scheme.startswith("sarathi") else 0)
        if key not in self._known:
            self._known[key] = self._run(scheme, load, chunk)
        return self._known[key]

    def gain(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Throughput over the baseline's."""
        return self.seconds("baseline", load) / self.seconds(scheme, load, chunk)

    def provenance(self) -> dict[str, Any]:
        """Where the times come from."""
        return self.cost.provenance()

    def origin(self) -> str:
        """The same in a few words."""
        return f"{self.cost.spec.name} simulated with profile {self.cost.profile.name}"

    def close(self) -> None:
        """Nothing to give back."""

    def _run(self, scheme: Scheme, load: Load, chunk: int) -> float:
        begin, end = counted(simulate(SimExecutor(self.cost), self.cost, scheme, load, chunk), load, COUNTED)
        return (end - begin) / (COUNTED * load.batch)


def simulate(executor: SimExecutor, cost: ProfileCost, scheme: Scheme, load: Load, chunk: int = 256) -> RunRecord:
    """Serve as many generations as are warm-up, counted, and needed to keep the batch full until these have ended.

    Synchronously, as the paper's systems ran: its KV cache holds no more than the batch, and in an asynchronous loop blocks
    come free an iteration late.
    """
    engine = Engine(
        policy_of(scheme, chunk),
        executor,
        limits_of(load, tile_of(cost, chunk)),
        cost,
        num_blocks=load.batch * blocks_for(load.length, BLOCK),
        block_size=BLOCK,
        asynchronous=False,
    )
    engine.submit(requests_of(scheme, load, WARM_UP + COUNTED + 1))
    return engine.run()


def limits_of(load: Load, tile: int) -> Limits:
    """Nothing but the batch limits an iteration."""
    return Limits(load.batch, max_tokens=load.batch * load.length, max_request_tokens=load.length, tile=tile)


def tile_of(cost: ProfileCost, chunk: int) -> int:
    """The tile that policies are told: one that divides the chunk. What tiles cost stays as it is."""
    return gcd(cost.profile.ceilings.tile, chunk)


def requests_of(scheme: Scheme, load: Load, generations: int, vocabulary: Vocabulary | None = None) -> list[Request]:
    """As many requests as the batch holds, `generations` times, staggered as the scheme asks."""
    workload = ClosedBatch(
        length=load.length,
        pd_ratio=load.pd_ratio,
        batch=load.batch,
        num_requests=generations * load.batch,
        stagger="even" if scheme == "orca_best" else 0,
    )
    return workload.requests(vocabulary)


def counted(record: RunRecord, load: Load, generations: int) -> tuple[float, float]:
    """Seconds between which that many generations ended, those of the warm-up not counted."""
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
