"""SGLang's number of drafts with the most tokens per second (`--speculative-adaptive`, strategy `throughput_aware`).

Every 10 batches, once each draft in use has 20 observations, k is the candidate with the largest (1 + p_1 + ... + p_k) / seconds(batch, k).
p_i is the mean over the last 20 batches of the share of requests whose draft i was accepted; of drafts without observations it falls
geometrically, by the mean fall of those before. A step down forgets the drafts above.

Source: sglang forks' python/sglang/srt/speculative/throughput_aware_controller.py (088c5abe) and throughput_aware_spec_params.py
(23570745). Differences: seconds come from the cost model for the present batch and its context, not from a table measured at start for
prompts of 2,048 tokens or less; candidates are the same for all batches. 0 is refused as a candidate, as there.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean

from cbatch import PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule, check_counts
from policies.shared.step_times import shape_of


class ThroughputAware(DraftingRule):
    def __init__(
        self, candidates: Sequence[int] = (1, 3, 5, 7), start: int = 3, window: int = 20, every: int = 10
    ) -> None:
        """start: the first candidate, or the middle one if it is none. window: batches in a mean. every: batches between decisions."""
        check_counts("candidates", candidates, 1, several=True)
        check_counts("window", window, 1)
        check_counts("every", every, 1)
        self.candidates, self.start, self.window, self.every = (*candidates,), start, window, every
        self.k = start if start in candidates else candidates[len(candidates) // 2]
        self.rates = [deque[float](maxlen=window) for _ in range(candidates[-1])]
        self._num_batches = self._decided_at = 0

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        if self._is_due():
            shape = shape_of(plan.plan)
            seconds = {k: view.cost.predict(shape.with_drafts(k * len(decodes))) for k in self.candidates}
            self.choose({k: seconds[k] + view.drafts.seconds(len(decodes), k) for k in self.candidates})
        return self.k

    def observe(self, drafts: Sequence[int], accepted: Sequence[int]) -> None:
        """Enters a batch for the drafts that each of its requests with drafts had."""
        if drafted := [*filter(None, drafts)]:
            for place in range(min(*drafted, len(self.rates))):
                self.rates[place].append(sum(count > place for count in accepted) / len(drafted))
            self._num_batches += 1

    def choose(self, seconds: dict[int, float]) -> None:
        """Takes the candidate with the most tokens per second. seconds: of an iteration, by the number of drafts."""
        expected = self.expected_rates()
        before, self.k = self.k, max(seconds, key=lambda k: (1 + sum(expected[:k])) / seconds[k])
        for place in range(self.k, before):
            self.rates[place].clear()

    def expected_rates(self) -> list[float]:
        """Returns the acceptance of each draft, of those without observations by extrapolation."""
        rates: list[float] = []
        for seen in self.rates:
            if seen:
                rates.append(fmean(seen))
            elif len(rates) < 2:
                rates.append(rates[0] if rates else 0.0)
            else:
                fall = (rates[-1] / rates[0]) ** (1 / (len(rates) - 1)) if rates[0] else 0.0
                rates.append(rates[-1] * min(fall, 1.0))
        return rates

    def _is_due(self) -> bool:
        if self._num_batches == self._decided_at or self._num_batches % self.every:
            return False
        self._decided_at = self._num_batches
        return all(len(seen) == self.window for seen in self.rates[: self.k])
