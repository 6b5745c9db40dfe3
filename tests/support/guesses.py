"""Drafts that are partly right, and policies that speculate."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from schedules import Wrapped
from tiny_models import Reference

from cbatch import Plan, Policy, View
from cbatch.drafts import Drafter
from cbatch.executor import Tokens


class Guesses(Drafter):
    """Knows what follows each reference's tokens; gets one in `every` tokens wrong, and at times proposes fewer than it could."""

    def __init__(self, references: Sequence[Reference], every: int = 4) -> None:
        self._texts = [[*prompt, *output] for prompt, _, output in references]
        self._every = every

    def propose(self, tokens: Tokens, k: int) -> Tokens:
        before = tokens.tolist()
        texts = (text for text in self._texts if text[: len(before)] == before)
        after = next(texts, before)[len(before) :][: k - _number(before) % 2]
        wrong = [_number([*before, place]) % self._every == 0 for place in range(len(after))]
        return np.array([token ^ is_wrong for token, is_wrong in zip(after, wrong, strict=True)], np.int32)


class Speculating(Wrapped):
    """Any policy, whose decodes get as many drafts as a number drawn from the iteration, and as fit."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        super().__init__(policy)
        self._seed = seed

    def plan(self, view: View) -> Plan:
        plan = self.policy.plan(view)
        tokens = view.limits.max_tokens - max(sum(plan.num_tokens), plan.pad_to or 0)
        free = view.kv.num_free - sum(
            view.kv.num_lacking(request, max(request.num_computed + count, plan.reserve.get(request, 0)))
            for request, count in plan
        )
        for place, request in enumerate(plan.requests):
            if plan.num_tokens[place] == 1 and view.drafts.can_have(request):
                most = min(_number([self._seed, view.iteration, place]) % (view.drafts.most + 1), tokens)
                number = view.drafts.propose(request, most)
                lacking = view.kv.num_lacking(request, request.num_computed + 1 + number)
                if lacking <= free:
                    plan.num_tokens[place] += number
                    tokens, free = tokens - number, free - lacking
        return plan


def _number(numbers: Sequence[int]) -> int:
    return crc32(str(numbers).encode())
