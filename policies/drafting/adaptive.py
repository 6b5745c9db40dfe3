"""vLLM's adaptive verification: verify the B most likely drafts of the batch, with B for the most tokens per second (vllm#47808).

Draft i of a request survives with probability S_i. Of all drafts of a batch of n decodes, sorted by survival, the first B are verified:

    B* = argmax  (n + S_(1) + ... + S_(B)) / (draft[n] + verify[T + B])

T: the iteration's other tokens, prompts included. draft[n]: the time to draft the full number for all n decodes, whatever is verified.
verify: a staircase over the sizes of captured graphs, to which an iteration is padded, made monotone; continuous above the largest.

Differs from vLLM, where a confidence head predicts each draft's survival and the drafter makes the full number before the
choice: here survivals are the request's moving means, one iteration old, and no drafts are made where none would be verified. vLLM measures `verify` at
one context length; here the cost model predicts it at the batch's.
"""

from collections.abc import Callable, Sequence

import numpy as np

from cbatch import PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule, Floats, check_counts, survivals_of_decodes
from policies.shared.step_times import shape_of

CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Tokens of vLLM's captured graphs by default (`cudagraph_capture_sizes`)."""

ABOVE = 128
"""Tokens between the sizes above the largest captured one at which the cost model is asked; linear between."""


class Adaptive(DraftingRule):
    def __init__(self, captured: Sequence[int] = CAPTURED) -> None:
        """captured: tokens of captured graphs, ascending."""
        check_counts("captured", captured, 1, several=True)
        self.captured = (*captured,)

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> Sequence[int]:
        survivals = survivals_of_decodes(view, decodes)
        shape, num_tokens = shape_of(plan.plan), plan.num_tokens
        verify = staircase(
            lambda size: view.cost.predict(shape.with_drafts(size - num_tokens)),
            self.captured,
            num_tokens,
            survivals.size,
        )
        draft = np.full(len(verify), view.drafts.seconds(len(decodes), view.drafts.most))
        draft[0] = 0.0  # where nothing is verified, nothing is drafted
        return assign(survivals, best_budget(survivals, draft, verify))


def best_budget(survivals: Floats, draft: Floats | float, verify: Floats) -> int:
    """Returns the number of drafts to verify with the most expected tokens per second; the least of several.

    survivals: [decodes, drafts]. draft, verify: seconds of drafting and of the iteration with 0, 1, ... verified drafts.
    """
    sums = np.cumsum(np.sort(survivals, axis=None)[::-1])
    expected = len(survivals) + np.concatenate(([0.0], sums))
    return int(np.argmax(expected / (draft + verify)))


def assign(survivals: Floats, budget: int) -> list[int]:
    """Returns the drafts of each decode if the `budget` likeliest are verified; of equally likely ones those nearer to the base token."""
    order = np.argsort(-survivals.T, axis=None, kind="stable")[
        :budget
    ]  # draft by draft: a request's first one before its second
    numbers: list[int] = np.bincount(order % max(len(survivals), 1), minlength=len(survivals)).tolist()
    return numbers


def staircase(predict: Callable[[int], float], captured: Sequence[int], num_tokens: int, most: int) -> Floats:
    """Returns the seconds of an iteration of `num_tokens` and 0 to `most` drafts, monotone.

    predict: from the tokens of an iteration, padding included. captured: sizes of graphs, ascending; above the largest nothing is padded.
    """
    totals = np.arange(num_tokens, num_tokens + most + 1)
    stairs = [size for size in captured if size >= num_tokens]
    stairs = stairs[: int(np.searchsorted(stairs, totals[-1])) + 1]
    begin = max(captured[-1] + 1, num_tokens)
    points = [*range(begin, int(totals[-1]), ABOVE), int(totals[-1])] if begin <= totals[-1] else []
    seconds = np.maximum.accumulate([predict(size) for size in (*stairs, *points)])
    verify = np.empty(len(totals))
    within = totals <= captured[-1]
    verify[within] = seconds[np.searchsorted(stairs, totals[within])]
    if points:
        verify[~within] = np.interp(totals[~within], points, seconds[len(stairs) :])
    return verify
