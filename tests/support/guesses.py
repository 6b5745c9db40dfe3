"""Drafts that are partly right, and policies that speculate."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from schedules import Wrapped
from tiny_models import Reference

from cbatch import Plan, Policy, View
from cbatch.drafts import NO_DRAFT, Drafter


class Guesses(Drafter):
    """Knows what follows each reference's tokens; gets one in `every` tokens wrong, and at times proposes fewer than it could."""

    def __init__(self, references: Sequence[Reference], every: int = 4) -> None:
        self._texts = [[*prompt, *output] for prompt, _, output in references]
        self._every = every
        self._known: dict[Any, torch.Tensor] = {}

    def propose_each(self, texts: torch.Tensor, lengths: torch.Tensor, k: int) -> torch.Tensor:
        width, device = texts.shape[1], texts.device
        if (known := self._known.get((width, device))) is None:
            padded = [[*text, *[NO_DRAFT] * (width + k)][: width + k] for text in self._texts]
            known = self._known[width, device] = torch.tensor(padded, dtype=torch.int32, device=device)
        beyond = torch.arange(width, device=device) >= lengths[:, None]
        same = ((texts[:, None] == known[:, :width]) | beyond[:, None]).all(-1)  # [requests, references]
        which = same.int().argmax(-1)[:, None]
        places = lengths[:, None] + torch.arange(k, device=device)
        drafts = known[which, places.clamp(max=width + k - 1)]
        wrong = (places * 31 + which * 17) % self._every == 0
        few = torch.arange(k, device=device) >= k - (lengths[:, None] * 7 + which) % 2
        return (drafts ^ wrong).masked_fill((drafts < 0) | few | ~same.any(-1, keepdim=True), NO_DRAFT)


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
