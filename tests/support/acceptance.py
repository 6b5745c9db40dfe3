"""Acceptance lengths and speed-ups of speculative decoding, in closed form.

The survival S_i is the share of verifications that accept draft i, and so all drafts before. The acceptance length counts the base
token, which every verification yields: with k drafts it lies in [1, k + 1]. Published numbers often leave the base token out.
"""

from collections.abc import Sequence
from itertools import pairwise


def survivals_of(alpha: float, k: int) -> list[float]:
    """Returns the survivals of k drafts that are accepted independently with equal probability (Leviathan et al., arXiv 2211.17192)."""
    return [alpha**place for place in range(1, k + 1)]


def conditional_rates(survivals: Sequence[float]) -> list[float]:
    """Returns how often each draft is accepted where those before it were; 0 after a survival of 0."""
    return [later / before if before else 0.0 for before, later in pairwise([1.0, *survivals])]


def acceptance_length(survivals: Sequence[float]) -> float:
    """Returns the mean tokens of a verification, the base token included."""
    return 1.0 + sum(survivals)


def speed_up(length: float, k: int, draft_share: float) -> float:
    """Returns how much faster one request is served. draft_share: time of a draft over that of an iteration, which a verification takes, too."""
    return length / (1.0 + k * draft_share)
