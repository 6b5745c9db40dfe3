"""Exact leaps over iterations for which a steady policy (`Policy`) would repeat its latest plan.

    turn of the loop    plan, check, apply, launch | wait, absorb
    leap over three                         launch | wait | launch | wait | launch | wait, count and record three

The latest plan computes one token of each running request. It repeats until a request ends or arrives, or KV blocks run
short. In the asynchronous loop a leap launches an iteration that ends requests at their longest lengths, and leaves its
tokens in flight. Every iteration is computed and recorded as if it had been planned (`SimExecutor.repeat`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, count

import numpy as np

from cbatch.executor import Step, Turn
from cbatch.record import InFlight, StepRecord
from cbatch.state import State

MOST = 512  # most iterations of one leap: bounds the work that is wasted if a request arrives


def foresee(latest: InFlight | None, state: State, num_in_flight: int, ends: bool, least_free: int) -> list[int]:
    """Implements `Engine.foresee`. latest: the latest turn's iteration, if its plan is of decodes alone."""
    if latest is None or state.latest is None or latest.step.copies is not None:
        return []
    if state.cache is not None and not state.cache.is_steady(bool(state.waiting)):
        return []
    if latest.state[1:] != (state.pool.num_used, len(state.waiting), len(latest.step.rows)):
        return []
    return blocks_used(latest.step, state, num_repeats(latest.step, state, num_in_flight) + ends, least_free)


def num_repeats(step: Step, state: State, num_in_flight: int) -> int:
    """Returns how many iterations of a batch of decodes can be launched after this one before a request has ended, at most `MOST`.

    num_in_flight: how many of the latest iterations have tokens that are not absorbed yet.
    """
    table, rows = state.table, step.rows
    left: list[int] = (table.limit[rows] - table.total[rows] + num_in_flight).tolist()
    if table.has_hidden_lengths:
        left += [tokens for tokens in (table.stop[rows] - table.known[rows]).tolist() if tokens > 0]
    if state.cache is not None and state.waiting:
        left.append(state.cache.num_unchanged(rows) + 1)
    return max(min(MOST, min(left) - 1), 0)


def blocks_used(step: Step, state: State, num_iterations: int, least_free: int) -> list[int]:
    """Returns the KV blocks in use after each of `num_iterations` iterations that repeat this one, while `least_free` stay free.

    With a prefix cache and waiting requests, or with host memory for the cache, the iterations end before a cached block is taken.
    """
    pool, rows = state.pool, step.rows
    # requests, by the iteration in which each takes its next block
    first = np.minimum(pool.room[rows] - state.table.computed[rows], num_iterations)
    taken = np.bincount(first, minlength=num_iterations)[:num_iterations].tolist()
    for iteration in range(pool.block_size, num_iterations):
        taken[iteration] += taken[iteration - pool.block_size]
    used = list(accumulate(taken, initial=pool.num_used))
    cached = state.cache.pool if state.cache is not None else None
    num_kept = cached.num_cached if cached is not None and (state.waiting or cached.host.num_slots) else 0
    return used[1 : bisect_right(used, pool.num_blocks - max(num_kept, least_free))]


def entered(
    latest: InFlight, foreseen: Sequence[int], turns: Sequence[Turn], num_computed: int, num_in_flight: int
) -> tuple[InFlight, list[StepRecord]]:
    """Returns the last of the turns that repeated the latest one, and the records of the iterations that ended in these turns.

    foreseen: the KV blocks in use after each turn; may include later turns. num_computed: tokens of an iteration, with padding.
    num_in_flight: 1 if each turn waited for the iteration launched in the previous turn, 0 if for its own.
    """
    first, num_requests = latest.step, len(latest.step.rows)
    num_scores, num_reads = first.shape().num_scores, first.shape().num_kv_reads
    batch = (num_requests, 0, num_requests, num_computed - num_requests, num_requests)
    pairs = zip(turns, foreseen, strict=False)
    launches = [(*turn[:3], (0, num_blocks, *latest.state[2:])) for turn, num_blocks in pairs]
    planned_at, launched_at, handle, state = launches[-1]
    last = InFlight(first.again(len(turns)), handle, (planned_at, launched_at), state)
    if num_in_flight:
        launches.insert(0, (*latest.times, latest.handle, latest.state))
    ended = zip(count(1 - num_in_flight), launches, turns, strict=False)
    steps = []
    for after, launched, (_, waited_at, _, now) in ended:
        times, more = (*launched[:2], waited_at, now, now, *launched[2][:2]), after * num_requests
        counts = (num_scores + more, num_reads + more, 0, 0, 0, 0)
        steps.append(StepRecord._make((first.index + after, *times, *batch, *launched[3], first.note, *counts)))
    return last, steps
