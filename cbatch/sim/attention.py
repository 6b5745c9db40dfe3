"""Seconds of one layer's attention on one GPU: from measured tables, or in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from cbatch.cost import BatchShape
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.sim.interpolation import Grid


class Attention(Protocol):
    def seconds(self, shape: BatchShape) -> float:
        """Of one layer. 0 for an empty shape."""
        ...

    def covers(self, shape: BatchShape) -> bool:
        """Whether the shape lies within what was measured."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """What a paged-attention kernel reaches, whatever the model.

    bandwidth_bytes_per_second: decodes are bound by reading the KV cache.
    chunk_bandwidth_bytes_per_second, flops_per_second: a prompt chunk takes the larger of reading its context, at a rate
        of its own since fewer blocks run, and of its arithmetic.
    base_seconds: of a call. mixed_seconds: added where chunks and decodes share an iteration.
    seconds_per_context_token: bounds a single decode: without splitting the KV cache of one sequence over the chip, it
        is read by one block at a time.
    """

    bandwidth_bytes_per_second: float
    flops_per_second: float
    chunk_bandwidth_bytes_per_second: float
    base_seconds: float = 0.0
    mixed_seconds: float = 0.0
    seconds_per_context_token: float = 0.0

    def of(self, share: ModelSpec) -> RateAttention:
        """For one GPU's share of a model."""
        kv_bytes = 2 * share.num_kv_heads * share.head_dim * DTYPE_BYTES[share.dtype]
        return RateAttention(
            self.base_seconds,
            self.mixed_seconds,
            kv_bytes / self.bandwidth_bytes_per_second,
            self.seconds_per_context_token,
            kv_bytes / self.chunk_bandwidth_bytes_per_second,
            4 * share.num_heads * share.head_dim / self.flops_per_second,
        )


@dataclass(frozen=True, slots=True)
class RateAttention:
    """base + max(decodes' bytes + chunks, longest decode), see `AttentionRates`; seconds for each unit."""

    base: float
    mixed: float
    per_decode_context: float
    per_longest_context: float
    per_chunk_context: float
    per_score: float

    def seconds(self, shape: BatchShape) -> float:
        chunks, num_decodes, context_of_decodes, *_ = shape
        if not chunks and not num_decodes:
            return 0.0
        seconds = context_of_decodes * self.per_decode_context
        for tokens, context in chunks:
            scores = tokens * (context + (tokens + 1) / 2)
            seconds += max(scores * self.per_score, (context + tokens) * self.per_chunk_context)
        if num_decodes:
            seconds = max(seconds, context_of_decodes / num_decodes * self.per_longest_context)
            if chunks:
                seconds += self.mixed
        return self.base + seconds

    def covers(self, shape: BatchShape) -> bool:
        return True


@dataclass(frozen=True)
class TableAttention:
    """Measured tables of two kernels that run one after the other.

    chunks: seconds against (tokens, context before them) of one chunk; several in an iteration are summed.
    decodes: seconds against (number, mean context) of decodes. How contexts differ is left out: a kernel that gives each
        multiprocessor an equal share of all of them takes as long.
    mixed_decodes: the same, of decodes that share an iteration with a chunk, where that was measured to differ.
    """

    chunks: Grid
    decodes: Grid
    mixed_decodes: Grid | None = None

    @cached_property
    def _surely(self) -> tuple[float, float, float, float]:
        """Tokens and context, number and context up to which the tables cover all: spares the search in most cases."""
        return (*self.chunks.rectangle(), *self.decodes.rectangle())

    def seconds(self, shape: BatchShape) -> float:
        chunks, num_decodes, context_of_decodes, _ = shape
        seconds = 0.0
        for tokens, context in chunks:
            seconds += self.chunks.at(tokens, context)
        if num_decodes:
            table = self.mixed_decodes if chunks and self.mixed_decodes is not None else self.decodes
            seconds += table.at(num_decodes, context_of_decodes / num_decodes)
        return seconds

    def covers(self, shape: BatchShape) -> bool:
        most_tokens, most_before, most_decodes, most_context = self._surely
        for tokens, before in shape.chunks:
            if (tokens > most_tokens or before > most_before) and not self.chunks.covers(tokens, before):
                return False
        number = shape.num_decodes
        if not number or (number <= most_decodes and shape.decode_context <= number * most_context):
            return True
        return self.decodes.covers(number, shape.decode_context / number)
