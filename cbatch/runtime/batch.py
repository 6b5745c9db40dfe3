"""Packs the inputs of an iteration into one buffer, which one copy moves to the device.

    | token_ids carry behind positions kv_indices | query_starts context_lens drafts temperature top_k top_p seeds    | block_tables |
      int32 [tokens] each                           int32 [rows] each (query_starts one more, seeds two per row)      [rows, blocks]

A row is a request of the batch, or one of its drafts (`Step.split`). Padding is data, not a branch: padding rows are empty, and padding tokens belong to no row and
write to the dummy block, which follows the last block of the pool. This module knows nothing about streams or models.
"""

from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.executor import Step
from cbatch.kv import blocks_for
from cbatch.limits import Limits

Array = TypeVar("Array")

PLACEHOLDER = 0
"""Token id of an input that is carried over on the device; carry-over adds the sampled token to the placeholder."""

NOT_CARRIED = 0  # index in the source iteration's `sampled` of the entry that is always 0


ANY = 2**31 - 1  # as many requests as there are rows


class Shape(NamedTuple):
    """Padded size of an iteration; a CUDA graph can be captured for it.

    num_blocks: width of the block tables. num_drafts: most drafts of a request. num_requests: most requests, where drafts are made for each.
    """

    num_tokens: int
    num_rows: int
    num_blocks: int
    num_drafts: int = 0
    num_requests: int = ANY

    @classmethod
    def of(cls, step: Step) -> "Shape":
        """Returns the shape of a split step, including the padding that its plan requests."""
        width = step.pool.blocks_for(int((step.start + step.num_tokens).max()))
        return cls(step.pad_to, len(step.rows), width, most_drafts(step), count_requests(step))

    @classmethod
    def largest(cls, limits: Limits, block_size: int) -> "Shape":
        """Returns the shape of the largest iteration within the limits."""
        width = blocks_for(limits.max_request_tokens, block_size)
        return cls(max(limits.max_tokens, limits.max_rows), limits.max_rows, width)

    @property
    def size(self) -> int:
        """Returns the number of int32 words in the packed buffer."""
        return 6 * self.num_tokens + 8 * self.num_rows + 1 + self.num_rows * self.num_blocks


def most_drafts(step: Step) -> int:
    """Returns the most drafts of a request of a split step."""
    return 0 if step.within is None else int(step.within.max())


def count_requests(step: Step) -> int:
    """Returns the requests of a split step."""
    return len(step.rows) if step.within is None else int((step.within == 0).sum())


@dataclass(frozen=True, slots=True)
class Fields(Generic[Array]):
    """Views of one packed buffer: numpy arrays of the host's buffer, or tensors of the device's buffer.

    token_ids: int32 [tokens]; `PLACEHOLDER` where a token is carried over.
    carry: int32 [tokens]; 1 + the row of the source iteration whose sampled token is added, or `NOT_CARRIED`.
    behind: int32 [tokens]; drafts of the request in the source iteration. Positions, cache indices and context lengths count all of them, until
        `carry.step_back` takes those back that were rejected.
    positions: int32 [tokens]; position of each token in its request.
    kv_indices: int32 [tokens]; cache index of each token's key and value: block * block size + offset.
    sent: int32 [tokens]; see `Step.sent`.
    query_starts: int32 [rows + 1]; first token of each row.
    context_lens: int32 [rows]; tokens of each request in the KV cache, including this iteration's tokens.
    drafts: int32 [rows]; place of each row among those of its request; 0 without drafts.
    temperature, top_p: float32 [rows].
    top_k: int32 [rows]; 0 = no limit.
    seeds: int32 [rows, 2]; the lower and the upper half of each seed.
    block_tables: int32 [rows, blocks]; the KV blocks of each request in token order.
    """

    token_ids: Array
    carry: Array
    behind: Array
    positions: Array
    kv_indices: Array
    sent: Array
    query_starts: Array
    context_lens: Array
    drafts: Array
    temperature: Array
    top_k: Array
    top_p: Array
    seeds: Array
    block_tables: Array


class Extents(NamedTuple):
    """Upper bounds over the rows of an iteration, padding included, as numbers on the host.

    max_query_len: tokens in a row. max_context_len: tokens in a row's context. max_chunks: rows with several tokens.
    """

    max_query_len: int
    max_context_len: int
    max_chunks: int


class Work(NamedTuple):
    """Shape and bounds of an iteration. sampling: whether any row's temperature is above 0."""

    shape: Shape
    bounds: Extents
    sampling: bool

    @classmethod
    def of(cls, shape: Shape, packed: Fields[NDArray[Any]]) -> "Work":
        """Returns the work of packed inputs, with the tightest bounds."""
        query_lens = np.diff(packed.query_starts)
        bounds = Extents(int(query_lens.max()), int(packed.context_lens.max()), int((query_lens > 1).sum()))
        return cls(shape, bounds, bool(packed.temperature.any()))


_FLOATS = ("temperature", "top_p")


def host_views(buffer: NDArray[np.int32], shape: Shape) -> Fields[NDArray[Any]]:
    return _views(buffer, shape, np.float32)


def device_views(buffer: torch.Tensor, shape: Shape) -> Fields[torch.Tensor]:
    return _views(buffer, shape, torch.float32)


def _views(buffer: Any, shape: Shape, float32: Any) -> Fields[Any]:
    """Splits the start of an int32 buffer (numpy array or tensor) into the fields of `shape`, without copying."""
    tokens, rows, blocks, *_ = shape
    sizes = {"query_starts": rows + 1, "seeds": 2 * rows, "block_tables": rows * blocks}
    parts: dict[str, Any] = {}
    begin = 0
    for index, field in enumerate(fields(Fields)):
        size = sizes.get(field.name, tokens if index < 6 else rows)
        part = buffer[begin : begin + size]
        parts[field.name] = part.view(float32) if field.name in _FLOATS else part
        begin += size
    parts["seeds"] = parts["seeds"].reshape(rows, 2)
    parts["block_tables"] = parts["block_tables"].reshape(rows, blocks)
    return Fields(**parts)


def pack(step: Step, shape: Shape, out: Fields[NDArray[Any]]) -> None:
    """Writes a step's inputs into the host buffer. Call before a later iteration changes the step's table and pool."""
    table, pool, table_rows, counts = step.table, step.pool, step.rows, step.num_tokens
    assert table.tokens is not None, "a packed batch needs token values"
    num_rows, block_size = len(table_rows), pool.block_size
    ends = np.cumsum(counts)
    num_tokens = int(ends[-1])
    if num_tokens == num_rows:  # decodes only
        token_rows, positions = table_rows, step.start
    else:
        token_rows = np.repeat(table_rows, counts)
        positions = np.arange(num_tokens) + np.repeat(step.start + counts - ends, counts)
    last = ends - 1
    out.query_starts[0] = 0
    out.query_starts[1 : num_rows + 1] = ends
    out.context_lens[:num_rows] = step.start + counts
    out.drafts[:num_rows] = 0 if step.within is None else step.within
    out.positions[:num_tokens] = positions
    out.token_ids[:num_tokens] = table.tokens[token_rows, positions]
    out.token_ids[last[step.carry >= 0]] = PLACEHOLDER
    out.carry[:num_tokens] = NOT_CARRIED
    out.carry[last] = step.carry + 1  # -1 where nothing is carried over
    out.behind[:num_tokens] = 0
    if step.within is not None:
        out.token_ids[last[step.within > 0]] = PLACEHOLDER
        out.behind[last] = step.behind
    column, offset = np.divmod(positions, block_size)
    out.kv_indices[:num_tokens] = pool.tables[token_rows, column] * block_size + offset
    out.sent[:num_tokens] = 0 if step.sent is None else step.sent
    width = min(shape.num_blocks, pool.tables.shape[1])  # a graph's tables may be wider than any request's
    out.block_tables[:num_rows, :width] = pool.tables[table_rows, :width]
    out.block_tables[:num_rows, width:] = pool.num_blocks
    out.temperature[:num_rows] = table.temperature[table_rows]
    if out.temperature[:num_rows].any():
        out.top_k[:num_rows] = table.top_k[table_rows]
        out.top_p[:num_rows] = table.top_p[table_rows]
        out.seeds[:num_rows] = table.seed[table_rows].view(np.int32).reshape(-1, 2)
    _pad(num_tokens, num_rows, shape, pool.num_blocks, block_size, out)


def pack_dummies(shape: Shape, dummy_block: int, block_size: int, out: Fields[NDArray[Any]]) -> None:
    """Writes a batch that is all padding, so that a shape can be computed before any request arrives."""
    out.query_starts[0] = 0
    _pad(0, 0, shape, dummy_block, block_size, out)


def _pad(
    num_tokens: int, num_rows: int, shape: Shape, dummy_block: int, block_size: int, out: Fields[NDArray[Any]]
) -> None:
    out.query_starts[num_rows + 1 :] = num_tokens
    out.context_lens[num_rows:] = out.drafts[num_rows:] = 0
    out.token_ids[num_tokens:] = PLACEHOLDER
    out.carry[num_tokens:] = NOT_CARRIED
    out.behind[num_tokens:] = out.positions[num_tokens:] = out.sent[num_tokens:] = 0
    out.kv_indices[num_tokens:] = dummy_block * block_size + np.arange(shape.num_tokens - num_tokens) % block_size
    out.block_tables[num_rows:] = dummy_block
    out.temperature[num_rows:] = 0
