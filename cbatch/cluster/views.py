"""What a router knows: dated reports that replicas post, and the requests that it has sent itself. Never an engine.

replica    | launches, posts a report | ... | absorbs, posts a report | ...
router     at t reads the reports with at <= t - staleness, and counts its own requests at once
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from cbatch.engine import Engine
from cbatch.kv import BlockHash
from cbatch.kv.hashes import prompt_hashes
from cbatch.request import Ints, Request


class Report(NamedTuple):
    """The state of a replica at one time.

    at: seconds. ids: the admitted requests, [admitted]. computed: `lag` more than the tokens in the KV cache of each.
    num_free: free KV blocks. ended: ids of the requests that have ended since the report before.
    changed: the block hashes that the prefix cache has gained (True) or lost since the report before.
    """

    at: float
    ids: Ints
    computed: Ints
    lag: int
    num_free: int
    ended: Sequence[int] = ()
    changed: Mapping[BlockHash, bool] = MappingProxyType({})


class Reporter:
    """Observes an engine, and posts the reports of its replica."""

    def __init__(self, engine: Engine, post: Callable[[Report], object]) -> None:
        self._state, self._post = engine.state, post
        self._ended: list[int] = []
        self._cursor = 0 if engine.state.cache is None else engine.state.cache.pool.changes.begin()

    def ended(self, request: Request) -> None:
        self._ended.append(request.id)

    def changed(self, changes: Sequence[tuple[float, int]]) -> None:
        """changes: seconds and KV blocks in use, after each of several decodes of the same batch, or after one change of any kind."""
        state, lag = self._state, len(changes)
        rows, most = state.admitted_rows(), state.pool.num_blocks
        ids, computed = state.table.id[rows], state.table.computed[rows]
        for at, num_used in changes[:-1]:
            self._post(Report(at, ids, computed, lag := lag - 1, most - num_used))
        at, num_used = changes[-1]
        ended, self._ended = self._ended, []
        self._post(Report(at, ids, computed, 0, most - num_used, ended, self._changed()))

    def _changed(self) -> Mapping[BlockHash, bool]:
        if (cache := self._state.cache) is None:
            return {}
        changes, cursor = cache.pool.changes, self._cursor
        hashes, self._cursor = changes.since(cursor), changes.begin()
        assert hashes is not None, "the changes between two reports are kept"
        return {block_hash: block_hash in cache.pool for block_hash in hashes}


@lru_cache(maxsize=16)
def _hashes_of(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Returns the hashes of the full blocks of an arriving request's prompt; replicas of equal block size share them."""
    return prompt_hashes(request, block_size)


class ReplicaView:
    """One replica, as far as a router knows it. Counters include iterations in flight.

    pool: name of its pool. num_blocks, block_size: size of its KV cache. max_tokens: of the longest request that it can serve.
    at: seconds; when the newest report that has reached the router was posted, 0 before the first.
    num_free: free KV blocks.
    """

    def __init__(self, pool: str, num_blocks: int, block_size: int, max_tokens: int) -> None:
        self.pool, self.num_blocks, self.block_size = pool, num_blocks, block_size
        self.max_tokens = min(max_tokens, num_blocks * block_size + 1)  # the last token never enters the KV cache
        self.at, self.num_free = 0.0, num_blocks
        self._posted: deque[Report] = deque()  # and not read yet
        self._sent: dict[int, tuple[Request, int]] = {}  # unfinished, with the tokens found in the cache when sent
        self._sums: list[int] = [0, 0]  # of `_sent`: prompt tokens, and longest lengths
        self._report = Report(0.0, np.zeros(0, np.int64), np.zeros(0, np.int64), 0, num_blocks)
        self._hashes = set[BlockHash]()

    @property
    def num_unfinished(self) -> int:
        """Requests sent there that have not ended."""
        return len(self._sent)

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that hold no KV blocks: not admitted yet, or preempted."""
        return len(self._sent) - len(self._report.ids)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompts and outputs not computed yet; outputs by their limit, as their true length is hidden."""
        report = self._report
        computed: int = report.computed.sum().item()
        return self._sums[1] - computed + report.lag * len(report.ids)

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens of the unfinished requests that are neither computed nor, of a waiting request, cached when it was sent."""
        report, lag = self._report, self._report.lag
        pairs: Iterable[tuple[int, int]] = zip(report.ids.tolist(), report.computed.tolist(), strict=True)
        admitted = {id_: min(tokens - lag, self._sent[id_][0].num_prompt_tokens) for id_, tokens in pairs}
        found = sum(tokens for id_, (_, tokens) in self._sent.items() if id_ not in admitted)
        return self._sums[0] - sum(admitted.values()) - found

    def fits(self, request: Request) -> bool:
        """Whether the replica can serve the request at all."""
        return request.max_tokens <= self.max_tokens

    def cached_tokens(self, request: Request) -> int:
        """Returns the prompt tokens of an arriving request that the reported prefix cache holds; 0 without one."""
        if not self._hashes:
            return 0
        most = (request.num_prompt_tokens - 1) // self.block_size
        hashes = _hashes_of(request, self.block_size)[:most]
        held = next((place for place, block_hash in enumerate(hashes) if block_hash not in self._hashes), len(hashes))
        return held * self.block_size

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def post(self, report: Report) -> None:
        """Called by the replica, perhaps on a thread of its own."""
        self._posted.append(report)

    def send(self, request: Request) -> None:
        """Counts a request that was sent to the replica."""
        self._sent[request.id] = request, self.cached_tokens(request)
        self._add(request, 1)

    def read(self, latest: float) -> list[tuple[float, int, Request]]:
        """Reads the reports that were posted until `latest`; returns the requests that ended, with their times and ids."""
        ended = list[tuple[float, int, Request]]()
        while self._posted and self._posted[0].at <= latest:
            self._report = report = self._posted.popleft()
            self.at, self.num_free = report.at, report.num_free
            for id_ in report.ended:
                request, _ = self._sent.pop(id_)
                self._add(request, -1)
                ended.append((report.at, id_, request))
            for block_hash, held in report.changed.items():
                (self._hashes.add if held else self._hashes.discard)(block_hash)
        return ended

    def _add(self, request: Request, sign: int) -> None:
        self._sums[0] += sign * request.num_prompt_tokens
        self._sums[1] += sign * request.max_tokens


class ClusterView(Sequence[ReplicaView]):
    """All replicas. now: seconds; when the request to route has arrived."""

    def __init__(self, replicas: Sequence[ReplicaView], staleness: float) -> None:
        """staleness: seconds from the posting of a report until the router can read it."""
        self._replicas, self._staleness, self.now = replicas, staleness, 0.0

    def __getitem__(self, index: int) -> ReplicaView:  # type: ignore[override]
        return self._replicas[index]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas)

    def fitting(self, request: Request) -> list[int]:
        """Returns the indices of the replicas that can serve the request."""
        return [index for index, replica in enumerate(self._replicas) if replica.fits(request)]

    def update(self, now: float) -> list[Request]:
        """Reads the reports that have become known by `now`; returns the requests that have ended, in this order. For the cluster."""
        self.now = now
        ended = chain.from_iterable(view.read(now - self._staleness) for view in self._replicas)
        return [request for *_, request in sorted(ended)]
