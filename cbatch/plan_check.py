"""The engine's check of a plan: the rules of `plan_rules` over its own arrays, a whole batch at a time.

It only detects that a plan is illegal; `Rules.check` then finds the rule that is broken.
"""

import numpy as np

from cbatch.engine_view import EngineView
from cbatch.plan import Plan
from cbatch.plan_rules import Rules
from cbatch.request import Request, Status
from cbatch.request_table import ONE, Counters, Ints
from cbatch.state import CheckedPlan, State


class _IllegalError(Exception):
    """The plan breaks a rule."""


def check_plan(plan: Plan, state: State, view: EngineView, policy_name: str) -> CheckedPlan:
    """Check a plan before anything is changed; raises PlanError as `check_rules`."""
    rules = Rules(plan, view, policy_name)
    return rules.enforce(lambda: _check(plan, state, rules))


def _check(plan: Plan, state: State, rules: Rules) -> CheckedPlan:
    requests = plan.requests
    if plan.preempt or plan.reject:
        rules.check_departures()
    newcomers, rows, num_decodes = _members(requests, state)
    counts = np.array(plan.num_tokens or np.zeros(0, np.int64))
    counters, room = state.table.counters(rows), state.pool.room[rows]
    if newcomers:
        _set_start_values(requests, rows, counters, room)
    num_tokens = 0
    if requests:
        wrong = (counts < ONE) | (counts > state.table.ready(rows, counters))
        if counts.dtype != np.int64 or wrong[wrong.argmax()]:
            raise _IllegalError
        num_tokens = sum(plan.num_tokens)
        rules.check_limits(len(newcomers), num_tokens)
    end = kept = counters.computed + counts
    if plan.reserve:
        kept = end.copy()
        for place, reserved in rules.reserved_tokens().items():
            kept[place] = max(kept[place], reserved)
    taking, num_blocks = state.pool.lacking(room, kept)
    if sum(num_blocks) > state.pool.num_free + (rules.blocks_coming_free() if plan.preempt else 0):
        raise _IllegalError
    return CheckedPlan(plan, newcomers, rows, counts, end, taking, num_blocks, num_tokens, num_decodes, counters)


def _members(requests: list[Request], state: State) -> tuple[list[Request], Ints, int]:
    """Returns the requests that wait, the rows of all, and how many decode."""
    decoding = state.decoding
    num_known = len(decoding.members)
    if requests[:num_known] != decoding.members:  # most plans begin with all decodes in their order
        num_known = 0
    others = requests[num_known:]
    if num_known and not others:
        return [], decoding.rows, num_known
    unique = decoding.without(set(others)) if num_known else set(others)
    if len(unique) < len(others):
        raise _IllegalError
    outside = state.running.without(unique)
    newcomers = [request for request in others if request in outside] if outside else []
    for request in newcomers:
        if request.status is not Status.WAITING or request not in state.waiting:
            raise _IllegalError
    rows = np.empty(len(requests), np.int64)
    rows[:num_known] = decoding.rows[:num_known]
    rows[num_known:] = [request.row for request in others]
    return newcomers, rows, num_known or len(unique) - len(decoding.without(unique))


def _set_start_values(requests: list[Request], rows: Ints, counters: Counters, room: Ints) -> None:
    """Requests that were never admitted have no row yet: nothing computed, no blocks held."""
    known, total, computed = counters
    for place in (rows < 0).nonzero()[0].tolist():
        known[place] = total[place] = requests[place].num_prompt_tokens
        computed[place] = room[place] = 0
