"""The properties: each is a function of a history that returns the first decision that violates it, and why.

A property holds for a policy if no history violates it. Every policy needs the first three; the others distinguish
policies, and lacking one is not an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cbatch import PlanError
from cbatch.replay.decisions import Decision
from experiments.check.scenario import History

OVERTAKEN_LIMIT = 8
"""A waiting request starves if more than this many times `batch` later ones are admitted before it."""


class Violation(NamedTuple):
    """place: index of the decision that violates a property."""

    place: int
    why: str


class Property(NamedTuple):
    """
    name: for the command line. text: the property in a few words. needed: whether every policy must have it.
    violation: called with a history and the policy's chunk; None if the history satisfies the property.
    """

    name: str
    text: str
    needed: bool
    violation: Callable[[History, int], Violation | None]


def _legal(history: History, chunk: int) -> Violation | None:
    error = history.error
    if error is None or _over_committed(history, chunk):
        return None
    return Violation(len(history.decisions) - 1, str(error))


def _over_committed(history: History, chunk: int) -> Violation | None:
    if isinstance(history.error, PlanError) and "KV blocks" in str(history.error):
        return Violation(len(history.decisions) - 1, str(history.error))
    return None


def _ends(history: History, chunk: int) -> Violation | None:
    if history.endless:
        return Violation(
            len(history.decisions) - 1, "requests are planned and preempted again and again, and none ends"
        )
    return None


def _starves(history: History, chunk: int) -> Violation | None:
    """Finds the first admission that makes an earlier, waiting request starve."""
    ahead: dict[int, set[int]] = {}  # by waiting request, the later ones that were admitted meanwhile
    limit = OVERTAKEN_LIMIT * history.scenario.batch
    for place, decision in enumerate(history.decisions):
        waiting = set(decision.seen.waiting)
        admitted = [id_ for id_, _ in decision.decided.entries if id_ in waiting]
        left = waiting.difference(admitted)
        ahead = {id_: ahead.get(id_, set()) for id_ in left}
        for id_ in left:
            ahead[id_].update(other for other in admitted if history.arrived_at[other] > history.arrived_at[id_])
            if len(ahead[id_]) > limit:
                return Violation(place, f"request {id_} waits while {len(ahead[id_])} that came after it are admitted")
    return None


def _idles(history: History, chunk: int) -> Violation | None:
    """Finds an iteration that computes nothing, although a running request or any waiting one could compute."""
    for place, decision in enumerate(history.decisions):
        if decision.decided.entries or decision.decided.preempt or decision.decided.reject:
            continue
        for id_, computed, ready in decision.seen.running:
            if ready and _free_after(history, decision) >= _blocks_of_next(history, computed):
                return Violation(place, f"nothing is computed, although request {id_} has {ready} tokens to compute")
        if _all_fit(history, decision):
            return Violation(place, "nothing is computed, although any waiting request would fit")
    return None


def _decodes_alone(history: History, chunk: int) -> Violation | None:
    """Finds an iteration of decodes only, although any waiting request could be admitted."""
    for place, decision in enumerate(history.decisions):
        planned, decoding = dict(decision.decided.entries), dict(_decoding(history, decision))
        free_places = history.scenario.batch - len(planned)
        if planned and planned.keys() <= decoding.keys() and free_places > 0 and _all_fit(history, decision):
            why = f"only decodes are computed, although {free_places} places are free and any waiting request would fit"
            return Violation(place, why)
    return None


def _stalls(history: History, chunk: int) -> Violation | None:
    """Finds a running request whose next token is left out, although the KV cache has room for it."""
    for place, decision in enumerate(history.decisions):
        planned = {id_ for id_, _ in decision.decided.entries} | set(decision.decided.preempt)
        for id_, computed in _decoding(history, decision):
            if planned and id_ not in planned and _free_after(history, decision) >= _blocks_of_next(history, computed):
                return Violation(place, f"request {id_} has a token to compute and is left out")
    return None


def _delays(history: History, chunk: int) -> Violation | None:
    """Finds more than a chunk of prompt tokens between two tokens of a request, its own iteration counted."""
    between: dict[int, int] = {}
    for place, decision in enumerate(history.decisions):
        decoding = dict(_decoding(history, decision))
        prompts = sum(count for id_, count in decision.decided.entries if id_ not in decoding)
        planned = dict(decision.decided.entries)
        between = {id_: between.get(id_, 0) + prompts for id_ in decoding}
        for id_, tokens in between.items():
            if tokens > chunk:
                return Violation(place, f"{tokens} prompt tokens are computed between two tokens of request {id_}")
        for id_ in planned.keys() & decoding.keys():
            between[id_] = 0
    return None


PROPERTIES = (
    Property("legal", "every plan keeps the rules, and nothing raises", True, _legal),
    Property("kv", "the KV cache is never over-committed", True, _over_committed),
    Property("ends", "every run ends", True, _ends),
    Property(
        "fair", f"no starvation: at most {OVERTAKEN_LIMIT} x batch later requests pass one that waits", False, _starves
    ),
    Property(
        "work_conserving", "work-conserving: no iteration is empty while any waiting request would fit", False, _idles
    ),
    Property(
        "iteration_level",
        "admission at every iteration: no decodes alone while any waiting request would fit",
        False,
        _decodes_alone,
    ),
    Property("stall_free", "stall-free: every running request gets a token in every iteration", False, _stalls),
    Property(
        "bounded_tbt", "bounded time between tokens: at most a chunk of prompt tokens lies between two", False, _delays
    ),
)
NAMES = tuple(prop.name for prop in PROPERTIES)


def _decoding(history: History, decision: Decision) -> Iterator[tuple[int, int]]:
    """Yields (id, tokens computed) of the running requests that have only their newest token left to compute."""
    for id_, computed, ready in decision.seen.running:
        if ready == 1 and computed >= history.scenario.asks[id_].prompt:
            yield id_, computed


def _all_fit(history: History, decision: Decision) -> bool:
    """Returns whether there are waiting requests, and each could be admitted with room for its longest length."""
    scenario = history.scenario
    if not decision.seen.waiting or len(decision.seen.running) >= scenario.limits.max_running:
        return False
    longest = max(scenario.asks[id_].tokens for id_ in decision.seen.waiting)
    free_tokens = scenario.max_tokens - sum(count for _, count in decision.decided.entries)
    return scenario.blocks_for(longest) <= _free_after(history, decision) and longest <= free_tokens


def _free_after(history: History, decision: Decision) -> int:
    """Returns the KV blocks that are free after the plan has taken its own."""
    scenario, before = history.scenario, {id_: computed for id_, computed, _ in decision.seen.running}
    reserved = dict(decision.decided.reserve)
    taken = 0
    for id_, count in decision.decided.entries:
        computed = before.get(id_, 0)
        taken += scenario.blocks_for(max(computed + count, reserved.get(id_, 0))) - scenario.blocks_for(computed)
    return decision.seen.num_free - taken


def _blocks_of_next(history: History, computed: int) -> int:
    """Returns the KV blocks (0 or 1) that one more token takes."""
    return history.scenario.blocks_for(computed + 1) - history.scenario.blocks_for(computed)
