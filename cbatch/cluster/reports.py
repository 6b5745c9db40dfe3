"""Dated reports: what a replica tells the router about itself, at each launch and each end of an iteration."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from cbatch.engine import Engine
from cbatch.kv import BlockHash
from cbatch.request import Ints, Request


class Report(NamedTuple):
    """The state of a replica at one time.

    at: seconds. ids: the admitted requests, [admitted]. computed: `lag` more than the tokens in the KV cache of each.
    num_free: free KV blocks. ended: ids of the requests that have ended since the report before, and their output tokens.
    left: ids of those that another replica continues.
    changed: the block hashes that the prefix cache has gained (True) or lost since the report before.
    """

    at: float
    ids: Ints
    computed: Ints
    lag: int
    num_free: int
    ended: Sequence[tuple[int, int]] = ()
    changed: Mapping[BlockHash, bool] = MappingProxyType({})
    left: Sequence[int] = ()


class Receiver(Protocol):
    """What takes the reports of a replica: its view. follows_cache: whether reports shall name the changes of the prefix cache."""

    follows_cache: bool

    def post(self, report: Report) -> None: ...


class Reporter:
    """Observes an engine, and posts the reports of its replica."""

    def __init__(self, engine: Engine, view: Receiver) -> None:
        self._state, self._view, self._post = engine.state, view, view.post
        self._ended: list[tuple[int, int]] = []
        self._left: list[int] = []
        self._cursor: int | None = None  # in the log of the prefix cache's changes

    def ended(self, request: Request) -> None:
        self._ended.append((request.id, request.num_output_tokens))

    def left(self, request: Request) -> None:
        self._left.append(request.id)

    def changed(self, changes: Sequence[tuple[float, int]]) -> None:
        """changes: seconds and KV blocks in use, after each of several decodes of the same batch, or after one change of any kind."""
        state, lag = self._state, len(changes)
        rows, most = state.admitted_rows(), state.pool.num_blocks
        ids, computed = state.table.id[rows], state.table.computed[rows]
        for at, num_used in changes[:-1]:
            self._post(Report(at, ids, computed, lag := lag - 1, most - num_used))
        at, num_used = changes[-1]
        ended, self._ended = self._ended, []
        left, self._left = self._left, []
        self._post(Report(at, ids, computed, 0, most - num_used, ended, self._changed(), left))

    def _changed(self) -> Mapping[BlockHash, bool]:
        if (cache := self._state.cache) is None or not self._view.follows_cache:
            return {}
        pool, cursor = cache.pool, self._cursor
        self._cursor = pool.changes.begin()
        if cursor is None:
            return dict.fromkeys(pool.hashes, True)
        hashes = pool.changes.since(cursor)
        assert hashes is not None, "the changes between two reports are kept"
        return {block_hash: block_hash in pool for block_hash in hashes}
