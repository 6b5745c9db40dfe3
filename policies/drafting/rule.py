"""The interface of drafting rules, which choose how many tokens to draft for each decode."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cbatch import ConfigError, Described, PlanBuilder, Request, View

Floats = NDArray[np.float64]


class DraftingRule(Described, ABC):
    """Chooses the drafts of an iteration's decodes, when the iteration's prompt chunks are known. May keep state, updated by `observe`."""

    @abstractmethod
    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int | Sequence[int]:
        """Returns the drafts of each decode, or one number for all: whole, at least 0. Numbers above the drafter's, and beyond what fits, are cut."""

    def observe(self, drafts: Sequence[int], accepted: Sequence[int]) -> None:
        """Called when an iteration with decodes has ended. drafts, accepted: of each of its decodes; accepted ones without the base token."""


def survivals_of_decodes(view: View, decodes: Sequence[Request]) -> Floats:
    """Returns the measured survivals, [decodes, most drafts], descending along each row."""
    rows = [view.drafts.survivals(request) for request in decodes]
    return np.minimum.accumulate(np.array(rows).reshape(len(rows), view.drafts.most), axis=1)


def check_counts(name: str, given: int | Sequence[int], least: int = 0, *, several: bool = False) -> None:
    """Raises ConfigError unless a number is whole, or `several` are whole and ascending, from `least` or above."""
    counts = [*given] if isinstance(given, Sequence) else [given]
    whole = several is isinstance(given, Sequence) and all(type(count) is int for count in counts)
    if not counts or not whole or counts != sorted({*counts}) or counts[0] < least:
        wanted = (
            f"numbers of drafts, ascending from {least} or above" if several else f"a whole number, at least {least}"
        )
        raise ConfigError(f"drafting.{name}={given}: give {wanted}")
