"""A closed batch of equal requests in simulation, under any policy: what `steady` measures for the paper's schemes."""

from __future__ import annotations

from typing import Literal

from cbatch import Engine, Policy
from cbatch.kv import blocks_for
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from experiments.config.composition import composed
from experiments.paper.steady import BLOCK, COUNTED, WARM_UP, Load, counted, limits_of
from experiments.workloads import ClosedBatch


def load_of(experiment: str, pd_ratio: float) -> Load:
    """The closed batch that an experiment serves, at this P:D."""
    workload = composed(experiment)["workload"]
    return Load(workload["length"], workload["batch"], pd_ratio)


def seconds_per_request(
    cost: ProfileCost, policy: Policy, load: Load, *, stagger: float | Literal["even"] = 0, tile: int | None = None
) -> float:
    """Seconds of the device between two ends, on average, once the batch is in its steady state.

    The loop is the synchronous one and the host takes no time: the asynchronous one frees a request's KV cache an
    iteration later, which shows where the cache holds the batch and nothing more.

    Args:
        stagger: iterations between the first arrivals, see `ClosedBatch`.
        tile: of the limits that the policy sees; None is the hardware's.
    """
    workload = ClosedBatch(
        length=load.length,
        pd_ratio=load.pd_ratio,
        batch=load.batch,
        stagger=stagger,
        num_requests=(WARM_UP + COUNTED + 1) * load.batch,
    )
    limits = limits_of(load, tile or cost.profile.ceilings.tile)
    engine = Engine(
        policy,
        SimExecutor(cost),
        limits,
        cost,
        num_blocks=load.batch * blocks_for(load.length, BLOCK),
        block_size=BLOCK,
        asynchronous=False,
    )
    engine.submit(workload.requests(None))
    begin, end = counted(engine.run(), load, COUNTED)
    return (end - begin) / (COUNTED * load.batch)
