"""Past-Future admission: no more requests than the KV cache holds at its peak (Gong et al., ASPLOS 2025; 2507.10150).

The remaining output of each running request is drawn from the lengths of the last ended requests, given the tokens that it has
generated. Waiting requests are admitted first come, first served, while the resulting peak of KV cache stays below the cache's
size minus a reserve. The largest of several draws counts. If the cache is full nevertheless, the newest request is preempted.

    admission   past_future   as above          optimum       the same with true lengths
                aggressive    while the prompt fits and 1% of the blocks stay free
                conservative  while prompt and limit of all admitted requests fit

Source: the paper and the code (ModelTC/lightllm, future_past_router). Differences: docs/policies/past_future.md.
"""

from collections.abc import Sequence
from random import Random

from cbatch import ConfigError, Plan, Request, View, WholePrompts
from policies.predictors import Oracle
from policies.shared.future_memory import EndedLengths, draw_left, most_held

ADMISSIONS = ("past_future", "aggressive", "conservative", "optimum")
WATERMARK = 0.01


class PastFuture(WholePrompts):
    steady = False  # set by each plan: True if no request waits

    def __init__(
        self,
        admission: str = "past_future",
        window: int = 1000,
        reserve: float = 0.03,
        draws: int = 3,
        seed: int = 0,
        history: Sequence[int] = (),
    ) -> None:
        """window: ended requests to draw from. history: output lengths of requests that ended before the run, oldest first.
        reserve: share of the cache left free. draws: number per admission.
        """
        if admission not in ADMISSIONS or window < 1 or not 0 <= reserve < 1 or draws < 1:
            known = ", ".join(ADMISSIONS)
            raise ConfigError(f"policy: need {admission=} in {known}, {window=} and {draws=} >= 1, 0 <= {reserve=} < 1")
        self.depends_on = ("hidden_lengths",) * (admission == "past_future")
        self.admission, self.window, self.reserve, self.draws = admission, window, reserve, draws
        self.seed, self.history = seed, tuple(history)
        self._random, self._oracle, self._ended = Random(seed), Oracle(), EndedLengths(window, history)

    def plan(self, view: View) -> Plan:
        plan, self.steady = view.plan(), not view.waiting
        plan.add_decodes(preempt_newest=True)
        if not plan.plan.preempt and view.waiting and plan.can_admit:
            admitted = [*view.running]
            for request in view.waiting:
                admitted.append(request)
                if not self._fits(admitted, plan.free_blocks, view) or not plan.add(request, whole=True):
                    break
        return plan.build()

    def on_finish(self, request: Request) -> None:
        self._ended.observe(request)

    def _fits(self, admitted: list[Request], free_blocks: int, view: View) -> bool:
        """Returns whether the last request fits beside the others; a single request always fits."""
        if self.admission == "aggressive":
            fits = free_blocks - view.kv.blocks_for(admitted[-1].num_tokens) >= WATERMARK * view.kv.num_blocks
        elif self.admission == "conservative":
            fits = sum(request.max_tokens for request in admitted) <= view.kv.num_tokens
        else:
            fits = self._peak(admitted) < view.kv.num_tokens * (1 - self.reserve)
        return fits or len(admitted) == 1

    def _peak(self, admitted: list[Request]) -> float:
        """Returns the most tokens of KV cache that requests will hold, over all draws."""
        held = [request.num_tokens for request in admitted]
        if self.admission == "optimum":
            return most_held(held, [self._oracle.remaining(request) for request in admitted])
        generated = [request.num_new_tokens for request in admitted]
        limits = [request.max_new_tokens for request in admitted]
        ended = self._ended.ascending or limits[-1:]
        return max(most_held(held, draw_left(self._random, generated, limits, ended)) for _ in range(self.draws))
