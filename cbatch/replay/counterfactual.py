"""A recorded run, followed again: the engine carries the recorded plans out, and any policy may say what it would have done.

The recorded clock and step ends take the executor's place, so nothing is computed, the same views come up in the same
order on any machine, and two policies can be compared view by view. A policy that is asked does not get its own way: what
it remembers of its plans rather than finds in the view may therefore be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cbatch.cost import CostModel
from cbatch.engine import Engine
from cbatch.errors import CbatchError, ReplayError
from cbatch.executor import Step, StepResult
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.policy import Policy
from cbatch.replay.decisions import Decided, Decision, StepEnd, look, read
from cbatch.request import Request
from cbatch.validate import validate
from cbatch.view import View

STOP_TOKEN = 1
"""Stands for each request's end-of-sequence token; a followed run knows only where it came."""


class Recorded(NamedTuple):
    """A run's decisions and all that they depend on.

    events: in their order. times: the clock's answers after the last of them. asynchronous, num_blocks, block_size,
    num_stages: as given to the engine and its executor.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    num_stages: int
    asynchronous: bool
    events: Sequence[Decision | StepEnd]
    times: tuple[float, ...] = ()


class Answer(NamedTuple):
    """What a policy would have planned. problem: why that could not have been carried out; empty if it could."""

    decided: Decided
    problem: str


class Followed(NamedTuple):
    """One view of a recorded run: what was decided, and what the policy that was asked says."""

    recorded: Decision
    answer: Answer

    @property
    def same(self) -> bool:
        """Whether both compute, preempt, reject and reserve the same; notes do not count."""
        return not self.answer.problem and self.answer.decided._replace(note="") == self.recorded.decided._replace(
            note=""
        )


def follow(
    recorded: Recorded, requests: Sequence[Request], asked: Policy, cost: CostModel, heard: Callable[[Followed], None]
) -> None:
    """Go through a recorded run and tell `heard`, view by view, what was decided and what `asked` says.

    Args:
        requests: of the run, not begun; those that may end with an end-of-sequence token have `STOP_TOKEN` for it.
        cost: as the recorded policy found it in its view.

    Raises:
        ReplayError: a view is not as it was recorded, so that plans cannot be compared from there on.
        PlanError: the recorded run ended with this error.
    """
    decisions = [event for event in recorded.events if isinstance(event, Decision)]
    step_ends = [event for event in recorded.events if isinstance(event, StepEnd)]
    times = chain(chain.from_iterable(event.times for event in recorded.events), recorded.times)
    follower = Follower(asked, decisions, heard)
    engine = Engine(
        follower,
        FollowedExecutor(times, step_ends, recorded.num_stages),
        recorded.limits,
        cost,
        num_blocks=recorded.num_blocks,
        block_size=recorded.block_size,
        asynchronous=recorded.asynchronous,
    )
    engine.submit(requests)
    follower.bind(engine, requests)
    with suppress(_CutShortError):  # a run that did not get to its end
        engine.run()


class FollowedExecutor:
    """Gives the recorded answers, in the recorded order."""

    needs_tokens = False

    def __init__(self, times: Iterable[float], step_ends: Iterable[StepEnd], num_stages: int) -> None:
        self.num_stages = num_stages
        self._times, self._step_ends = iter(times), iter(step_ends)
        self._last = 0.0

    def launch(self, step: Step) -> Step:
        return step

    def wait(self, in_flight: Step) -> StepResult:
        end = next(self._step_ends, None)
        if end is None or end.iteration != in_flight.index:
            raise _CutShortError
        stopped = [request.id in end.stopped for request in in_flight.requests]
        return StepResult(np.array(stopped, np.int32) * STOP_TOKEN, end.started, end.ended)

    def now(self) -> float:
        """After the last recorded answer the clock stands still."""
        self._last = next(self._times, self._last)
        return self._last

    def sleep_until(self, time: float) -> None:
        """The recorded clock has passed it already."""

    def close(self) -> None:
        """Nothing to give back."""


class Follower:
    """A policy that repeats recorded plans and tells `heard` what another one says to each view."""

    def __init__(self, asked: Policy, decisions: Iterable[Decision], heard: Callable[[Followed], None]) -> None:
        self.asked = asked
        self._decisions, self._heard = iter(decisions), heard
        self._requests: dict[int, Request] = {}
        self._check: Callable[[Plan], object] = lambda plan: None

    def bind(self, engine: Engine, requests: Sequence[Request]) -> None:
        """The engine that follows; before it begins."""
        self._requests = {request.id: request for request in requests}
        self._check = lambda plan: validate(plan, engine.view, type(self.asked).__name__)

    def plan(self, view: View) -> Plan:
        recorded = next(self._decisions, None)
        if recorded is None:
            raise _CutShortError
        _check_same_view(recorded, view)
        self._heard(Followed(recorded, self._ask(view)))
        return self._rebuild(recorded.decided)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.asked, name)  # on_arrival, on_step and on_finish

    def _ask(self, view: View) -> Answer:
        decided = Decided(())
        try:
            plan = self.asked.plan(view)
            decided = read(plan)
            self._check(plan)
        except CbatchError as error:
            return Answer(decided, str(error))
        except Exception as error:
            return Answer(decided, f"plan() raised {type(error).__name__}: {error}")
        return Answer(decided, "")

    def _rebuild(self, decided: Decided) -> Plan:
        known = self._requests
        plan = Plan(((known[id_], count) for id_, count in decided.entries), wake_at=decided.wake_at, note=decided.note)
        plan.preempt = [known[id_] for id_ in decided.preempt]
        plan.reject = [(known[id_], why) for id_, why in decided.reject]
        plan.reserve = {known[id_]: tokens for id_, tokens in decided.reserve}
        plan.pad_to = decided.pad_to
        return plan


class _CutShortError(CbatchError):
    """The recording ends here, before its run did."""


def _check_same_view(recorded: Decision, view: View) -> None:
    """
    Raises:
        ReplayError: naming the first field that is not as it was.
    """
    for name, before, now in zip(recorded.seen._fields, recorded.seen, look(view), strict=True):
        if before != now:
            raise ReplayError(
                f"iteration {recorded.iteration}: the view's {name} was {before} and is now {now}; the run was "
                "recorded with other code, or its requests are not the same; record it anew"
            )
