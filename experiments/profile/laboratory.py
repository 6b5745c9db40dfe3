"""Times iterations of chosen batches on an executor, one after the other without a pause, as a busy engine runs them.

Nobody is served. The rows of a request table and the blocks of a KV pool are set to what a batch asks for, and each step
goes the whole way: packed, uploaded, computed - by a captured graph where one fits - and downloaded. What is timed is
therefore the iteration as the runtime executes it, padding and all. Knows nothing of policies or profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from cbatch import BatchShape, Executor, Limits, Request, Step, StepResult
from cbatch.kv import BlockPool
from cbatch.request_table import NEVER, RequestTable

WARM_UP_SECONDS = 0.1
"""Iterations with prompts come to draw all the power that the GPU is allowed, and its clock follows: within this time it has
made up for two thirds of the distance at least, as it has when decodes come after prompts. What is timed is near the steady
state."""

LEAST_SECONDS, LEAST_REPEATS = 0.02, 3
"""Iterations are timed until there are so many and they have taken this long in all, ..."""

MOST_SECONDS, MOST_REPEATS = 0.1, 9
"""... or until one of these is reached."""


class Batch(NamedTuple):
    """An iteration to be timed.

    chunks: (tokens, context before them) of each prompt's chunk. decodes: context of each decode, its own token counted.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def ends(self) -> list[int]:
        """Tokens of each request in the KV cache after the iteration, decodes first."""
        return [*self.decodes, *(tokens + context for tokens, context in self.chunks)]

    @property
    def num_tokens(self) -> list[int]:
        """Tokens that each request computes, decodes first, as policies order them."""
        return [*[1] * len(self.decodes), *(tokens for tokens, _ in self.chunks)]

    def shape(self) -> BatchShape:
        return BatchShape(self.chunks, len(self.decodes), sum(self.decodes))


class Laboratory:
    """An executor of real tokens with requests that exist only as rows.

    measured: seconds of every batch so far.
    """

    def __init__(
        self, executor: Executor, limits: Limits, *, num_blocks: int, block_size: int, vocabulary_size: int
    ) -> None:
        """num_blocks, block_size: the KV cache that the executor was built with."""
        self.executor = executor
        self.limits = limits
        self.measured: dict[Batch, float] = {}
        self._pool = BlockPool(num_blocks, block_size, limits.max_batch, limits.max_request_tokens)
        self._table = RequestTable(limits.max_batch, 1, limits.max_request_tokens)
        assert self._table.tokens is not None, "an executor of real tokens reads them"
        self._table.tokens[:] = np.random.default_rng(0).integers(0, vocabulary_size, self._table.tokens.shape)
        self._requests = [Request(index, 1, 1) for index in range(limits.max_batch)]
        self._index = 0
        self._hot = False  # the last iterations had prompts

    def holds(self, batch: Batch) -> bool:
        """Whether limits and KV cache allow the batch."""
        ends, limits = batch.ends, self.limits
        return (
            len(ends) <= limits.max_batch
            and sum(batch.num_tokens) <= limits.max_tokens
            and max(ends) <= limits.max_request_tokens
            and sum(map(self._pool.blocks_for, ends)) <= self._pool.num_blocks
        )

    def seconds(self, batch: Batch) -> float:
        """Median time from the start of one iteration to the start of the next; the batch must fit (`holds`)."""
        if batch not in self.measured:
            self._give_blocks(batch.ends)
            self.measured[batch] = float(np.median(self._intervals(batch)))
        return self.measured[batch]

    def last_of(self, batches: Sequence[Batch], pause: float = 0.0) -> tuple[float, float]:
        """Compute these batches one after the other; seconds that the device takes for the last one, and that it paused before.

        pause: before the last one, in which nothing is to be computed.
        """
        self._give_blocks([max(ends) for ends in zip_longest(*(batch.ends for batch in set(batches)), fillvalue=0)])
        before = None
        ended = 0.0
        for place, batch in enumerate(batches):
            if pause and place == len(batches) - 1 and before is not None:
                ended, before = self.executor.wait(before).ended, None
                self.executor.sleep_until(self.executor.now() + pause)
            after = self.executor.launch(self._step(batch))
            if before is not None:
                ended = self.executor.wait(before).ended
            before = after
        last = self.executor.wait(before)
        self._hot = any(batch.chunks for batch in batches)
        return last.ended - max(last.started, ended), max(last.started - ended, 0.0)

    def compute(self, batch: Batch) -> StepResult:
        """Compute the batch once, and wait for it."""
        self._give_blocks(batch.ends)
        return self.executor.wait(self.executor.launch(self._step(batch)))

    def _intervals(self, batch: Batch) -> Sequence[float]:
        """Seconds between the starts of iterations that follow each other; those that warm up are left out."""
        warm_up = WARM_UP_SECONDS if batch.chunks or self._hot else 0.0
        self._hot = bool(batch.chunks)
        started: list[float] = []
        first = 0  # that counts; at least one comes before
        before = self.executor.launch(self._step(batch))
        while not first or not _enough(started[first:]):
            after = self.executor.launch(self._step(batch))
            started.append(self.executor.wait(before).started)
            before = after
            if not first and len(started) > 1 and started[-1] - started[0] >= warm_up:
                first = len(started) - 1
        self.executor.wait(before)
        intervals: list[float] = np.diff(started[first:]).tolist()
        return intervals

    def _give_blocks(self, ends: Sequence[int]) -> None:
        """Let each row hold the blocks for so many tokens, and the others none."""
        for row in self._pool.held.nonzero()[0].tolist():
            self._pool.release(row, after=None)
        for row, end in enumerate(ends):
            self._pool.extend(row, self._pool.blocks_for(end))

    def _step(self, batch: Batch) -> Step:
        num_requests = len(batch.ends)
        num_tokens = np.array(batch.num_tokens, np.int64)
        total = int(num_tokens.sum())
        step = Step(
            index=self._index,
            requests=self._requests[:num_requests],
            rows=np.arange(num_requests),
            num_tokens=num_tokens,
            start=np.array(batch.ends, np.int64) - num_tokens,
            sampled=np.arange(num_requests),
            carry=np.full(num_requests, NEVER, np.int64),
            num_batch_tokens=total,
            num_decode_tokens=len(batch.decodes),
            pad_to=total,
            table=self._table,
            pool=self._pool,
        )
        self._index += 1
        return step


def _enough(started: Sequence[float]) -> bool:
    """Whether iterations with these starts say what one takes."""
    repeats, seconds = len(started) - 1, started[-1] - started[0]
    return (
        repeats >= MOST_REPEATS
        or (repeats >= 1 and seconds >= MOST_SECONDS)
        or (repeats >= LEAST_REPEATS and seconds >= LEAST_SECONDS)
    )
