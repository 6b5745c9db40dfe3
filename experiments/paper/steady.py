"""Steady states of equal requests on simulated hardware: seconds of device time that one request takes.

Every figure comes from a run of the engine with the real policy and KV accounting; `closed_form` is the exact steady
state by hand, as a check of the runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from cbatch import BatchShape, Engine, Limits, Policy
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from experiments.workloads import ClosedBatch
from policies.chunking import Fixed, TileAligned
from policies.chunking.pd_aware import steady_state_seconds
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
    """Measures loads on one simulated GPU; asks for the same one twice cost nothing."""

    cost: ProfileCost
    _known: dict[Any, float] = field(default_factory=dict)

    def seconds(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Seconds for each request ended."""
        key = (scheme, load, chunk if scheme.startswith("sarathi") else 0)
        if key not in self._known:
            self._known[key] = self._run(scheme, load, chunk)
        return self._known[key]

    def gain(self, scheme: Scheme, load: Load, chunk: int = 256) -> float:
        """Throughput over the baseline's."""
        return self.seconds("baseline", load) / self.seconds(scheme, load, chunk)

    def _run(self, scheme: Scheme, load: Load, chunk: int) -> float:
        batch, counted = load.batch, COUNTED * load.batch
        workload = ClosedBatch(length=load.length, pd_ratio=load.pd_ratio, batch=batch,
                               num_requests=(WARM_UP + COUNTED + 1) * batch,
                               stagger="even" if scheme == "orca_best" else 0)  # fmt: skip
        limits = Limits(
            batch, max_tokens=batch * load.length, max_request_tokens=load.length, tile=self.cost.profile.ceilings.tile
        )
        engine = Engine(_policy(scheme, chunk), SimExecutor(self.cost), limits, self.cost,
                        num_blocks=batch * -(-load.length // BLOCK), block_size=BLOCK)  # fmt: skip
        engine.submit(workload.requests(None))
        ends = [request.finished_at or 0.0 for request in engine.run().requests]
        first = WARM_UP * batch - 1
        return (ends[first + counted] - ends[first]) / counted


def closed_form_gain(cost: ProfileCost, load: Load, chunk: int) -> float:
    """Sarathi's gain by hand: a request lives through n = P / C' chunks with B - 1 decodes beside each."""
    prompt, decodes = load.length - load.output, load.output - 1  # the prefill samples the first token
    context = prompt + load.output // 2
    prefill = cost.predict(BatchShape(((prompt, 0),) * load.batch)) / load.batch
    decode = cost.predict(BatchShape((), load.batch, load.batch * context)) / load.batch
    mixed = steady_state_seconds(cost, chunk, load.batch, prompt, load.output)
    return (prefill + decodes * decode) / mixed


def _policy(scheme: Scheme, chunk: int) -> Policy:
    match scheme:
        case "baseline":
            return RequestLevel()
        case "sarathi":
            return Sarathi(TileAligned(chunk))
        case "sarathi_unaligned":
            return Sarathi(Fixed(chunk))
        case _:
            return Orca()
