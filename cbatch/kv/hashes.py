"""Hashes the blocks of a request, and counts how many of these blocks a waiting request finds in the cache.

`Request.prefix_hashes` are other hashes: a trace's own ids, each for a fixed number of tokens. Here a block's hash covers the preceding hash
and the content of the block:

    real tokens    128 bits of blake2b over the token ids; the first block is preceded by the request's `salt`
    simulation     the same if the prompt has token ids, each output token as `SIMULATED_TOKEN`; otherwise 64 bits over the trace's id
                   that covers the block (`RequestSpec.prefix_hashes`); otherwise over the texts that the block consists of (`RequestSpec.texts`,
                   or the request's own): those of a text are consecutive numbers, many made at once
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from hashlib import blake2b
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.kv.eviction import BlockHash
from cbatch.kv.pool import blocks_for
from cbatch.kv.prefix import PrefixPool
from cbatch.request import Request, spec_of
from cbatch.request_table import RequestTable

SIMULATED_TOKEN = 7  # the token id of all simulated outputs: a prompt that contains an answer finds its blocks


def prompt_hashes(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Returns the hashes of the full blocks of a request's prompt, which needs no place in a cache or table."""
    return hashes_outside(request, block_size, request.num_prompt_tokens)


def hashes_outside(request: Request, block_size: int, num_tokens: int) -> Sequence[BlockHash]:
    """Returns the hashes of the full blocks of a request's first tokens, without a cache or table."""
    outside: Any = SimpleNamespace(block_size=block_size, tokens=None)
    number = num_tokens // block_size
    return Prefix(request, outside, outside).hashes(number)[:number]


def num_leading(hashes: Sequence[BlockHash], held: Collection[BlockHash]) -> int:
    """Returns how many leading hashes a closed set holds: one that holds with a hash all hashes before it."""
    return bisect_left(hashes, True, key=lambda block_hash: block_hash not in held)


class Prefix:
    """The hashes of one request's blocks, made on demand: those that another engine has made are kept.

    prompt: its tokens; None where their values do not matter.
    """

    def __init__(self, request: Request, pool: PrefixPool, table: RequestTable) -> None:
        self._request, self.pool, self._table = request, pool, table
        size, spec = pool.block_size, spec_of(request)
        self.prompt: NDArray[np.int32] | None
        self._hashes: list[BlockHash]
        earlier: Prefix | None = request._prefix
        if earlier is not None and earlier.pool.block_size == size:
            self.prompt, self._hashes = earlier.prompt, [*earlier._hashes]
        else:
            self.prompt = None if request.prompt is None else np.asarray(request.prompt, np.int32)
            self._hashes = []
        self._num_parts = max(spec.hash_block // size, 1)  # blocks of a hash id
        self._trace_ids = spec.prefix_hashes if spec.hash_block else ()
        self._num_traced = min(len(self._trace_ids) * self._num_parts, spec.num_prompt_tokens // size)  # blocks
        self._texts: Sequence[tuple[Any, int]] = spec.texts or ((("request", spec.id), 0),)
        self._num_found = 0
        self._seen = (-1, -1)  # the pool's version and the known tokens when the request was looked up

    @property
    def num_cached(self) -> int:
        """Tokens that the cache holds of a waiting request: whole blocks, and at least one token less than all."""
        return self.num_found * self.pool.block_size

    @property
    def num_found(self) -> int:
        """Leading blocks that the cache holds. Hashes are closed (`PrefixPool`): a lookup bisects from where the latest one ended."""
        pool, now = self.pool, (self.pool.version, self._request.num_known)
        if self._seen != now:
            least, most, limit, step = self._num_found, self._num_found, (now[1] - 1) // pool.block_size, 1
            if least and self._hashes[least - 1] not in pool:
                least, most = 0, least - 1
            while least == most < limit:
                most, step = min(most + step, limit), 4 * step
                least = most if self.hashes(most)[most - 1] in pool else least
            hashes = self._hashes
            self._num_found = bisect_left(hashes, True, least, most, key=lambda block_hash: block_hash not in pool)
            self._seen = now
        return self._num_found

    def hashes(self, num_blocks: int) -> list[BlockHash]:
        """Returns at least the hashes of the first blocks, whose tokens are known; not to be changed."""
        hashes = self._hashes
        if len(hashes) < num_blocks:
            assert num_blocks * self.pool.block_size <= self._request.num_known, "only a full block has a hash"
        while len(hashes) < num_blocks:
            hashes += self._next_hashes(num_blocks, hashes[-1] if hashes else spec_of(self._request).salt.encode())
        return hashes

    def _next_hashes(self, num_blocks: int, before: BlockHash) -> Sequence[BlockHash]:
        """Returns the next hashes: as many as are made at once."""
        index, size = len(self._hashes), self.pool.block_size
        place, tokens = slice(index * size, num_blocks * size), None
        if self.prompt is not None and (self._table.tokens is None or place.start + size <= len(self.prompt)):
            if self._table.tokens is not None:
                place = slice(place.start, min(place.stop, len(self.prompt) // size * size))
            tokens = self.prompt[place]
            tokens = np.pad(tokens, (0, place.stop - place.start - len(tokens)), constant_values=SIMULATED_TOKEN)
        elif self._table.tokens is not None and self._request._table is not None:
            tokens = self._table.tokens[self._request._row, place]
        elif self._table.tokens is not None:  # between two engines
            tokens = np.array([*(self._request.prompt or ()), *self._request.output], np.int32)[place]
        if tokens is not None:
            assert isinstance(before, bytes)
            return chained(before, tokens, size)
        if index < self._num_traced:
            hashes, parts = list[BlockHash](), self._num_parts
            for trace_id in self._trace_ids[index // parts : blocks_for(num_blocks, parts)]:
                first = hash((hashes[-1] if hashes else before, trace_id))
                hashes += range(first, first + parts)
            return hashes[: self._num_traced - index]
        return self._hashes_of_text(index, num_blocks, before)

    def _hashes_of_text(self, index: int, num_blocks: int, before: BlockHash) -> Sequence[BlockHash]:
        """Returns the hash of one block that spans several texts, or the hashes of consecutive blocks of one text."""
        size, texts = self.pool.block_size, self._texts
        first = bisect_right(texts, index * size, key=itemgetter(1)) - 1
        end = bisect_left(texts, (index + 1) * size, key=itemgetter(1))
        if end - first > 1:
            return (hash((before, *texts[first:end])),)
        if index not in (0, self._num_traced) and (index - 1) * size >= texts[first][1]:
            assert isinstance(before, int)
            number = before + 1  # the text's block before
        else:
            number = hash((before, texts[first]))
        until = min(num_blocks, texts[end][1] // size) if end < len(texts) else num_blocks
        return range(number, number + until - index)


def chained(before: bytes, tokens: NDArray[np.int32], block_size: int) -> list[bytes]:
    """Returns the hashes of consecutive blocks of int32 tokens. before: the hash of the block before them."""
    content, width, hashes = tokens.tobytes(), block_size * tokens.itemsize, list[bytes]()
    for begin in range(0, len(content), width):
        before = blake2b(before + content[begin : begin + width], digest_size=16).digest()
        hashes.append(before)
    return hashes
