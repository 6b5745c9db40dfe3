"""A simulated drafter: which drafts are accepted, drawn from survivals, and how long drafting takes.

The survival S_i is the share of verifications that accept draft i, and so all before it. Each position of each request has one uniform
number u, made from (seed, request, position) alone. Where the newest token has position p, draft i is a guess of the token at p + i: if
the drafts before it are accepted, it is as well if u(p + i) < S_i / S_(i-1). So every policy meets the same numbers, and a position
decides once: after a rejection, the base token takes the position.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cbatch.drafts import Drafter
from cbatch.errors import ConfigError
from cbatch.executor import Step
from cbatch.request import Ints

_WORDS = tuple(np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class SurvivalsDrafter(Drafter):
    """Draws outcomes of drafts that have no values."""

    def __init__(
        self, survivals: Sequence[float], seed: int = 0, seconds: Callable[[int, int], float] = lambda number, k: 0.0
    ) -> None:
        """survivals: of draft 1, 2, ...; further drafts are never accepted. seconds: of k drafts for each of a number of requests.

        Raises ConfigError unless the survivals fall from at most 1 to at least 0.
        """
        if any(not 0 <= later <= before for before, later in pairwise([1.0, *survivals])):
            raise ConfigError(f"drafter.survivals={[*survivals]}: shares from 1 to 0, none above the one before")
        self.survivals, self.seed, self._seconds = survivals, seed, seconds
        self._rates = np.array([later / before if before else 0.0 for before, later in pairwise([1.0, *survivals])])

    def seconds(self, num_requests: int, k: int) -> float:
        return self._seconds(num_requests, k)

    def draw(self, step: Step) -> Ints:
        """Returns the accepted drafts of each request of a step with drafts."""
        assert step.drafts is not None
        places = np.arange(1, min(int(step.drafts.max()), len(self._rates)) + 1)
        newest = step.start + step.num_tokens - step.drafts - 1  # position of the newest token that is not a draft
        drawn = uniforms(self.seed, step.table.id[step.rows], newest[:, None] + places)
        accepted = (drawn < self._rates[: len(places)]) & (places <= step.drafts[:, None])
        numbers: Ints = np.logical_and.accumulate(accepted, axis=1).sum(1)
        return numbers

    def seconds_of(self, step: Step) -> float:
        """Returns the seconds of drafting for a step: of each number of drafts for the requests that have at least so many."""
        assert step.drafts is not None
        having = [int(np.count_nonzero(step.drafts >= k)) for k in range(1, int(step.drafts.max()) + 1)]
        return sum(self.seconds(number, k) - self.seconds(number, k - 1) for k, number in enumerate(having, 1))


def uniforms(seed: int, requests: Ints, positions: Ints) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each position, [requests, positions], by the finaliser of SplitMix64."""
    mixed = _mix(np.full_like(requests, seed).astype(np.uint64)) ^ requests.astype(np.uint64)
    bits = _mix(_mix(mixed)[:, None] ^ positions.astype(np.uint64))
    drawn: NDArray[np.float64] = np.multiply(bits >> np.uint64(11), 2.0**-53, dtype=np.float64)
    return drawn


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    step, first, second = _WORDS
    values = values + step
    values = (values ^ (values >> np.uint64(30))) * first
    values = (values ^ (values >> np.uint64(27))) * second
    return values ^ (values >> np.uint64(31))
