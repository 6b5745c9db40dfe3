"""A policy and an executor without a will of their own, for state machines: what is planned, and which requests stop, is told."""

from typing import Any, NamedTuple

import numpy as np

from cbatch import Executor, Plan, Request, Step, StepResult, View

STOP, OTHER = 1, 7


class Handle(NamedTuple):
    step: Step
    tokens: Any


class Told:
    """Plans what it is told, and writes down what it hears."""

    def __init__(self) -> None:
        self.next = Plan()
        self.heard: list[tuple[str, Any]] = []

    def plan(self, view: View) -> Plan:
        return self.next

    def on_arrival(self, request: Request) -> None:
        self.heard.append(("arrival", request.id))

    def on_wait(self, request: Request) -> None:
        self.heard.append(("wait", request.id))

    def on_tokens(self, requests: list[Request]) -> None:
        self.heard.append(("tokens", [request.id for request in requests]))

    def on_finish(self, request: Request) -> None:
        self.heard.append(("finish", request.id))


class Clockwork(Executor):
    """Computes an iteration in a second; a request that stops generates `STOP` in its time."""

    def __init__(self, machine: Any, num_stages: int, needs_tokens: bool) -> None:
        self.machine, self.num_stages, self.needs_tokens, self.time = machine, num_stages, needs_tokens, 0.0

    def launch(self, step: Step) -> Handle:
        self.machine.check_step(step)
        new = [self.machine.model.requests[request.id] for request in step.requests]
        stops = [plain.ends_after == plain.total - plain.prompt for plain in new]
        return Handle(step, np.where(stops, STOP, OTHER).astype(np.int32) if self.needs_tokens else None)

    def wait(self, in_flight: Handle) -> StepResult:
        self.time += 1
        return StepResult(in_flight.tokens, self.time - 1, self.time)

    def ends_at(self, in_flight: Handle) -> float:
        return self.time + 1

    def now(self) -> float:
        return self.time

    def sleep_until(self, time: float) -> None:
        self.time = time
