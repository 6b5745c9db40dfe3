"""The properties, each a question to a history: the place of the first decision that denies it, and why.

A property holds for a policy if no history denies it. The first three are asked of every policy; the others tell policies
apart, and lacking one is no mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from cbatch import PlanError
from cbatch.replay.decisions import Decision
from experiments.check.scenario import History

OVERTAKEN_LIMIT = 8
"""A request that waits while more than this many times `batch` later ones are admitted is taken to starve."""


class Denial(NamedTuple):
    """place: of the decision that denies a property. why: in words."""

    place: int
    why: str


class Property(NamedTuple):
    """
    name: for the command line. text: what holds, in a few words. needed: whether every policy must have it.
    denied: asked with a history and the chunk that the policy was given.
    """

    name: str
    text: str
    needed: bool
    denied: Callable[[History, int], Denial | None]


def _legal(history: History, chunk: int) -> Denial | None:
    error = history.error
    if error is None or _over_committed(history, chunk):
        return None
    return Denial(len(history.decisions) - 1, str(error))


def _over_committed(history: History, chunk: int) -> Denial | None:
    if isinstance(history.error, PlanError) and "KV blocks" in str(history.error):
        return Denial(len(history.decisions) - 1, str(history.error))
    return None


def _ends(history: History, chunk: int) -> Denial | None:
    if history.endless:
        return Denial(len(history.decisions) - 1, "requests are planned and preempted again and again, and none ends")
    return None


def _starves(history: History, chunk: int) -> Denial | None:
    """The first time that one request too many is admitted ahead of another that waits and came before it."""
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
                return Denial(place, f"request {id_} waits while {len(ahead[id_])} that came after it are admitted")
    return None


def _idles(history: History, chunk: int) -> Denial | None:
    """An iteration that computes nothing, although a running request could be, or any that waits."""
    for place, decision in enumerate(history.decisions):
        if decision.decided.entries or decision.decided.preempt or decision.decided.reject:
            continue
        for id_, computed, ready in decision.seen.running:
            if ready and _free_after(history, decision) >= _blocks_of_next(history, computed):
                return Denial(place, f"nothing is computed, although request {id_} has {ready} tokens to compute")
        if _all_fit(history, decision):
            return Denial(place, "nothing is computed, although whoever waits would fit")
    return None


def _decodes_alone(history: History, chunk: int) -> Denial | None:
    """An iteration of decodes alone, although whoever waits would find a place."""
    for place, decision in enumerate(history.decisions):
        planned, decoding = dict(decision.decided.entries), dict(_decoding(history, decision))
        free_places = history.scenario.batch - len(planned)
        if planned and planned.keys() <= decoding.keys() and free_places > 0 and _all_fit(history, decision):
            return Denial(
                place, f"only decodes are computed, although {free_places} places are free and whoever waits would fit"
            )
    return None


def _stalls(history: History, chunk: int) -> Denial | None:
    """A running request whose next token is left out, although the KV cache has room for it."""
    for place, decision in enumerate(history.decisions):
        planned = {id_ for id_, _ in decision.decided.entries} | set(decision.decided.preempt)
        for id_, computed in _decoding(history, decision):
            if planned and id_ not in planned and _free_after(history, decision) >= _blocks_of_next(history, computed):
                return Denial(place, f"request {id_} has a token to compute and is left out")
    return None


def _delays(history: History, chunk: int) -> Denial | None:
    """Prompt tokens that are computed between two tokens of a request, its own iteration counted, beyond a chunk."""
    between: dict[int, int] = {}
    for place, decision in enumerate(history.decisions):
        decoding = dict(_decoding(history, decision))
        prompts = sum(count for id_, count in decision.decided.entries if id_ not in decoding)
        planned = dict(decision.decided.entries)
        between = {id_: between.get(id_, 0) + prompts for id_ in decoding}
        for id_, tokens in between.items():
            if tokens > chunk:
                return Denial(place, f"{tokens} prompt tokens are computed between two tokens of request {id_}")
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
    Property("work_conserving", "work-conserving: no iteration is empty while whoever waits would fit", False, _idles),
    Property(
        "iteration_level",
        "admission at every iteration: no decodes alone while whoever waits would fit",
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
    """(id, tokens computed) of the running requests that have nothing but their newest token left to compute."""
    for id_, computed, ready in decision.seen.running:
        if ready == 1 and computed >= history.scenario.asks[id_].prompt:
            yield id_, computed


def _all_fit(history: History, decision: Decision) -> bool:
    """Whether any of the waiting requests, if there are some, finds a place, and room for its longest length."""
    scenario = history.scenario
    if not decision.seen.waiting or len(decision.seen.running) >= scenario.limits.max_running:
        return False
    longest = max(scenario.asks[id_].tokens for id_ in decision.seen.waiting)
    free_tokens = scenario.max_tokens - sum(count for _, count in decision.decided.entries)
    return scenario.blocks_for(longest) <= _free_after(history, decision) and longest <= free_tokens


def _free_after(history: History, decision: Decision) -> int:
    """KV blocks that are free when a plan has taken its own."""
    scenario, before = history.scenario, {id_: computed for id_, computed, _ in decision.seen.running}
    reserved = dict(decision.decided.reserve)
    taken = 0
    for id_, count in decision.decided.entries:
        computed = before.get(id_, 0)
        taken += scenario.blocks_for(max(computed + count, reserved.get(id_, 0))) - scenario.blocks_for(computed)
    return decision.seen.num_free - taken


def _blocks_of_next(history: History, computed: int) -> int:
    """KV blocks that one more token takes."""
    return history.scenario.blocks_for(computed + 1) - history.scenario.blocks_for(computed)
