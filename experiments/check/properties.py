"""The properties that a policy may have. A policy has a property if no history violates the property.

Every policy must have the first three properties. The other properties distinguish policies: lacking one is not an error.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from cbatch.replay.decisions import Decided, Decision
from experiments.check.scenario import LATER, Ending, PolicyHistory
from experiments.report.text import count_text

OVERTAKEN_LIMIT = 8
"""A waiting request starves if more than this many times `batch` later requests are admitted before it."""


class Violation(NamedTuple):
    """A violation of a property. decision: index of the violating decision. why: explains the violation."""

    decision: int
    why: str


Violations = Iterator[Violation]


class Property(NamedTuple):
    """A property of policies.

    name: for the command line. needed: whether every policy must have the property. text: short description.
    violations: called with a history and the policy's chunk.
    """

    name: str
    needed: bool
    violations: Callable[[PolicyHistory, int], Violations]
    text: str

    def violation(self, history: PolicyHistory, chunk: int) -> Violation | None:
        """Returns the first violation; None if the history satisfies the property."""
        return next(self.violations(history, chunk), None)


def _find_ending(ending: Ending, history: PolicyHistory, chunk: int) -> Violations:
    if history.ending is ending:
        yield Violation(len(history.decisions) - 1, history.why)


def _find_other_plan(history: PolicyHistory, chunk: int) -> Violations:
    """Finds the first plan that differs between two runs of the same workload with copies of the same policy."""
    if history.second_run is not None and history.second_run != history.decisions:
        pairs = enumerate(zip_longest(history.decisions, history.second_run))
        index, pair = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        first, other = (made and made.decided for made in pair)
        yield Violation(min(index, len(history.decisions) - 1), f"a second run decides {_text(other, first)}")


def _find_unsteady_plan(history: PolicyHistory, chunk: int) -> Violations:
    """Finds a plan that differs from the preceding plan, which decoded all running requests, although nothing changed."""
    plans = [(index, history.decisions[index].decided, "nothing has changed") for index in sorted(history.repeatable)]
    if history.delayed is not None:
        plans.append((*history.delayed, f"only {LATER:g} s have passed"))
    for index, plan, change in plans:
        before = history.decisions[index - 1].decided
        if plan != before:
            yield Violation(index, f"{_text(before, plan)} is followed by {_text(plan, before)}, although {change}")


def _find_starvation(history: PolicyHistory, chunk: int) -> Violations:
    """Finds admissions that make an earlier, waiting request starve."""
    overtakers: dict[int, set[int]] = {}  # by waiting request: later requests admitted while it waits
    for index, decision in enumerate(history.decisions):
        waiting = set(decision.seen.waiting)
        admitted = [id_ for id_, _ in decision.decided.entries if id_ in waiting]
        overtakers = {id_: overtakers.get(id_, set()) for id_ in waiting.difference(admitted)}
        for id_, later in overtakers.items():
            later.update(other for other in admitted if history.first_seen[other] > history.first_seen[id_])
            if len(later) > OVERTAKEN_LIMIT * history.scenario.batch:
                yield Violation(index, f"request {id_} waits while {len(later)} that came after it are admitted")


def _find_idling(history: PolicyHistory, chunk: int) -> Violations:
    """Finds iterations that compute nothing, although a running request, or every waiting request, could be computed."""
    for index, decision in enumerate(history.decisions):
        if decision.decided.entries or decision.decided.preempt or decision.decided.reject:
            continue
        for id_, computed, ready, *_ in decision.seen.running:
            if ready and _next_fits(history, decision, computed):
                left = count_text(ready, "token")
                yield Violation(index, f"nothing is computed, although request {id_} has {left} to compute")
        if _all_fit(history, decision):
            yield Violation(index, "nothing is computed, although any waiting request would fit")


def _find_closed_batch(history: PolicyHistory, chunk: int) -> Violations:
    """Finds decode-only iterations, although every waiting request could be admitted."""
    for index, decision in enumerate(history.decisions):
        planned = dict(decision.decided.entries).keys()
        free_places = history.scenario.batch - len(planned)
        decodes_only = planned and planned <= _decoding(history, decision).keys()
        if decodes_only and free_places > 0 and _all_fit(history, decision):
            why = f"only decodes are computed, although {free_places} place{'s are' if free_places > 1 else ' is'} free and any waiting request would fit"
            yield Violation(index, why)


def _find_stall(history: PolicyHistory, chunk: int) -> Violations:
    """Finds running requests whose next token is left out, although the KV cache has room for the token."""
    for index, decision in enumerate(history.decisions):
        planned = {id_ for id_, _ in decision.decided.entries} | set(decision.decided.preempt)
        for id_, computed in _decoding(history, decision).items():
            if planned and id_ not in planned and _next_fits(history, decision, computed):
                yield Violation(index, f"request {id_} has a token to compute and is left out")


def _find_long_gap(history: PolicyHistory, chunk: int) -> Violations:
    """Finds more than a chunk of prompt tokens between two tokens of a request, including the iteration of the second token."""
    between: dict[int, int] = {}  # by decoding request: prompt tokens since its last token
    for index, decision in enumerate(history.decisions):
        planned, decoding = dict(decision.decided.entries), _decoding(history, decision)
        prompts = sum(count for id_, count in planned.items() if id_ not in decoding)
        between = {id_: between.get(id_, 0) + prompts for id_ in decoding}
        for id_, tokens in between.items():
            if tokens > chunk:
                yield Violation(
                    index,
                    f"{tokens} prompt tokens, more than {chunk=}, are computed between two tokens of request {id_}",
                )
        between.update(dict.fromkeys(planned.keys() & decoding.keys(), 0))


_STEADY = f"a plan of decodes alone is repeated until something changes, even {LATER:g} s later; required of a policy with steady = True"
_FAIR = f"no starvation: at most {OVERTAKEN_LIMIT} x batch later requests pass one that waits"
_ITERATION_LEVEL = "admission at every iteration: no decodes alone while any waiting request would fit"
_STALL_FREE = "every decode gets its token in each iteration that computes any, unless the KV cache has no block for it"
_BOUNDED = "at most as many prompt tokens as `chunk=`, 4 by default, lie between two tokens of a request"

PROPERTIES = (
    Property("legal", True, partial(_find_ending, Ending.ILLEGAL), "every plan keeps the rules, and nothing raises"),
    Property("kv", True, partial(_find_ending, Ending.OVER_COMMITTED), "the KV cache is never over-committed"),
    Property("ends", True, partial(_find_ending, Ending.ENDLESS), "every run ends"),
    Property("deterministic", False, _find_other_plan, "the same workload is planned the same each time"),
    Property("steady", False, _find_unsteady_plan, _STEADY),
    Property("fair", False, _find_starvation, _FAIR),
    Property("work_conserving", False, _find_idling, "no iteration is empty while any waiting request would fit"),
    Property("iteration_level", False, _find_closed_batch, _ITERATION_LEVEL),
    Property("stall_free", False, _find_stall, _STALL_FREE),
    Property("bounded_tbt", False, _find_long_gap, _BOUNDED),
)
NAMES = tuple(prop.name for prop in PROPERTIES)


def _text(plan: Decided | None, other: Decided | None) -> str:
    """Returns the text of a plan, or all of the plan's fields if the other plan has the same text."""
    return repr(plan) if str(plan) == str(other) else str(plan)


def _decoding(history: PolicyHistory, decision: Decision) -> dict[int, int]:
    """Returns the running requests with only their newest token left to compute, as id to computed tokens."""
    seen = decision.seen
    ready = (progress for progress in seen.running if progress.ready and progress.id in seen.decoding)
    return {progress.id: progress.computed for progress in ready}


def _all_fit(history: PolicyHistory, decision: Decision) -> bool:
    """Returns whether there are waiting requests, and every one could be admitted at its full length."""
    scenario = history.scenario
    if not decision.seen.waiting or len(decision.seen.running) >= scenario.limits.max_running:
        return False
    longest = max(scenario.arrivals[id_].tokens for id_ in decision.seen.waiting)
    free_tokens = scenario.max_tokens - sum(count for _, count in decision.decided.entries)
    return scenario.blocks_for(longest) <= _free_after(history, decision) and longest <= free_tokens


def _next_fits(history: PolicyHistory, decision: Decision, computed: int) -> bool:
    """Returns whether the KV cache has room for one more token of a request after the plan."""
    blocks_for = history.scenario.blocks_for
    return blocks_for(computed + 1) - blocks_for(computed) <= _free_after(history, decision)


def _free_after(history: PolicyHistory, decision: Decision) -> int:
    """Returns a lower bound of the KV blocks that are free after the plan: with a prefix cache newcomers may need fewer."""
    blocks_for, reserved = history.scenario.blocks_for, dict(decision.decided.reserve)
    before = {progress.id: progress.computed for progress in decision.seen.running}
    free = decision.seen.num_free
    for id_, count in decision.decided.entries:
        computed = before.get(id_, 0)
        finds = history.scenario.eviction is not None and id_ not in before
        until = history.scenario.arrivals[id_].tokens if finds else computed + count
        free -= blocks_for(max(until, reserved.get(id_, 0))) - blocks_for(computed)
    return free
