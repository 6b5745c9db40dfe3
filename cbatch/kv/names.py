"""Names the blocks of a request, and counts how many of these blocks a waiting request finds in the cache.

A name is a hash of the preceding name and of the block's content:

    real tokens    128 bits of blake2b over the token ids; the first block is preceded by the request's `salt`
    simulation     the same if the prompt has token ids: each output token stands for `SIMULATED_TOKEN`; else 64 bits over the hash id that covers the block (`RequestSpec.prefix_hashes`), or else over the conversation or
                   the request, plus the block's place in it: the names of many blocks are made at once
"""

from collections.abc import Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import numpy as np

from cbatch.kv.eviction import Name
from cbatch.kv.pool import blocks_for
from cbatch.kv.prefix import PrefixPool
from cbatch.request import Request, spec_of
from cbatch.request_table import RequestTable

SIMULATED_TOKEN = 7
"""The token id of all simulated outputs: a prompt that contains an answer finds its blocks."""


def prompt_names(request: Request, block_size: int) -> Sequence[Name]:
    """Returns the names of the full blocks of a request's prompt, which needs no place in a cache or table."""
    number = request.num_prompt_tokens // block_size
    outside: Any = SimpleNamespace(block_size=block_size, tokens=None)
    return Prefix(request, outside, outside).names(number)[:number]


class Prefix:
    """The names of one request's blocks, made on demand. num_lost: tokens of its KV cache that the latest preemption lost."""

    def __init__(self, request: Request, pool: PrefixPool, table: RequestTable) -> None:
        self._request, self._pool, self._table = request, pool, table
        self._prompt = None if request.prompt is None else np.asarray(request.prompt, np.int32)
        size, spec = pool.block_size, spec_of(request)
        self._num_parts = max(spec.hash_block // size, 1)  # blocks of a hash id
        self._hashes = spec.prefix_hashes if spec.hash_block else ()
        self._num_hashed = min(len(self._hashes) * self._num_parts, spec.num_prompt_tokens // size)  # blocks
        self._text = ("request", spec.id) if spec.conversation is None else ("conversation", spec.conversation)
        self._text_name: int | None = None  # of its first block, if all were text
        self._names: list[Name] = []
        self._num_found = self.num_lost = 0
        self._seen = (-1, -1)  # the pool's version and the known tokens when the request was looked up

    @property
    def num_cached(self) -> int:
        """Tokens that the cache holds of a waiting request: whole blocks, and at least one token less than all."""
        return self.num_found * self._pool.block_size

    @property
    def num_found(self) -> int:
        """Leading blocks that the cache holds. A lookup begins where the latest one ended, as names are closed (`PrefixPool`)."""
        pool, now = self._pool, (self._pool.version, self._request.num_known)
        if self._seen != now:
            names, number, most = self._names, self._num_found, (now[1] - 1) // pool.block_size
            while number and names[number - 1] not in pool:
                number -= 1
            while number < most and (names[number] if number < len(names) else self.names(number + 1)[number]) in pool:
                number += 1
            self._num_found, self._seen = number, now
        return self._num_found

    def names(self, num_blocks: int) -> list[Name]:
        """Returns at least the names of the first blocks, whose tokens are known; not to be changed."""
        names = self._names
        if len(names) < num_blocks:
            assert num_blocks * self._pool.block_size <= self._request.num_known, "only a full block has a name"
        while len(names) < num_blocks:
            names += self._next_names(num_blocks, names[-1] if names else spec_of(self._request).salt.encode())
        return names

    def _next_names(self, num_blocks: int, before: Name) -> Sequence[Name]:
        """Returns the next names: as many as are made at once."""
        index, size, tokens = len(self._names), self._pool.block_size, None
        place = slice(index * size, (index + 1) * size)
        if self._prompt is not None and (self._table.tokens is None or place.stop <= len(self._prompt)):
            tokens = self._prompt[place]
            tokens = np.pad(tokens, (0, size - len(tokens)), constant_values=SIMULATED_TOKEN)
        elif self._table.tokens is not None:
            tokens = self._table.tokens[self._request.row, place]
        if tokens is not None:
            assert isinstance(before, bytes)
            return (blake2b(before + tokens.tobytes(), digest_size=16).digest(),)
        if index < self._num_hashed:
            names, parts = list[Name](), self._num_parts
            for hash_id in self._hashes[index // parts : blocks_for(num_blocks, parts)]:
                first = hash((names[-1] if names else before, hash_id))
                names += range(first, first + parts)
            return names[: self._num_hashed - index]
        if self._text_name is None:
            self._text_name = hash((before, *self._text)) - index
        return range(self._text_name + index, self._text_name + num_blocks)
