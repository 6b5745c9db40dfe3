"""Prompt tokens and drafts of an iteration chosen together under a target for the time between tokens: ours.

Both use the capacity that decodes leave, and both lengthen the iteration. Candidates are pairs of c prompt tokens, a tile times a power of
2 or `most`, and b drafts, k per decode on average, given to the batch's likeliest. With n decodes, their survivals S in descending order, and
t(c, b) the predicted seconds of drafting and of the iteration,

    e = 1 + (S_(1) + ... + S_(b)) / n        expected tokens of a decode
    t(c, b) / e <= tbt                       the target
    maximise  (n e + prompt_value c) / t     expected tokens per second

If no pair keeps the target, the one with the least time between tokens is taken. Of equals, fewer prompt tokens and then fewer drafts.
Otherwise as Sarathi-Serve: decodes, then prompts in order; if the KV cache is full, the newest request is preempted for a decode.
"""

from collections.abc import Sequence
from itertools import chain
from math import inf

import numpy as np

from cbatch import BatchShape, ConfigError, Described, Plan, Request, View
from policies.drafting.adaptive import assign
from policies.drafting.rule import Floats, survivals_of_decodes

Pair = tuple[int, int]
"""Prompt tokens and drafts of an iteration."""


class Joint(Described):
    def __init__(self, tbt: float = 0.05, most: int = 2048, prompt_value: float = 1.0) -> None:
        """tbt: target in seconds. most: prompt tokens of an iteration. prompt_value: of a prompt token, in output tokens."""
        if not tbt > 0 or most < 1 or not 0 <= prompt_value < inf:
            raise ConfigError(
                f"policy: need {tbt=} above 0, {most=} of at least 1 and a finite {prompt_value=}, at least 0"
            )
        self.tbt, self.most, self.prompt_value = tbt, most, prompt_value

    def plan(self, view: View) -> Plan:
        plan, prompts = view.plan(), [*chain(view.prefilling, view.waiting[: view.num_places])]
        decodes, _ = view.ready_decodes(view.limits.max_batch)
        survivals = survivals_of_decodes(view, decodes)
        budget, num_drafts = best_pair(
            survivals, self._seconds(view, decodes, prompts), tbt=self.tbt, prompt_value=self.prompt_value
        )
        drafts = dict(zip(decodes, assign(survivals, num_drafts), strict=True))
        plan.add_decodes(preempt_newest=True, drafts={request: k for request, k in drafts.items() if k})
        preempted = {*plan.plan.preempt}
        for request in prompts:
            if request in preempted or (preempted and view.is_waiting(request)):
                continue
            if not (granted := plan.add(request, budget, reserve=request.num_tokens)):
                break
            budget -= granted
        return plan.build()

    def _seconds(self, view: View, decodes: Sequence[Request], prompts: Sequence[Request]) -> dict[Pair, float]:
        """Returns the predicted seconds of each pair."""
        number, tile = len(decodes), min(view.limits.tile, self.most)
        budgets = [0] if decodes or not prompts else []
        sizes = (tile << power for power in range((self.most // tile).bit_length() + 1))
        budgets += [min(size, self.most) for size in sizes] if prompts else []
        context, seconds = sum(request.num_tokens for request in decodes), {}
        for chunks in {fill(prompts, budget) for budget in budgets}:
            for k in range(view.drafts.most + 1 if decodes else 1):
                shape = BatchShape(chunks, number, context).with_drafts(k * number)
                pair = sum(tokens for tokens, _ in chunks), k * number
                seconds[pair] = view.cost.predict(shape) + view.drafts.seconds(number, k)
        return seconds


def best_pair(survivals: Floats, seconds: dict[Pair, float], *, tbt: float, prompt_value: float) -> Pair:
    """Returns the best pair of prompt tokens and drafts. survivals: [decodes, drafts]. seconds: by pair."""
    number, sums = len(survivals), np.cumsum(np.sort(survivals, axis=None)[::-1])

    def merit(pair: Pair) -> tuple[bool, float, int, int]:
        tokens, drafts = pair
        expected = number + (sums[drafts - 1] if drafts else 0.0)
        between = seconds[pair] * number / expected if number else 0.0
        keeps = between <= tbt
        rate = (expected + prompt_value * tokens) / max(seconds[pair], 1e-9)
        return keeps, rate if keeps else -between, -tokens, -drafts

    return max(seconds, key=merit)


def fill(prompts: Sequence[Request], budget: int) -> tuple[tuple[int, int], ...]:
    """Returns the chunks of prompts that share a budget, in order: tokens, and tokens in the KV cache before them."""
    chunks = []
    for request in prompts:
        if budget <= 0:
            break
        chunks.append((min(budget, request.num_ready), request.num_computed))
        budget -= chunks[-1][0]
    return tuple(chunks)
