"""Chooses tokens from logits: greedily, or by drawing from the tempered, filtered distribution.

Each row is sampled from its own logits and random number, so a request gets the same tokens in any batch. Shapes are fixed
and nothing is read from the device, so a graph can capture both functions.
"""

import torch

from cbatch.runtime.batch import Fields

_OF_SEED, _OF_POSITION = 0x9E3779B97F4A7C15 - 2**64, 0xD1342543DE82EF95 - 2**64
_MIXED = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the most likely token of each row of `logits`, [rows, vocabulary], to `out`, int32 [rows]; on a tie the lowest id."""
    out.copy_(logits.argmax(dim=-1))


def sample(logits: torch.Tensor, batch: Fields[torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
    """Draws a token for each row of `logits`, [rows, vocabulary]; rows of temperature 0 are greedy. Returns int32 [rows].

    Inverts softmax(logits / temperature), sorted in descending order, at the row's number in [0, 1), float32 [rows]. Top-k keeps the first k tokens (0: all).
    Top-p then keeps the fewest tokens, at least one, whose share of the remaining weight reaches p (Holtzman et al. 2020).
    The largest logit is subtracted before the division: its quotient is 0, where a tiny temperature would overflow.
    """
    temperature = batch.temperature.clamp(min=torch.finfo(torch.float32).tiny)  # a device may take smaller ones for 0
    ordered, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    weights = ((ordered - ordered[:, :1]) / temperature[:, None]).softmax(dim=-1)  # [rows, vocabulary]
    rank = torch.arange(weights.shape[-1], device=weights.device)
    weights = weights.masked_fill((rank >= batch.top_k[:, None]) & (batch.top_k[:, None] > 0), 0)
    reached = weights.cumsum(dim=-1)
    before = reached - weights  # cumulative weight of the likelier tokens
    weights = weights.masked_fill((before >= batch.top_p[:, None] * reached[:, -1:]) & (rank > 0), 0)
    reached = weights.cumsum(dim=-1)
    passed = reached <= numbers[:, None] * reached[:, -1:]
    place = torch.minimum(passed.sum(dim=-1), (weights > 0).sum(dim=-1) - 1).clamp(min=0)
    place = torch.where(batch.temperature > 0, place, 0)  # [rows]
    return tokens.gather(-1, place[:, None])[:, 0].to(torch.int32)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns 24-bit random numbers in [0, 1) from seed and position (SplitMix64, Steele et al., OOPSLA 2014), float32 [rows].

    seeds: int32 [rows, 2], lower half first. positions: int32 [rows]. Integers of 64 bits wrap, as those of the source without sign.
    """
    lower, upper = seeds.long().unbind(1)
    z = (upper << 32 | lower & 0xFFFFFFFF) * _OF_SEED + positions.long() * _OF_POSITION
    for shift, factor in _MIXED:
        z = (z ^ _shift(z, shift)) * factor
    return _shift(z ^ _shift(z, 31), 40).float() / (1 << 24)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifts to the right, and fills with zeros."""
    return (z >> bits) & ((1 << 64 - bits) - 1)
