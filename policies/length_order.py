"""Sarathi-Serve with waiting requests ordered by length: SJF and related orders, as in SGLang.

`order` is one of

    sjf        shortest predicted output first              sjf_total  shortest prompt + predicted output first
    spf        shortest prompt first                        lof        longest declared output first
    hrrn       highest response ratio next: tokens computed since the request arrived, divided by its prompt

Running requests come first and are not preempted for waiting requests (`policy=srpt` does so). Ties: arrival.
`predictor` predicts outputs.

Source: sgl-project/sglang, python/sglang/srt/managers/schedule_policy.py (commit 00550cd1). Differences: prompts are
chunked within Sarathi-Serve's budget; the whole prompt counts, cached or not (`policy=prefix_order`: uncached tokens); the active chunk
has no cap. As in SGLang, `hrrn` is first come, first served if more than 128 requests wait.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain

from cbatch import ConfigError, Request, StepRecord, View, is_steady
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
        self._computed = 0  # tokens of all ended iterations
        self._computed_before: dict[Request, int] = {}  # tokens computed before the request arrived
        if order == "hrrn":
            self.on_step = self._count  # without this hook, vLLM need not ask a steady policy at each iteration

    @property
    def steady(self) -> bool:
        return is_steady(self.chunking) and self.order != "hrrn"

    def on_arrival(self, request: Request) -> None:
        self._computed_before[request] = self._computed

    def on_wait(self, request: Request) -> None:
        if self.order != "hrrn":  # which sorts all that wait at each plan
            super().on_wait(request)

    def _count(self, record: StepRecord) -> None:
        self._computed += record.num_prefill_tokens + record.num_decode_tokens

    def prompts(self, view: View) -> Iterable[Request]:
        if self.order != "hrrn":
            return super().prompts(view)
        if len(view.waiting) > MOST_RANKED:
            return chain(view.prefilling, view.waiting)
        return chain(view.prefilling, sorted(view.waiting, key=self._response_ratio, reverse=True))

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self.predictor.observe(request)
        self._computed_before.pop(request, None)

    def _response_ratio(self, request: Request) -> float:
        return (self._computed - self._computed_before[request]) / request.num_tokens
