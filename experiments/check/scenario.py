"""Small workloads with the limits that they are served under, and the history of a policy serving one."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial

from cbatch import (
    CbatchError,
    ConfigError,
    CostFunction,
    CostModel,
    KVSize,
    Limits,
    Policy,
    PolicyError,
    Request,
    Server,
)
from cbatch.errors import StallError
from cbatch.kv import blocks_for
from cbatch.policy import copy_policy
from cbatch.replay.decisions import Decided, Decision, StepEnd, record_decisions
from cbatch.sim import SimExecutor
from cbatch.stall import Patience


@dataclass(frozen=True)
class Ask:
    """A request: tokens of prompt and output, and the iteration at which it arrives."""

    prompt: int
    output: int
    arrival: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def __str__(self) -> str:
        return f"{self.prompt} prompt and {self.output} new tokens, from iteration {self.arrival} on"


EVEN_COST = CostFunction(lambda shape: 1e-3 + 1e-5 * shape.num_tokens)
"""A constant time per token and per iteration."""


@dataclass(frozen=True)
class Scenario:
    """A workload, and the limits of `cbatch.Limits` and `cbatch.Engine`."""

    asks: tuple[Ask, ...]
    batch: int
    max_tokens: int
    num_blocks: int
    block_size: int
    asynchronous: bool

    @property
    def limits(self) -> Limits:
        return Limits(self.batch, self.max_tokens, max(ask.tokens for ask in self.asks), tile=1)

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def __str__(self) -> str:
        kv = f"kv_tokens={self.num_blocks * self.block_size} block_size={self.block_size}"
        runtime = "async" if self.asynchronous else "sync"
        return f"batch={self.batch} max_tokens={self.max_tokens} {kv} runtime={runtime}"


@dataclass(frozen=True, eq=False)
class History:
    """A policy's plans for a scenario, with the views that they were made from, and how the run ended.

    error: why the run ended early; None if all requests ended.
    endless: why it was given up; empty if it was not.
    refused: why the policy's `check` refuses the scenario's limits, so that nothing was served; empty if it takes them.
    foreseen: places of the decisions that a steady policy would not have been asked for.
    late: one of these places, and what is decided there in a run in which `LATER` passes before it; None without such a place.
    again: the plans of a second run, if there was one.
    """

    scenario: Scenario
    decisions: list[Decision]
    error: CbatchError | None
    endless: str
    foreseen: Set[int] = frozenset()
    late: tuple[int, Decided] | None = None
    again: list[Decision] | None = None
    refused: str = ""

    @cached_property
    def arrived_at(self) -> dict[int, int]:
        """The index into `decisions` of the first view that shows each request."""
        found: dict[int, int] = {}
        for place, decision in enumerate(self.decisions):
            for id_ in (*decision.seen.waiting, *(id_ for id_, *_ in decision.seen.running)):
                found.setdefault(id_, place)
        return found


SHORT = Patience(empty_plans=50)
"""Suffices for scenarios, in which few requests take more iterations."""


LATER = 900.0
"""Seconds that pass between two iterations of decodes alone, to see whether a policy then plans in another way."""


def play(
    policy: Policy | Callable[[], Policy], scenario: Scenario, patience: Patience = SHORT, cost: CostModel = EVEN_COST
) -> History:
    """Serve a scenario in simulation; twice where three or more requests run asynchronously, and once with a pause.

    policy: copied for each run, or what builds it anew. cost: what the policy finds at `view.cost`.
    """
    fresh = partial(copy_policy, policy) if hasattr(policy, "plan") else policy
    serve = partial(_play, fresh, scenario, patience, cost)
    history = serve()
    if history.foreseen:
        place = max(history.foreseen, key=lambda place: len(history.decisions[place].seen.waiting))
        if len(decisions := serve(place).decisions) > place:
            history = replace(history, late=(place, decisions[place].decided))
    if len(scenario.asks) < 3 or not scenario.asynchronous:
        return history
    return replace(history, again=serve().decisions)


def _play(
    fresh: Callable[[], Policy], scenario: Scenario, patience: Patience, cost: CostModel, late: int | None = None
) -> History:
    """Gives up after many more plans than it can need. late: the decision, the last one, before which `LATER` passes."""
    decisions: list[Decision] = []
    foreseen: set[int] = set()
    most_plans = patience.empty_plans + 5 * sum(ask.tokens for ask in scenario.asks)

    def hear(event: Decision | StepEnd) -> None:
        if isinstance(event, Decision):
            if engine.foresee(ends=True):
                foreseen.add(len(decisions))
            decisions.append(event)
            if len(decisions) == late:
                server.executor.sleep_until(server.executor.now() + LATER)
            if len(decisions) > (most_plans if late is None else late):
                raise StallError("requests are planned and preempted again and again, and none ends")

    error: CbatchError | None = None
    try:
        kv = KVSize(scenario.num_blocks, scenario.block_size)
        server = Server(SimExecutor(EVEN_COST), scenario.limits, cost, kv, scenario.asynchronous, patience)
        asks = enumerate(scenario.asks)
        requests = (Request(id_, ask.prompt, ask.output, arrival_iteration=ask.arrival) for id_, ask in asks)
        try:
            engine = server.engine(fresh(), requests)
        except ConfigError as refusal:
            return History(scenario, decisions, None, "", refused=str(refusal))
        with record_decisions(engine, hear):
            engine.run()
    except StallError as raised:
        return History(scenario, decisions, None, str(raised), foreseen)
    except CbatchError as raised:
        error = raised
    except Exception as raised:
        found = f"{type(raised).__name__}: {' '.join(str(raised).split())}"
        error = PolicyError(f"the engine failed ({found}); a policy may change nothing but its own state")
    return History(scenario, decisions, error, "", foreseen)
