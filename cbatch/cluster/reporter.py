"""Posts the reports of a replica, which it makes from its engine."""

from collections.abc import Mapping, Sequence
from itertools import count

import numpy as np

from cbatch.cluster.reports import Report
from cbatch.cluster.views import ReplicaView
from cbatch.engine import Engine
from cbatch.kv import BlockHash, PrefixCache
from cbatch.request import Request


class Reporter:
    """Observes an engine, and posts the reports of its replica."""

    def __init__(self, engine: Engine, view: ReplicaView) -> None:
        self._state, self._view, self._post = engine.state, view, view.post
        self._ended: list[tuple[int, int]] = []
        self._left: list[int] = []
        self._cursor: int | None = None  # in the log of the prefix cache's changes
        self._rows = self._ids = np.zeros(0, np.int64)  # of the admitted requests

    def ended(self, request: Request) -> None:
        self._ended.append((request.id, request.num_output_tokens))

    def left(self, request: Request) -> None:
        self._left.append(request.id)

    def changed(self, at: float, num_used: int, earlier: Sequence[tuple[float, int]] = ()) -> None:
        """See `Observer`. A leap repeats decodes of one batch."""
        state = self._state
        table, rows, most = state.table, state.admitted.rows, state.pool.num_blocks
        if rows is not self._rows:
            self._rows, self._ids = rows, table.id[rows]
        ids, computed = self._ids, table.computed[rows]
        if earlier:
            for lag, (before, used) in zip(count(len(earlier), -1), earlier, strict=False):
                self._post(Report(before, ids, computed, lag, most - used))
        ended, left, self._ended, self._left = self._ended, self._left, [], []
        changed = {} if state.cache is None else self._changed(state.cache)
        self._post(Report(at, ids, computed, 0, most - num_used, ended, changed, left))

    def _changed(self, cache: PrefixCache) -> Mapping[BlockHash, bool]:
        if not self._view.follows_cache:
            return {}
        pool, cursor = cache.pool, self._cursor
        self._cursor = pool.changes.begin()
        if cursor is None:
            return dict.fromkeys(pool.hashes, True)
        hashes, held = pool.changes.since(cursor), pool.hashes
        assert hashes is not None, "the changes between two reports are kept"
        return {block_hash: block_hash in held for block_hash in hashes}
