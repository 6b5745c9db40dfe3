"""Past-Future admission: no more requests than the KV cache holds at its peak (Gong et al., ASPLOS 2025; 2507.10150).

The output still to come of each running request is drawn from the lengths of the last requests that ended, given what
it has generated. A waiting request, first come, first served, is admitted while the peak of the cache that follows
stays below its size, less a reserve. The largest of several draws counts. When the cache is full all the same, the
newest is preempted.

    admission   past_future   as above          optimum       the same with true lengths
                aggressive    while the prompt fits and 1% of the blocks stay free
                conservative  while prompt and limit of all admitted requests fit

Source: the paper and the code (ModelTC/lightllm, branch future_past_router; artifact WuSiYu/lightllm-ae). Constants
differ there from place to place: window and reserve are those of the artifact's simulator. Differs from it: prompts are
computed in the iteration of their admission, beside decodes. Until a request has ended, the
limit of the one to be admitted stands for the history.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from random import Random

from cbatch import ConfigError, Plan, Request, View
from policies.mc_sf import most_held
from policies.predictors import Oracle

ADMISSIONS = ("past_future", "aggressive", "conservative", "optimum")
WATERMARK = 0.01


class PastFuture:
    def __init__(
        self,
        admission: str = "past_future",
        window: int = 1000,
        reserve: float = 0.03,
        draws: int = 3,
        seed: int = 0,
        history: Sequence[int] = (),
    ) -> None:
        """
        Args:
            window: ended requests to draw from. reserve: share of the cache left free. draws: of each admission.
            history: output lengths of requests that ended before the run, oldest first.
        """
        if admission not in ADMISSIONS or window < 1 or not 0 <= reserve < 1 or draws < 1:
            given = f"{admission=}, {window=}, {reserve=}, {draws=}"
            raise ConfigError(f"policy: {given}; admission is one of {', '.join(ADMISSIONS)}, 0 <= reserve < 1")
        self.admission, self.reserve, self.draws = admission, reserve, draws
        self._random, self._oracle = Random(seed), Oracle()
        self._ended: deque[int] = deque(history, maxlen=window)
        self._sorted = sorted(self._ended)

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        if not plan.plan.preempt and view.waiting and plan.can_admit:
            admitted = [*view.running]
            for request in view.waiting:
                admitted.append(request)
                if not self._fits(admitted, plan.free_blocks, view) or not plan.add(request, whole=True):
                    break
        return plan.build()

    def on_finish(self, request: Request) -> None:
        if len(self._ended) == self._ended.maxlen:
            self._sorted.remove(self._ended[0])
        self._ended.append(request.num_output_tokens)
        insort(self._sorted, request.num_output_tokens)

    def _fits(self, admitted: list[Request], free_blocks: int, view: View) -> bool:
        size = view.kv.num_blocks * view.kv.block_size
        if self.admission == "aggressive":
            lacking = view.kv.blocks_for(admitted[-1].num_tokens)
            return free_blocks - lacking >= WATERMARK * view.kv.num_blocks or len(admitted) == 1
        if self.admission == "conservative":
            return sum(request.max_tokens for request in admitted) <= size
        held = [request.num_tokens for request in admitted]
        if self.admission == "optimum":
            peak = most_held(held, [self._oracle.remaining(request) for request in admitted])
        else:
            history = self._sorted or [admitted[-1].max_new_tokens]
            draws = ([self._drawn(request, history) for request in admitted] for _ in range(self.draws))
            peak = max(most_held(held, left) for left in draws)
        return peak < size * (1 - self.reserve) or len(admitted) == 1

    def _drawn(self, request: Request, history: Sequence[int]) -> float:
        """Output tokens still to come: a draw from the sorted history above what is generated, linear between its lengths."""
        generated = request.num_new_tokens
        if not generated:
            return history[self._random.randrange(len(history))]
        first = bisect_right(history, generated)
        place = self._random.random() * (len(history) - first + 1)
        step = int(place)
        low = history[first + step - 1] if step else generated
        high = history[first + step] if first + step < len(history) else max(request.max_new_tokens, generated)
        return low + (place - step) * (high - low) - generated
