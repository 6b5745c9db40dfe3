"""Predicts the seconds of one layer's attention on one GPU, from measured tables or in closed form."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Protocol

from cbatch.cost import BatchShape, scores
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear
from cbatch.sim.schema import BytesPerSecond, FlopsPerSecond, HostSeconds, NotNegative


class Attention(Protocol):
    def seconds(self, shape: BatchShape) -> float:
        """Returns the seconds of one layer; 0 for an empty shape."""

    def covers(self, shape: BatchShape) -> bool:
        """Returns whether the shape lies within the measured range; True for rates."""
        return True


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Rates of a paged-attention kernel, independent of the model.

    bandwidth_bytes_per_second: rate at which decodes read the KV cache.
    chunk_bandwidth_bytes_per_second, flops_per_second: a chunk takes the longer of reading and computing.
    base_seconds: per call. mixed_seconds: added if chunks and decodes share an iteration.
    seconds_per_context_token: lower bound for the longest decode, if the kernel does not split sequences.
    """

    bandwidth_bytes_per_second: BytesPerSecond
    flops_per_second: FlopsPerSecond
    chunk_bandwidth_bytes_per_second: BytesPerSecond
    base_seconds: HostSeconds = 0.0
    mixed_seconds: HostSeconds = 0.0
    seconds_per_context_token: NotNegative = 0.0

    def of(self, share: ModelSpec) -> "RateAttention":
        """Returns the attention times of one GPU's share of a model."""
        kv_bytes = 2 * share.num_kv_heads * share.head_dim * DTYPE_BYTES[share.dtype]
        return RateAttention(
            self,
            per_decode_context=kv_bytes / self.bandwidth_bytes_per_second,
            per_chunk_context=kv_bytes / self.chunk_bandwidth_bytes_per_second,
            per_score=flops_per_score(share) / self.flops_per_second,
            rows_per_read=rows_per_read(share),
        )


@dataclass(frozen=True, slots=True)
class RateAttention(Attention):
    """Predicts base + max(decodes' bytes + chunks, longest decode), from seconds per unit of context and score."""

    rates: AttentionRates
    per_decode_context: float
    per_chunk_context: float
    per_score: float
    rows_per_read: int = 1

    def seconds(self, shape: BatchShape) -> float:
        chunks, num_decodes, context_of_decodes, *_ = shape.read_together(self.rows_per_read)
        if not chunks and not num_decodes:
            return 0.0
        seconds = context_of_decodes * self.per_decode_context
        for tokens, context in chunks:
            seconds += max(scores(tokens, context) * self.per_score, (context + tokens) * self.per_chunk_context)
        if num_decodes:
            seconds = max(seconds, context_of_decodes / num_decodes * self.rates.seconds_per_context_token)
            if chunks:
                seconds += self.rates.mixed_seconds
        return self.rates.base_seconds + seconds


@dataclass(frozen=True)
class TableAttention:
    """Measured tables of two kernels that run one after the other.

    chunks: seconds against (tokens, preceding context) of one chunk; an iteration's chunks are summed.
    decodes: seconds against (number, mean context) of decodes. The spread of contexts is ignored: it does not affect a kernel that
        divides all contexts evenly among the multiprocessors.
    mixed_decodes: the same for decodes that share an iteration with a chunk, if measured to differ.
    seconds_per_score: at the device's largest rate; no chunk outside the measured range is faster.
    seconds_per_read: of one context token at the memory's peak rate; no decodes outside the measured range are faster.
    shared_reads: share of the time of reading a context token that is saved if another decode also reads the token, which then
        comes from a GPU cache; against decodes. None: nothing is saved.
    least_read: time of reading all context from that cache, as a share of the time of reading it from memory.
    rows_per_read: see `rows_per_read`.
    drafted: the same as `decodes` for reads of `rows_per_read` rows each, against (number of reads, mean context). Between one row and these
        the time is linear in the rows. Two reads of a request save nothing. None: a read takes as long with more rows.
    """

    chunks: ChunkGrid
    decodes: BilinearGrid
    mixed_decodes: BilinearGrid | None = None
    seconds_per_score: float = 0.0
    seconds_per_read: float = 0.0
    shared_reads: PiecewiseLinear | None = None
    least_read: float = 0.0
    rows_per_read: int = 1
    drafted: BilinearGrid | None = None

    @cached_property
    def _surely(self) -> tuple[float, float]:
        """Returns tokens and context up to which the chunk table covers every shape; avoids most searches."""
        return self.chunks.rectangle()

    @cached_property
    def _of_chunk(self) -> Callable[[int, int], float]:
        """Returns a function from a chunk's tokens and context to its seconds; replicas of one kind meet the same chunks."""
        most_tokens, most_before = self._surely

        @lru_cache(maxsize=2**16)
        def seconds_of(tokens: int, context: int) -> float:
            predicted = self.chunks.at(tokens, context)
            if tokens > most_tokens or context > most_before:
                return max(predicted, scores(tokens, context) * self.seconds_per_score)
            return predicted

        return seconds_of

    @cached_property
    def _reach(self) -> Callable[[int], float]:
        """Returns a function from a number of decodes to the largest total context in the range of their table."""
        return cache(lambda number: number * self.decodes.reach(number))

    @cached_property
    def _saved(self) -> Callable[[int], float]:
        """Returns a function from a number of decodes to the share of a shared token's read time that is saved."""
        shared = self.shared_reads
        return cache(lambda number: 0.0 if shared is None else max(shared.at(number), 0.0))

    @cached_property
    def seconds_per_context(self) -> float:
        """Returns the least seconds per context token of decodes outside the measured range: at the largest measured rate.

        Differences of short measured times can imply more than the memory's peak rate, which therefore limits the rate.
        """
        rows = zip(self.decodes.sizes, self.decodes.columns, self.decodes.seconds, strict=True)
        measured = min(seconds[-1] / (number * contexts[-1]) for number, contexts, seconds in rows)
        return max(measured, self.seconds_per_read)

    def seconds(self, shape: BatchShape) -> float:
        chunks, num_decodes, context_of_decodes, _, num_shared, _ = shape.read_together(self.rows_per_read)
        seconds = 0.0
        for tokens, context in chunks:
            seconds += self._of_chunk(tokens, context)
        if num_decodes:
            read: float = context_of_decodes
            if drafted := self.drafted if shape.num_drafts and self.rows_per_read > 1 else None:
                repeated = 1 - (shape.num_decodes - shape.num_drafts) / num_decodes  # a request's reads after its first
                num_shared = max(num_shared - int(read * repeated), 0)
            if num_shared and (saved := self._saved(num_decodes)):
                read = max(read - num_shared * saved, self.least_read * read)
            table = self.mixed_decodes if chunks and self.mixed_decodes is not None else self.decodes
            predicted = table.at(num_decodes, read / num_decodes)
            if drafted:
                more = (shape.num_decodes / num_decodes - 1) / (self.rows_per_read - 1)
                without = self.decodes.at(num_decodes, read / num_decodes)
                predicted += more * (drafted.at(num_decodes, read / num_decodes) - without)
            if context_of_decodes > self._reach(num_decodes):
                predicted = max(predicted, read * self.seconds_per_context)
            seconds += predicted
        return seconds

    def covers(self, shape: BatchShape) -> bool:
        chunks, number, context, *_ = shape.read_together(self.rows_per_read)
        most_tokens, most_before = self._surely
        for tokens, before in chunks:
            if (tokens > most_tokens or before > most_before) and not self.chunks.covers(tokens, before):
                return False
        return not number or context <= self._reach(number)


def rows_per_read(share: ModelSpec) -> int:
    """Returns how many rows of a request the runtime's decode kernel reads its context for at once: they share 16 queries of a KV head."""
    group = share.num_heads // share.num_kv_heads
    return max(16 >> (group - 1).bit_length(), 1)


def flops_per_score(share: ModelSpec) -> int:
    """Returns one layer's floating-point operations per score: a product of query and key, and of its weight and a value."""
    return 4 * share.num_heads * share.head_dim
