"""Small workloads with their limits, and the history of a policy that serves such a workload."""

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial

from cbatch import BatchShape, CostFunction, CostModel, Eviction, KVSize, Limits, Policy, Request, Server
from cbatch.arrivals import Listed
from cbatch.described import name_of_class
from cbatch.errors import CbatchError, ConfigError, OverCommitError, StallError, type_and_message
from cbatch.kv import blocks_for
from cbatch.policy import copy_policy
from cbatch.replay.decisions import Decided, Decision, StepEnd, record_decisions
from cbatch.sim import SimExecutor
from cbatch.sim.drafter import SurvivalsDrafter
from cbatch.stall import Patience

EVEN_COST = CostFunction(lambda shape: 1e-3 + 1e-5 * shape.num_tokens)
"""Predicts 1 ms per iteration and 10 us per token."""

DRAFTER = SurvivalsDrafter([0.7, 0.4])  # for policies that draft
SHORT = Patience(empty_plans=50)  # suffices for scenarios, where few requests take more iterations
LATER = 900.0  # seconds inserted between two decode-only iterations, to test whether the policy's plan depends on time


@dataclass(frozen=True)
class Arrival:
    """A request: tokens of prompt and output, and the iteration of the arrival."""

    prompt: int
    output: int
    iteration: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    def __str__(self) -> str:
        return f"{self.prompt} prompt and {self.output} new tokens, from iteration {self.iteration} on"


@dataclass(frozen=True)
class Scenario:
    """A workload, and the limits of `cbatch.Limits` and `cbatch.Engine`.

    eviction: adds a prefix cache. The prompts of requests 2 and 3 then share a prefix, as do the prompts of all other requests.
    """

    arrivals: tuple[Arrival, ...]
    batch: int
    max_tokens: int
    num_blocks: int
    block_size: int
    asynchronous: bool
    eviction: Eviction | None = None

    @property
    def limits(self) -> Limits:
        longest = max(arrival.tokens for arrival in self.arrivals)
        return Limits(self.batch, self.max_tokens, longest, tile=1, max_drafts=len(DRAFTER.survivals))

    def source(self) -> Listed:
        """Returns the requests, with ids in the order of `arrivals`, and their iterations."""
        requests, size = [], 0 if self.eviction is None else self.block_size
        for id_, arrival in enumerate(self.arrivals):
            first, lengths = (id_ in (2, 3)) * 10**6, (arrival.prompt, arrival.output)
            hashes = tuple(range(first, first + arrival.prompt // size)) if size else ()
            requests.append(Request(id_, *lengths, prefix_hashes=hashes, hash_block=size))
        return Listed(requests, {id_: arrival.iteration for id_, arrival in enumerate(self.arrivals)})

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def __str__(self) -> str:
        kv = f"kv_tokens={self.num_blocks * self.block_size} block_size={self.block_size}"
        runtime = "async" if self.asynchronous else "sync"
        name = self.eviction and name_of_class(type(self.eviction))
        cache = f" prefix_cache=true eviction={name}: prompts 2 and 3 begin alike, and so do all others" * bool(name)
        return f"batch={self.batch} max_tokens={self.max_tokens} {kv} runtime={runtime}{cache}"


class Ending(Enum):
    """How a run ends.

    COMPLETE: all requests end. ILLEGAL: a plan breaks a rule, or an exception is raised. OVER_COMMITTED: a plan takes more KV
    blocks than are free. ENDLESS: the run is stopped for lack of progress. REFUSED: the policy's `check` raises; nothing is served.
    """

    COMPLETE = 0
    ILLEGAL = 1
    OVER_COMMITTED = 2
    ENDLESS = 3
    REFUSED = 4


@dataclass(frozen=True, eq=False)
class PolicyHistory:
    """A policy's plans for a scenario, with the views before each plan, and how the run ended.

    why: explains any ending except COMPLETE.
    repeatable: indices of the decisions for which a steady policy would not be called.
    delayed: (index, plan): the plan at this index if the policy is called `LATER` seconds later; None if no index is repeatable.
    second_run: the decisions of a second run, if there was one.
    """

    scenario: Scenario
    decisions: list[Decision]
    ending: Ending
    why: str = ""
    repeatable: Set[int] = frozenset()
    delayed: tuple[int, Decided] | None = None
    second_run: list[Decision] | None = None

    @cached_property
    def first_seen(self) -> dict[int, int]:
        """Returns the index of the first decision whose view contains each request, by id."""
        indices: dict[int, int] = {}
        for index, decision in enumerate(self.decisions):
            for id_ in (*decision.seen.waiting, *(id_ for id_, *_ in decision.seen.running)):
                indices.setdefault(id_, index)
        return indices


def play(
    policy: Policy | Callable[[], Policy], scenario: Scenario, patience: Patience = SHORT, cost: CostModel = EVEN_COST
) -> PolicyHistory:
    """Serves a scenario in simulation, twice if three or more requests run asynchronously, and once more with a pause.

    policy: copied for each run; or a function that builds the policy. cost: becomes `view.cost`.
    """
    build = partial(copy_policy, policy) if hasattr(policy, "plan") else policy
    serve = partial(_serve, build, scenario, patience, cost)
    history = serve()
    if lasting := [index for index in history.repeatable if history.decisions[index - 1].decided.wake_at is None]:
        index = max(lasting, key=lambda index: len(history.decisions[index].seen.waiting))
        if len(decisions := serve(index).decisions) > index:
            history = replace(history, delayed=(index, decisions[index].decided))
    if len(scenario.arrivals) < 3 or not scenario.asynchronous:
        return history
    return replace(history, second_run=serve().decisions)


def _serve(
    build: Callable[[], Policy], scenario: Scenario, patience: Patience, cost: CostModel, delayed: int | None = None
) -> PolicyHistory:
    """Serves a scenario; stops after many more plans than the scenario can need.

    delayed: index of the last decision, before which `LATER` seconds pass; None: serve to the end without a pause.
    """
    decisions: list[Decision] = []
    repeatable: set[int] = set()
    most_plans = patience.empty_plans + 5 * sum(arrival.tokens for arrival in scenario.arrivals)

    def record(event: Decision | StepEnd) -> None:
        if isinstance(event, StepEnd):
            return
        if engine.foresee(ends=True):
            repeatable.add(len(decisions))
        decisions.append(event._replace(decided=event.decided._replace(note="")))  # no property concerns notes
        if len(decisions) == delayed:
            server.executor.sleep_until(server.executor.now() + LATER)
        if len(decisions) > (most_plans if delayed is None else delayed):
            raise StallError("requests are planned and preempted again and again, and none ends")

    ending, why = Ending.COMPLETE, ""
    try:
        kv = KVSize(scenario.num_blocks, scenario.block_size)
        how = scenario.asynchronous, patience, scenario.eviction
        server = Server(SimExecutor(EVEN_COST, drafter=DRAFTER), scenario.limits, cost, kv, *how)
        try:
            engine = server.engine(build(), scenario.source())
        except ConfigError as error:
            return PolicyHistory(scenario, decisions, Ending.REFUSED, str(error))
        with record_decisions(engine, record):
            engine.run()
    except StallError as error:
        ending, why = Ending.ENDLESS, str(error)
    except OverCommitError as error:
        ending, why = Ending.OVER_COMMITTED, str(error)
    except CbatchError as error:
        ending, why = Ending.ILLEGAL, str(error)
    except Exception as error:
        problem = f"the engine failed ({type_and_message(error)})"
        ending, why = Ending.ILLEGAL, f"{problem}; a policy may change nothing but its own state"
    return PolicyHistory(scenario, decisions, ending, why, repeatable)


def trial(policy: Callable[[], Policy], cost: CostModel = EVEN_COST) -> PolicyHistory:
    """Returns what the policy does with three requests and room for all their tokens."""
    arrivals = (Arrival(500, 3, 0), Arrival(900, 3, 0), Arrival(500, 3, 4))
    return play(policy, Scenario(arrivals, 256, 1 << 16, 1024, 16, asynchronous=False), cost=cost)


def predicts(policy: Callable[[], Policy]) -> bool:
    """Returns whether the policy reads `view.cost` in a trial, before real requests wait or weights are loaded."""
    shapes: list[BatchShape] = []

    def predict(shape: BatchShape) -> float:
        shapes.append(shape)
        return 1e-3

    trial(policy, CostFunction(predict))
    return bool(shapes)
