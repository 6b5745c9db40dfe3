"""Sarathi-Serve with waiting requests ordered by length: SJF and related orders, as in SGLang.

`order` is one of

    sjf        shortest predicted output first              sjf_total  shortest prompt + predicted output first
    spf        shortest prompt first                        lof        longest declared output first
    hrrn       highest response ratio next: tokens processed since the request arrived, divided by its prompt

Running requests come first and are not preempted for waiting requests (`policy=srpt` does so). Ties: arrival.
`predictor` predicts outputs.

Source: sgl-project/sglang, python/sglang/srt/managers/schedule_policy.py (commit 00550cd1). Differences: prompts are
chunked within Sarathi-Serve's budget; the whole prompt counts, cached or not (`policy=prefix_order`: uncached tokens); the active chunk
has no cap. As in SGLang, `hrrn` is first come, first served if more than 128 requests wait.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain

from cbatch import ConfigError, Plan, Request, View, is_steady
from policies.chunking import ChunkSelector
from policies.predictors import Predictor
from policies.shared.prefixes import MOST_RANKED
from policies.shared.waiting import RankedPrompts

KEYS: Mapping[str, Callable[[Predictor, Request], float]] = {
    "sjf": lambda predictor, request: predictor.output(request),
    "sjf_total": lambda predictor, request: request.num_prompt_tokens + predictor.output(request),
    "spf": lambda predictor, request: request.num_tokens,  # after a preemption, includes the output so far
    "lof": lambda predictor, request: -request.max_new_tokens,
    "hrrn": lambda predictor, request: 0.0,  # ranked at each plan
}


class LengthOrder(RankedPrompts):
    def __init__(self, chunking: ChunkSelector, predictor: Predictor, order: str = "sjf") -> None:
        if order not in KEYS:
            raise ConfigError(f"policy.order={order}: choose one of {', '.join(KEYS)}")
        super().__init__(chunking, partial(KEYS[order], predictor))
        self.order = order
        self.predictor = predictor
        self._processed = 0  # tokens of all plans so far
        self._planned: dict[Request, int] = {}  # tokens of the last plan
        self._processed_before: dict[Request, int] = {}  # tokens processed before the request arrived

    @property
    def steady(self) -> bool:
        return is_steady(self.chunking) and self.order != "hrrn"

    def on_arrival(self, request: Request) -> None:
        self._processed_before[request] = self._processed

    def on_wait(self, request: Request) -> None:
        self._processed -= self._planned.pop(request, 0)  # planned, and not admitted
        if self.order != "hrrn":  # which sorts all that wait at each plan
            super().on_wait(request)

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        self._planned = dict(plan)
        self._processed += sum(plan.num_tokens)
        return plan

    def prompts(self, view: View) -> Iterable[Request]:
        if self.order != "hrrn":
            return super().prompts(view)
        if len(view.waiting) > MOST_RANKED:
            return chain(view.prefilling, view.waiting)
        return chain(view.prefilling, sorted(view.waiting, key=self._response_ratio, reverse=True))

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self.predictor.observe(request)
        for kept in (self._planned, self._processed_before):
            kept.pop(request, None)

    def _response_ratio(self, request: Request) -> float:
        return (self._processed - self._processed_before[request]) / request.num_tokens
