"""Runs a policy in simulation with unit costs and writes its schedule as text, one line per iteration."""

from collections.abc import Iterable

from cbatch import BatchShape, Engine, Limits, Plan, Policy, Request, RunRecord, Server, View
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor


class UnitCost:
    """Every iteration takes one second."""

    def predict(self, shape: BatchShape) -> float:
        return 1.0


class Logged:
    """Any policy, with a line written for each plan that computes something: `request:tokens`, then preemptions."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lines: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.policy, name)

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        if len(plan):
            preempted = [f"-{request.id}" for request in plan.preempt]
            self.lines.append(" ".join([*(f"{request.id}:{count}" for request, count in plan), *preempted]))
        return plan


def make_engine(
    policy: Policy, limits: Limits, *, num_blocks: int = 1000, block_size: int = 4, asynchronous: bool = False
) -> Engine:
    server = Server(SimExecutor(UnitCost()), limits, UnitCost(), KVSize(num_blocks, block_size), asynchronous)
    return server.engine(policy)


def schedule(
    policy: Policy,
    lengths: Iterable[tuple[int, int] | Request],
    *,
    batch: int = 3,
    max_tokens: int = 100,
    tile: int = 4,
    num_blocks: int = 1000,
    block_size: int = 4,
    asynchronous: bool = False,
) -> tuple[str, RunRecord]:
    """The schedule of requests, or of requests with (prompt, output) `lengths` that all arrive at once."""
    logged = Logged(policy)
    limits = Limits(batch, max_tokens, max_request_tokens=1000, tile=tile)
    engine = make_engine(logged, limits, num_blocks=num_blocks, block_size=block_size, asynchronous=asynchronous)
    engine.submit(each if isinstance(each, Request) else Request(index, *each) for index, each in enumerate(lengths))
    record = engine.run()
    return "\n".join(logged.lines), record
