"""Poison: fills buffers with values that must never be read, and reports tokens that were computed from them."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.request_table import Ints
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Fields, Work
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.slots import Slot


def poison_slots(slots: Iterable[Slot]) -> None:
    """Put -1 into the token buffers, and NaN into those of hidden states, before their first use."""
    for slot in slots:
        slot.sampled.fill_(-1)
        slot.tokens.fill_(-1)
        for stage in slot.stages[1:]:
            stage.arriving.fill_(torch.nan)


def poison_cache(cache: PagedCache) -> None:
    """Put NaN into all keys and values: it spreads to every token computed from what was never written."""
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)


class PoisonedIteration(EagerIteration):
    """Samples -1 where logits are NaN."""

    def _choose(self, batch: Fields[torch.Tensor], logits: torch.Tensor, work: Work, out: torch.Tensor) -> None:
        tokens = torch.empty_like(out, device=logits.device)
        super()._choose(batch, logits, work, tokens)
        self._send(tokens.masked_fill_(logits.isnan().any(dim=-1), -1), out)


def check_tokens(tokens: NDArray[np.int32], sampled: Ints) -> None:
    """
    Args:
        tokens: int32 [rows]; those of an iteration. sampled: the rows that sampled one.

    Raises:
        RuntimeError: a sampled token is poisoned.
    """
    if (tokens[sampled] < 0).any():
        rows = np.flatnonzero(tokens < 0).tolist()
        raise RuntimeError(f"poison: the tokens of rows {rows} were computed from memory that was never written")
