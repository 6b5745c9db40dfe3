"""Engines in simulation with unit costs, and policies that write their plans as text, one line per iteration."""

from typing import Any

from cbatch import BatchShape, Engine, Limits, Plan, Policy, Server, View
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor


class UnitCost:
    """Every iteration takes one second."""

    def predict(self, shape: BatchShape) -> float:
        return 1.0

    def copy_seconds(self, num_out: int, num_back: int, block_size: int) -> float:
        return 0.0


class Wrapped:
    """Any policy, to which a test adds something. It does not say that it is steady."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


class Logged(Wrapped):
    """Any policy, with a line written for each plan that computes something: `request:tokens`, then preemptions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.lines: list[str] = []

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
