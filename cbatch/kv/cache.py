"""The prefix cache of an engine, for `State`: connects the pool of hashed blocks, the requests' block hashes, and the eviction."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cbatch.errors import WorkloadError
from cbatch.kv.eviction import BlockHash, Eviction, call
from cbatch.kv.hashes import Prefix
from cbatch.kv.pool import BlockPool, CountingPool
from cbatch.kv.prefix import PrefixPool
from cbatch.request import Ints, Request, spec_of
from cbatch.request_table import RequestTable


def make_pool(size: tuple[int, int, int, int], values: bool, eviction: Eviction | None, on_host: int) -> BlockPool:
    """Returns an engine's pool. size: the arguments of `BlockPool`. values: whether blocks have contents. eviction: None: no prefix cache. on_host: blocks in host memory."""
    if eviction is not None:
        return PrefixPool(*size, eviction, on_host)
    return BlockPool(*size) if values else CountingPool(*size)


class PrefixCache:
    """Finds, shares and hashes cached blocks for requests.

    A block can be found by iterations after the iteration that computes the block, even while the latter is in flight, since
    iterations write in the order of their launch. Blocks of generated tokens can be found once the host knows the tokens. In
    vLLM a request also finds blocks that an earlier request of the same iteration computes. Here it does not, since hits would
    depend on the order of the current plan.
    """

    def __init__(self, pool: PrefixPool, table: RequestTable) -> None:
        self.pool, self._table = pool, table
        self._planned_version = -1
        self._looks_ahead = type(pool.eviction).on_submit is not Eviction.on_submit
        self.submitted: list[int] = []  # ids reported to `on_submit`, in order, for a recording

    def is_steady(self, waiting: bool) -> bool:
        """Returns whether evictions do not depend on time, and waiting requests find the same blocks as at the latest plan."""
        return not self.pool.eviction.dynamic and not (waiting and self.pool.version != self._planned_version)

    def num_unchanged(self, rows: Ints) -> int:
        """Returns how many iterations can compute a token of each row before any row gets another hashed block."""
        filled = np.minimum(self._table.computed[rows], self._table.known[rows])
        return int(((self.pool.num_hashed[rows] + 1) * self.pool.block_size - filled).min()) - 1

    def check(self, request: Request) -> None:
        """Raises WorkloadError unless the prefix hashes are cumulative ids of whole blocks."""
        spec, size = spec_of(request), self.pool.block_size
        hashes, tokens = spec.prefix_hashes, spec.hash_block
        if not hashes or self._table.tokens is not None:
            return
        if not tokens:
            problem = "its prefix_hashes do not stand for a whole number of tokens each"
            remedy = f"choose workload.length_scale, or the request's hash_block, as a multiple of block_size={size}"
        elif tokens % size:
            keys = "workload.prefix, or a trace's times workload.length_scale"
            problem = f"each of its hash ids stands for {tokens} tokens ({keys}), not a multiple of block_size={size}"
            remedy = "give a block_size that divides it"
        elif len(set(hashes)) < len(hashes) or min(hashes) < 0:
            problem = "its prefix_hashes repeat, or are negative"
            covers = "stands for the whole prompt up to its block's end"
            remedy = f"each id (hash_ids in a trace) {covers}, so none comes twice"
        else:
            return
        raise WorkloadError(f"request {spec.id}: {problem}; {remedy}")

    def expect(self, requests: Iterable[Request]) -> None:
        """Prepares the lookup of requests that arrive or will arrive; skips those that it has prepared."""
        for request in requests:
            if request._prefix is None or request._prefix.pool is not self.pool:
                request._prefix = prefix = Prefix(request, self.pool, self._table)
                if self._looks_ahead:
                    number = request.num_prompt_tokens // self.pool.block_size
                    self.submitted.append(request.id)
                    call(self.pool.eviction, "on_submit", request, prefix.hashes(number)[:number])

    def found(self, request: Request) -> Sequence[BlockHash]:
        """Returns the hashes of the blocks that a waiting request finds."""
        prefix: Prefix = request._prefix
        return prefix.hashes(0)[: prefix.num_found]

    def hashes(self, request: Request, at_most: int | None) -> Sequence[BlockHash]:
        """Returns the hashes of a waiting request's full blocks, at most the first `at_most`."""
        number = request.num_known // self.pool.block_size
        number = number if at_most is None else min(number, at_most)
        hashes: Sequence[BlockHash] = request._prefix.hashes(number)[:number]
        return hashes

    def num_shared(self, request: Request) -> int:
        """Returns the number of blocks that a waiting request finds and that are not free."""
        return self.pool.num_in_use(self.found(request))

    def admit(
        self, requests: Sequence[Request], newcomers: Sequence[Request], num_tokens: Ints, now: float
    ) -> Sequence[int]:
        """Gives a plan's newcomers, which have rows, the blocks that they found. Call before any cached block is taken.

        Returns the tokens that each of them found, if any.

        num_tokens: tokens found when the plan was checked, [requests].
        """
        self.pool.now, self._planned_version = now, self.pool.version
        found = [self._admit(requests[place], num_tokens.item(place)) for place in map(requests.index, newcomers)]
        if len(self.pool.host):
            for request, hashes in zip(newcomers, found, strict=True):  # after all that is found on the device is held
                self.pool.load(request._row, hashes)
        return [self.pool.block_size * len(hashes) for hashes in found if hashes]

    def _admit(self, request: Request, num_tokens: int) -> Sequence[BlockHash]:
        pool, prefix, number = self.pool, request._prefix, num_tokens // self.pool.block_size
        every: Sequence[BlockHash] = prefix.hashes(request.num_known // pool.block_size)  # of the prompt
        hashes = every[:number]
        on_device = pool.num_on_device(hashes) if len(pool.host) else number
        pool.share(request._row, hashes[pool.held_by(request._row) : on_device])
        pool.host.hold(hashes[on_device:])
        if request.num_preemptions or request.num_moves:
            request.resume(num_tokens)
        else:
            request.num_cached_tokens, request.num_host_tokens = num_tokens, (number - on_device) * pool.block_size
        call(pool.eviction, "on_admit", request, hashes, pool.now)
        return hashes

    def register(self, requests: Sequence[Request], rows: Ints, num_tokens: Ints) -> None:
        """Hashes the full blocks of a step's requests. num_tokens: tokens that are known and computed after this step, [rows]."""
        num_full = num_tokens // self.pool.block_size
        for place in (num_full > self.pool.num_hashed[rows]).nonzero()[0].tolist():
            self._register(requests[place], num_full.item(place))

    def register_repeated(self, requests: Sequence[Request], num_tokens: Ints) -> None:
        """Batch form of `register`, for consecutive decode steps."""
        size, full = self.pool.block_size, []
        for place, (request, tokens) in enumerate(zip(requests, num_tokens.tolist(), strict=True)):
            hashed = self.pool.num_hashed.item(request._row)
            full += [(number * size - tokens, place, number) for number in range(hashed + 1, tokens // size + 1)]
        for _, place, number in sorted(full):
            self._register(requests[place], number)

    def release(self, request: Request) -> None:
        """Prepares the release of a request's blocks: hashes all full blocks, and calls the eviction's `on_release`."""
        pool, table, row = self.pool, self._table, request._row
        number = min(table.computed.item(row), table.known.item(row)) // pool.block_size
        self._register(request, number)
        pool.note_holder(row, table.total.item(row))
        call(pool.eviction, "on_release", request, request._prefix.hashes(number)[:number], pool.now)

    def give_up(self, sessions: Mapping[str, bool]) -> None:
        """Tells the eviction which sessions the policy gives up: see `Plan.give_up`."""
        for session, to_host in sessions.items():
            call(self.pool.eviction, "on_give_up", session, to_host)

    def end(self, request: Request) -> None:
        """Prepares the end of a request in any state, and forgets the request."""
        if request._table is not None:
            self.release(request)
        request._prefix = None
        call(self.pool.eviction, "on_finish", request)

    def _register(self, request: Request, num_blocks: int) -> None:
        self.pool.register(request._row, request._prefix.hashes(num_blocks), num_blocks)
