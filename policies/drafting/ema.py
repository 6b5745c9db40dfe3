"""SGLang's number of drafts by a moving mean of the accepted ones (`--speculative-adaptive`, strategy `ema`).

Each range of batch sizes has candidates, a moving mean that begins at its present candidate less 1, and a count of its batches. The
batch's mean of accepted drafts enters with weight 0.2. After 10 batches, every fifth one steps down while the mean is at most the next
lower candidate less 0.75, and otherwise up while it is above the present candidate less 0.5. After 0 drafts, which measure nothing, the
next candidate is tried. The load matters only through the ranges.

Source: sglang 015c8726, python/sglang/srt/speculative/adaptive_spec_params.py; at 13d3f642 the candidates were [1, 3, 7] for every size.
Difference: the size of a batch is its number of decodes, without padding to a captured graph.
"""

from collections.abc import Mapping, Sequence

from cbatch import ConfigError, PlanBuilder, Request, View
from policies.drafting.rule import DraftingRule, check_counts

WEIGHT, WARM_UP, INTERVAL, RISE, DROP = 0.2, 10, 5, -0.5, -0.5
HYSTERESIS = -0.25  # of a step down

SGLANG = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""SGLang's candidates by the smallest batch; in SGLang only the first have the hysteresis, a user's own all do."""


class Ema(DraftingRule):
    def __init__(self, candidates: Mapping[int, Sequence[int]] | Sequence[int] | None = None, start: int = 3) -> None:
        """candidates: by the smallest batch, or the same for all batches; None: SGLang's. start: the first one, or the middle if it is none."""
        own = candidates if isinstance(candidates, Mapping) else {1: candidates or ()}
        ranges: Mapping[int, Sequence[int]] = SGLANG if candidates is None else own
        for counts in ranges.values():
            check_counts("candidates", counts, several=True)
        if not all(type(fewest) is int for fewest in ranges):
            raise ConfigError(f"drafting.candidates={dict(ranges)}: give the smallest batches as whole numbers")
        self.candidates, self.start = candidates, start
        self._slots = [
            (fewest, Slot(ranges[fewest], start, 0.0 if candidates is None and fewest > 1 else HYSTERESIS))
            for fewest in sorted(ranges)
        ]

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        return self._slot(len(decodes)).k

    def observe(self, drafts: Sequence[int], accepted: Sequence[int]) -> None:
        """Enters a batch; one in which no drafts fit measures nothing."""
        slot, drafted = self._slot(len(drafts)), sum(map(bool, drafts))
        if drafted or not slot.k:
            slot.observe(sum(accepted) / max(drafted, 1))

    def _slot(self, batch: int) -> "Slot":
        return next((slot for fewest, slot in reversed(self._slots) if fewest <= batch), self._slots[0][1])


class Slot:
    """The candidates of a range of batch sizes. k: the present one. mean: of accepted drafts."""

    def __init__(self, candidates: Sequence[int], start: int, hysteresis: float = HYSTERESIS) -> None:
        self._candidates, self._hysteresis = candidates, hysteresis
        self.k = start if start in candidates else candidates[len(candidates) // 2]
        self.mean = self.k - 1.0
        self._num_batches = 0

    def observe(self, accepted: float) -> None:
        """Enters a batch's mean of accepted drafts."""
        if self.k > 0:
            self.mean = (1 - WEIGHT) * self.mean + WEIGHT * accepted
        self._num_batches += 1
        if self._num_batches > WARM_UP and (self._num_batches - WARM_UP) % INTERVAL == 0:
            self.k = self._choose()

    def _choose(self) -> int:
        candidates, place = self._candidates, self._candidates.index(self.k)
        if self.k == 0:
            following = candidates[min(1, len(candidates) - 1)]
            if following > 0 > self.mean:
                self.mean = following - 1.0
            return following
        while place and self.mean <= self._drop_below(candidates[place - 1]):
            place -= 1
        if candidates[place] == self.k:
            while place < len(candidates) - 1 and self.mean > candidates[place] + RISE:
                place += 1
        return candidates[place]

    def _drop_below(self, lower: int) -> float:
        """Returns the mean up to which the next lower candidate is taken; 0 drafts already at a mean above 0."""
        return (lower + DROP if lower else -DROP) + self._hysteresis
