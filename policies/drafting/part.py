"""Gives the decodes of any policy drafts by a rule: `drafting=NAME` beside `policy=NAME`.

The policy plans as without drafts. When it builds its plan, the rule sees the decodes and the prompt chunks, and the drafts take tokens
and KV blocks that the plan has left: `max_tokens` limits them, a smaller budget of the policy does not. Decodes that have drafts by
the policy itself keep those alone.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from reprlib import repr as shortened
from typing import Any

import numpy as np

from cbatch import Plan, PlanBuilder, Policy, PolicyError, Request, StepRecord, View
from cbatch.errors import call
from policies.drafting.rule import DraftingRule

__tracebackhide__ = True


class WithDrafts:
    """A policy with a drafting rule. All but `plan` and two hooks is the policy's, and it is not steady."""

    def __init__(self, policy: Policy, rule: DraftingRule) -> None:
        self.policy, self.rule, self._received = policy, rule, Counter[Request]()
        self._drafts: dict[int, dict[Request, int]] = {}  # of the decodes of each iteration in flight
        self.__name__ = f"{type(policy).__name__} with {type(rule).__name__}"

    def __getattr__(self, name: str) -> Any:
        if name in ("policy", "steady"):  # without `policy`: an object that is being copied
            raise AttributeError(name)
        return getattr(self.policy, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self.policy)]

    def __repr__(self) -> str:
        kind = type(self.policy)
        text = kind.__name__ if kind.__repr__ is object.__repr__ else repr(self.policy)
        name, parenthesis, arguments = text.partition("(")
        return f"{name}({arguments[:-1] + ', ' if parenthesis else ''}drafting={self.rule!r})"

    def plan(self, view: View) -> Plan:
        drafts = self._drafts[view.iteration] = dict[Request, int]()
        view.update(plan=partial(_Builder, view, self.rule, drafts))
        return self.policy.plan(view)

    def on_step(self, record: StepRecord) -> None:
        """Reports the outcome of an iteration's decodes to the rule."""
        drafts, received = self._drafts.pop(record.iteration, {}), self._received
        self._received = Counter()
        if decodes := [request for request in received if request in drafts]:
            self.rule.observe(*zip(*((drafts[request], received[request] - 1) for request in decodes), strict=True))
        if (on_step := getattr(self.policy, "on_step", None)) is not None:
            on_step(record)

    def on_tokens(self, requests: Sequence[Request]) -> None:
        self._received = Counter(requests)  # a request is listed once per token
        if (on_tokens := getattr(self.policy, "on_tokens", None)) is not None:
            on_tokens(requests)


class _Builder(PlanBuilder):
    """Adds drafts to a plan as soon as it is finished."""

    __slots__ = ("_drafted", "_rule", "_whole_view")

    def __init__(self, view: View, rule: DraftingRule, drafted: dict[Request, int]) -> None:
        super().__init__(view)
        self._whole_view, self._rule, self._drafted = view, rule, drafted

    def build(self, note: str = "", *, wake_at: float | None = None) -> Plan:
        plan, view = self._plan, self._whole_view
        places = [
            place
            for place, (request, tokens) in enumerate(plan)
            if tokens == 1 and request in view.decoding and view.drafts.most
        ]
        if places:
            numbers = self._num_drafts([plan.requests[place] for place in places])
            for place, k in zip(places, numbers, strict=True):
                request = plan.requests[place]
                has = k and view.drafts.can_have(request)
                self._drafted[request] = self._add_drafts(place, k) if has else 0
        return super().build(note, wake_at=wake_at)

    def _num_drafts(self, decodes: list[Request]) -> list[int]:
        """Returns what the rule chooses for each decode. Raises PolicyError for anything but whole numbers of at least 0."""
        where = f"drafting rule {type(self._rule).__name__}"
        returned = call(where, self._rule.num_drafts, self._whole_view, self, decodes)
        with suppress(ValueError):  # of nested lists of different lengths
            numbers = np.asarray(returned)
            if numbers.shape in ((), (len(decodes),)) and numbers.dtype.kind in "iu" and numbers.min() >= 0:
                each: list[int] = np.broadcast_to(numbers, len(decodes)).tolist()
                return each
        length = f" of length {len(returned)}" if isinstance(returned, list | tuple) else ""
        problem = f"num_drafts() returned {' '.join(shortened(returned).split())}{length}"
        raise PolicyError(
            f"{where}: {problem}; return a whole number of at least 0, or a list of {len(decodes)}, one per decode"
        )
