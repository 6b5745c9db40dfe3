"""Replays a recorded run and compares another policy's plans with the recorded ones, view by view.

The engine carries out the recorded plans; the recorded clock and step ends replace the executor. So nothing is
computed, and the same views appear in the same order on any machine. The other policy's plans are not carried out: a policy
that remembers its own plans, rather than reading the view, may go wrong here.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from cbatch.cost import CostModel
from cbatch.errors import CbatchError, ReplayError
from cbatch.executor import Executor, Step, StepResult
from cbatch.kv import KVSize
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.plan_check import check_rules
from cbatch.policy import Policy
from cbatch.replay.decisions import Decided, Decision, StepEnd, look, read
from cbatch.request import Request
from cbatch.server import Server
from cbatch.stall import ENDLESS
from cbatch.view import View

STOP_TOKEN = 1
"""Stands for each request's end-of-sequence token: a recording keeps only its position."""


class Recorded(NamedTuple):
    """A run's decisions and everything that they depend on except its requests.

    events: in order. times: the clock's readings after the last event. rows: of another host, whose requests hold their place until
        their last token is there; 0 for this package's engine. The others are as given to the engine and executor.
    """

    limits: Limits
    num_blocks: int
    block_size: int
    num_stages: int
    asynchronous: bool
    events: Sequence[Decision | StepEnd]
    times: tuple[float, ...] = ()
    rows: int = 0


class Answer(NamedTuple):
    """The plan that the other policy makes. problem: why it is illegal or failed; empty if it could be carried out."""

    decided: Decided
    problem: str


class Comparison(NamedTuple):
    """The recorded decision at one view, and the other policy's answer."""

    recorded: Decision
    answer: Answer

    @property
    def same(self) -> bool:
        """Whether both compute, preempt, reject and reserve the same; notes do not count."""
        return self._same(note="")

    @property
    def same_but_reserves(self) -> bool:
        """Whether they differ, and in nothing but the KV cache that they reserve."""
        return not self.same and self._same(note="", reserve=())

    def _same(self, **but: Any) -> bool:
        recorded, answer = self.recorded.decided, self.answer.decided
        return not self.answer.problem and answer._replace(**but) == recorded._replace(**but)


Report = Callable[[Comparison], None]


def replay(recorded: Recorded, requests: Sequence[Request], policy: Policy, cost: CostModel, report: Report) -> None:
    """Replay a recorded run and call `report` with what `policy` plans at each of its views.

    Args:
        requests: those of the run, not begun; requests that may end with an end-of-sequence token stop at `STOP_TOKEN`.
        cost: the cost model of the recorded run.

    Raises:
        ReplayError: a view differs from the recorded one, so that plans cannot be compared from there on.
        PlanError: the recorded run ended with this error.
    """
    decisions = [event for event in recorded.events if isinstance(event, Decision)]
    step_ends = [event for event in recorded.events if isinstance(event, StepEnd)]
    times = chain(chain.from_iterable(event.times for event in recorded.events), recorded.times)
    replayed = ReplayPolicy(policy, decisions, requests, report)
    executor = ReplayExecutor(times, step_ends, recorded.num_stages)
    kv = KVSize(recorded.num_blocks, recorded.block_size)
    server = Server(executor, recorded.limits, cost, kv, recorded.asynchronous, ENDLESS)  # the recording ends the run
    engine = server.engine(replayed, requests)
    with suppress(_EndOfRecordingError):  # the recorded run did not finish
        engine.run()


class ReplayExecutor(Executor):
    """Returns the recorded times and stops, in order."""

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
            raise _EndOfRecordingError
        stopped = [request.id in end.stopped for request in in_flight.requests]
        return StepResult(np.array(stopped, np.int32) * STOP_TOKEN, end.started, end.ended)

    def now(self) -> float:
        """After the last recorded time the clock stands still."""
        self._last = next(self._times, self._last)
        return self._last


class ReplayPolicy:
    """Repeats recorded plans, and reports what another policy plans at each view."""

    def __init__(
        self, policy: Policy, decisions: Iterable[Decision], requests: Iterable[Request], report: Report
    ) -> None:
        self.policy = policy
        self._decisions, self._report = iter(decisions), report
        self._requests = {request.id: request for request in requests}

    def plan(self, view: View) -> Plan:
        recorded = next(self._decisions, None)
        if recorded is None:
            raise _EndOfRecordingError
        _check_same_view(recorded, view)
        self._report(Comparison(recorded, ask(self.policy, view)))
        return self._rebuild(recorded.decided)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)  # on_arrival, on_step and on_finish

    def _rebuild(self, decided: Decided) -> Plan:
        known = self._requests
        plan = Plan(((known[id_], count) for id_, count in decided.entries), wake_at=decided.wake_at, note=decided.note)
        plan.preempt = [known[id_] for id_ in decided.preempt]
        plan.reject = [(known[id_], why) for id_, why in decided.reject]
        plan.reserve = {known[id_]: tokens for id_, tokens in decided.reserve}
        plan.pad_to = decided.pad_to
        return plan


def ask(policy: Policy, view: View) -> Answer:
    """Returns the policy's plan, which is not carried out, or why it made none."""
    decided = Decided(())
    try:
        plan = policy.plan(view)
        decided = read(plan)
        check_rules(plan, view, type(policy).__name__)
    except CbatchError as error:
        return Answer(decided, str(error))
    except Exception as error:
        return Answer(decided, f"plan() raised {type(error).__name__}: {error}")
    return Answer(decided, "")


class _EndOfRecordingError(CbatchError):
    """The recording ends before the run does."""


def _check_same_view(recorded: Decision, view: View) -> None:
    """Raises ReplayError naming the first field that differs."""
    for name, before, now in zip(recorded.seen._fields, recorded.seen, look(view), strict=True):
        if before != now:
            problem = f"iteration {recorded.iteration}: the view's {name} was {before} and is now {now}"
            raise ReplayError(f"{problem}; the run was recorded with other code or other requests; record it again")
