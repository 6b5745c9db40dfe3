"""Poison: fills buffers with values that must never be read, and reports tokens that were computed from them."""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.request_table import Ints
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Fields
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.ranks import Steps
from cbatch.runtime.slots import Slot


def poison_slots(slots: Iterable[Slot]) -> None:
    """Put -1 into the token buffers, and NaN into those of hidden states, before their first use."""
    for slot in slots:
        slot.tokens.fill_(-1)
        for sampled in slot.sampled:
            sampled.fill_(-1)
        for rank in (rank for stage in slot.stages[1:] for rank in stage.ranks):
            rank.arriving.fill_(torch.nan)


def poison_cache(cache: PagedCache) -> None:
    """Put NaN into all keys and values: it spreads to every token computed from what was never written."""
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)


class PoisonedIteration(EagerIteration):
    """Samples -1 where logits are NaN."""

    def _choose(self, index: int, logits: torch.Tensor, out: torch.Tensor) -> Steps[None]:
        tokens = torch.empty_like(out, device=logits.device)
        yield from super()._choose(index, logits, tokens)
        self._send(_mark(tokens, logits), out)

    def _draw(self, logits: torch.Tensor, batch: Fields[torch.Tensor]) -> torch.Tensor:
        return _mark(super()._draw(logits, batch), logits)


def _mark(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Ranks have the same hidden states, so one rank's logits are NaN where all are."""
    return tokens.masked_fill_(logits.isnan().any(dim=-1), -1)


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
