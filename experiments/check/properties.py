"""The properties that a policy may have. A policy has one if no history violates it.

Every policy needs the first three; the others distinguish policies, and lacking one is not an error.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from cbatch import PlanError
from cbatch.replay.decisions import Decision
from experiments.check.scenario import LATER, History

OVERTAKEN_LIMIT = 8
"""A waiting request starves if more than this many times `batch` later ones are admitted before it."""


class Violation(NamedTuple):
    """place: index of the decision that violates a property."""

    place: int
    why: str


Violations = Iterator[Violation]


class Property(NamedTuple):
    """
    name: for the command line. needed: whether every policy must have it. text: the property in a few words.
    violations: called with a history and the policy's chunk.
    """

    name: str
    needed: bool
    violations: Callable[[History, int], Violations]
    text: str

    def violation(self, history: History, chunk: int) -> Violation | None:
        """Returns the first violation; None if the history satisfies the property."""
        return next(self.violations(history, chunk), None)


def _illegal(history: History, chunk: int) -> Violations:
    if history.error is not None and not _is_over_commitment(history.error):
        yield Violation(len(history.decisions) - 1, str(history.error))


def _over_committed(history: History, chunk: int) -> Violations:
    if _is_over_commitment(history.error):
        yield Violation(len(history.decisions) - 1, str(history.error))


def _is_over_commitment(error: Exception | None) -> bool:
    return isinstance(error, PlanError) and "KV blocks" in str(error)


def _endless(history: History, chunk: int) -> Violations:
    if history.endless:
        yield Violation(len(history.decisions) - 1, history.endless)


def _wavers(history: History, chunk: int) -> Violations:
    """The first plan that differs between two runs of the same workload with copies of the same policy."""
    if history.again is not None and history.again != history.decisions:
        pairs = enumerate(zip_longest(history.decisions, history.again))
        place, (_, other) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        yield Violation(min(place, len(history.decisions) - 1), f"a second run decides {other and other.decided}")


def _turns(history: History, chunk: int) -> Violations:
    """The first plan that is not the one before, although it computes one token of each running request and nothing changed."""
    for place in sorted(history.foreseen):
        before, decided = (history.decisions[index].decided for index in (place - 1, place))
        if decided != before:
            yield Violation(place, f"{before} is followed by {decided}, although nothing has changed")
    if history.late is not None:
        place, decided = history.late
        if decided != (before := history.decisions[place - 1].decided):
            yield Violation(
                place, f"{before} is followed by {decided} if {LATER:g} s pass, and nothing else has changed"
            )


def _starves(history: History, chunk: int) -> Violations:
    """Admissions that make an earlier, waiting request starve."""
    ahead: dict[int, set[int]] = {}  # by waiting request, the later ones that were admitted meanwhile
    for place, decision in enumerate(history.decisions):
        waiting = set(decision.seen.waiting)
        admitted = [id_ for id_, _ in decision.decided.entries if id_ in waiting]
        ahead = {id_: ahead.get(id_, set()) for id_ in waiting.difference(admitted)}
        for id_, later in ahead.items():
            later.update(other for other in admitted if history.arrived_at[other] > history.arrived_at[id_])
            if len(later) > OVERTAKEN_LIMIT * history.scenario.batch:
                yield Violation(place, f"request {id_} waits while {len(later)} that came after it are admitted")


def _idles(history: History, chunk: int) -> Violations:
    """Iterations that compute nothing, although a running request or any waiting one could compute."""
    for place, decision in enumerate(history.decisions):
        if decision.decided.entries or decision.decided.preempt or decision.decided.reject:
            continue
        for id_, computed, ready in decision.seen.running:
            if ready and _next_fits(history, decision, computed):
                yield Violation(place, f"nothing is computed, although request {id_} has {ready} tokens to compute")
        if _all_fit(history, decision):
            yield Violation(place, "nothing is computed, although any waiting request would fit")


def _decodes_alone(history: History, chunk: int) -> Violations:
    """Iterations of decodes only, although any waiting request could be admitted."""
    for place, decision in enumerate(history.decisions):
        planned = dict(decision.decided.entries).keys()
        free_places = history.scenario.batch - len(planned)
        if (
            planned
            and planned <= _decoding(history, decision).keys()
            and free_places > 0
            and _all_fit(history, decision)
        ):
            why = f"only decodes are computed, although {free_places} places are free and any waiting request would fit"
            yield Violation(place, why)


def _stalls(history: History, chunk: int) -> Violations:
    """Running requests whose next token is left out, although the KV cache has room for it."""
    for place, decision in enumerate(history.decisions):
        planned = {id_ for id_, _ in decision.decided.entries} | set(decision.decided.preempt)
        for id_, computed in _decoding(history, decision).items():
            if planned and id_ not in planned and _next_fits(history, decision, computed):
                yield Violation(place, f"request {id_} has a token to compute and is left out")


def _delays(history: History, chunk: int) -> Violations:
    """More than a chunk of prompt tokens between two tokens of a request, its own iteration counted."""
    between: dict[int, int] = {}
    for place, decision in enumerate(history.decisions):
        planned, decoding = dict(decision.decided.entries), _decoding(history, decision)
        prompts = sum(count for id_, count in planned.items() if id_ not in decoding)
        between = {id_: between.get(id_, 0) + prompts for id_ in decoding}
        for id_, tokens in between.items():
            if tokens > chunk:
                yield Violation(place, f"{tokens} prompt tokens are computed between two tokens of request {id_}")
        between.update(dict.fromkeys(planned.keys() & decoding.keys(), 0))


_SAME = "deterministic: the same workload is planned the same each time"
_STEADY = f"steady: decodes alone are planned again until something changes, also {LATER:g} s later; needed by policies that say so"
_FAIR = f"no starvation: at most {OVERTAKEN_LIMIT} x batch later requests pass one that waits"
_BUSY = "work-conserving: no iteration is empty while any waiting request would fit"
_ITERATION_LEVEL = "admission at every iteration: no decodes alone while any waiting request would fit"
_STALL_FREE = "stall-free: every running request gets a token in every iteration"
_BOUNDED = "bounded time between tokens: at most a chunk of prompt tokens lies between two"

PROPERTIES = (
    Property("legal", True, _illegal, "every plan keeps the rules, and nothing raises"),
    Property("kv", True, _over_committed, "the KV cache is never over-committed"),
    Property("ends", True, _endless, "every run ends"),
    Property("deterministic", False, _wavers, _SAME),
    Property("steady", False, _turns, _STEADY),
    Property("fair", False, _starves, _FAIR),
    Property("work_conserving", False, _idles, _BUSY),
    Property("iteration_level", False, _decodes_alone, _ITERATION_LEVEL),
    Property("stall_free", False, _stalls, _STALL_FREE),
    Property("bounded_tbt", False, _delays, _BOUNDED),
)
NAMES = tuple(prop.name for prop in PROPERTIES)


def _decoding(history: History, decision: Decision) -> dict[int, int]:
    """Returns the running requests that have only their newest token left to compute: id to tokens computed."""
    asks = history.scenario.asks
    return {id_: done for id_, done, ready in decision.seen.running if ready == 1 and done >= asks[id_].prompt}


def _all_fit(history: History, decision: Decision) -> bool:
    """Returns whether there are waiting requests, and each could be admitted with room for its longest length."""
    scenario = history.scenario
    if not decision.seen.waiting or len(decision.seen.running) >= scenario.limits.max_running:
        return False
    longest = max(scenario.asks[id_].tokens for id_ in decision.seen.waiting)
    free_tokens = scenario.max_tokens - sum(count for _, count in decision.decided.entries)
    return scenario.blocks_for(longest) <= _free_after(history, decision) and longest <= free_tokens


def _next_fits(history: History, decision: Decision, computed: int) -> bool:
    """Returns whether the KV cache has room for one more token of a request after the plan."""
    blocks_for = history.scenario.blocks_for
    return blocks_for(computed + 1) - blocks_for(computed) <= _free_after(history, decision)


def _free_after(history: History, decision: Decision) -> int:
    """Returns the KV blocks that are free after the plan has taken its own."""
    blocks_for, reserved = history.scenario.blocks_for, dict(decision.decided.reserve)
    before = {id_: computed for id_, computed, _ in decision.seen.running}
    free = decision.seen.num_free
    for id_, count in decision.decided.entries:
        computed = before.get(id_, 0)
        free -= blocks_for(max(computed + count, reserved.get(id_, 0))) - blocks_for(computed)
    return free
