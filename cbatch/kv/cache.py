"""The prefix cache of an engine: joins the pool of named blocks, the names of each request, and the eviction, for `State`."""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from cbatch.errors import WorkloadError
from cbatch.kv.eviction import Eviction, Name, call
from cbatch.kv.names import Prefix
from cbatch.kv.prefix import PrefixPool
from cbatch.request import Ints, Request, spec_of
from cbatch.request_table import RequestTable


class PrefixCache:
    """Which cached blocks a request finds, takes and leaves.

    A block is found from the iteration after the one that computes it, also while that one is in flight: iterations write in the
    order of their launch. Blocks of generated tokens are found, too, once the host knows the tokens. In vLLM a request also finds what
    an earlier one of the same iteration computes. No policy asks for that, and a plan would have to know hits that depend on its order.
    """

    def __init__(self, pool: PrefixPool, table: RequestTable) -> None:
        self.pool, self._table = pool, table
        self._planned_version = -1
        self._looks_ahead = type(pool.eviction).on_submit is not Eviction.on_submit

    def is_steady(self, waiting: bool) -> bool:
        """Whether no time decides what is evicted, and waiting requests, if any, find what they found when the latest step was planned."""
        return not self.pool.eviction.dynamic and not (waiting and self.pool.version != self._planned_version)

    def num_unchanged(self, rows: Ints) -> int:
        """Returns how many iterations can compute a token of each of these rows before one of them gets another named block."""
        filled = np.minimum(self._table.computed[rows], self._table.known[rows])
        return int(((self.pool.num_named[rows] + 1) * self.pool.block_size - filled).min()) - 1

    def check(self, request: Request) -> None:
        """Raises WorkloadError for prefix hashes that are not cumulative ids of whole blocks."""
        spec, size, problem = spec_of(request), self.pool.block_size, ""
        if not spec.prefix_hashes or self._table.tokens is not None:
            return
        if not spec.hash_block:
            problem = "its hash ids stand for no whole number of tokens (hash_block=0)"
            problem += f"; give a workload.length_scale that leaves them a multiple of block_size={size}"
        elif spec.hash_block % size:
            each = (
                f"{spec.hash_block} tokens (workload.prefix, workload.system, or a trace's times workload.length_scale)"
            )
            problem = f"each of its hash ids stands for {each}, no multiple of block_size={size}"
            problem += "; give a block_size that divides it"
        elif len(set(spec.prefix_hashes)) < len(spec.prefix_hashes) or min(spec.prefix_hashes) < 0:
            problem = (
                "prefix_hashes repeat, or are negative; each must stand for the whole prompt up to its block's end"
            )
        if problem:
            raise WorkloadError(f"request {spec.id}: {problem}")

    def expect(self, requests: Iterable[Request]) -> None:
        """Begins to look up requests that will arrive, or arrive; those that are looked up already stay as they are."""
        for request in requests:
            if request.prefix is None:
                request.prefix = prefix = Prefix(request, self.pool, self._table)
                if self._looks_ahead:
                    number = (request.num_prompt_tokens - 1) // self.pool.block_size
                    call(self.pool.eviction, "on_submit", request, prefix.names(number)[:number])

    def found(self, request: Request) -> Sequence[Name]:
        """Returns the names of the blocks that a waiting request finds."""
        prefix = _prefix_of(request)
        return prefix.names(0)[: prefix.num_found]

    def names(self, request: Request, at_most: int | None) -> Sequence[Name]:
        """Returns the names of the full blocks of a waiting request, or of the first `at_most`."""
        number = request.num_known // self.pool.block_size
        number = number if at_most is None else min(number, at_most)
        return _prefix_of(request).names(number)[:number]

    def num_shared(self, request: Request) -> int:
        """Blocks that a waiting request finds and that are not free."""
        return self.pool.num_in_use(self.found(request))

    def admit(self, requests: Sequence[Request], newcomers: Sequence[Request], num_tokens: Ints, now: float) -> None:
        """Gives all newcomers of a plan, which have rows, the blocks that they found, before any of them takes a block from the cache.

        num_tokens: found when the plan was checked, [requests].
        """
        self.pool.now, self._planned_version = now, self.pool.version
        for place in map(requests.index, newcomers):
            self._admit(requests[place], num_tokens.item(place))

    def _admit(self, request: Request, num_tokens: int) -> None:
        pool, prefix, number = self.pool, _prefix_of(request), num_tokens // self.pool.block_size
        names = prefix.names(request.num_known // pool.block_size)[:number]  # makes all names that the prompt will need
        pool.share(request.row, names)
        if request.num_preemptions:
            request.num_cached_again += num_tokens
            request.num_recomputed_tokens -= min(prefix.num_lost, num_tokens)
        else:
            request.num_cached_tokens = num_tokens
        call(pool.eviction, "on_admit", request, names, pool.now)

    def register(self, requests: Sequence[Request], rows: Ints, num_tokens: Ints) -> None:
        """Names the full blocks of a step's requests. num_tokens: known, and computed by this step or before, [rows]."""
        num_full = num_tokens // self.pool.block_size
        for place in (num_full > self.pool.num_named[rows]).nonzero()[0].tolist():
            self._register(requests[place], num_full.item(place))

    def register_repeated(self, requests: Sequence[Request], num_tokens: Ints) -> None:
        """Names full blocks as `register` after each of several steps that computed one token of each request."""
        size, full = self.pool.block_size, []
        for place, (request, tokens) in enumerate(zip(requests, num_tokens.tolist(), strict=True)):
            named = self.pool.num_named.item(request.row)
            full += [(number * size - tokens, place, number) for number in range(named + 1, tokens // size + 1)]
        for _, place, number in sorted(full):
            self._register(requests[place], number)

    def release(self, request: Request) -> None:
        """Prepares the release of a request's blocks: all full ones get names, and the eviction hears of it."""
        pool, table, row = self.pool, self._table, request.row
        number = min(table.computed.item(row), table.known.item(row)) // pool.block_size
        self._register(request, number)
        prefix = _prefix_of(request)
        prefix.num_lost = table.computed.item(row)
        pool.note_holder(row, table.total.item(row))
        call(pool.eviction, "on_release", request, prefix.names(number)[:number], pool.now)

    def end(self, request: Request) -> None:
        """Prepares the end of a request, wherever it is, and forgets it."""
        if request.table is not None:
            self.release(request)
        request.prefix = None
        call(self.pool.eviction, "on_finish", request)

    def _register(self, request: Request, num_blocks: int) -> None:
        self.pool.register(request.row, _prefix_of(request).names(num_blocks), num_blocks)


def _prefix_of(request: Request) -> Prefix:
    return cast(Prefix, request.prefix)
