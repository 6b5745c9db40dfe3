"""Times iterations of chosen batches on an executor, back to back as in a busy engine.

There are no real requests: the rows of a request table and the blocks of a KV pool are set to fit a batch. Each step is packed,
uploaded, computed (by a captured graph if one fits) and downloaded, so iterations are timed as the runtime executes them,
including padding. This module knows nothing about policies or profiles.

On some devices, such as CPUs, times vary too much to subtract measured iterations. There an iteration is fitted as a constant plus
nonnegative prices per token, per request, per context token that decodes read, and per pair of tokens in the attention of prompts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cbatch import BatchShape, Limits, Request, Server, Step, StepResult
from cbatch.cost import scores
from cbatch.kv import BlockPool
from cbatch.request import NEVER
from cbatch.request_table import RequestTable

WARM_UP_SECONDS = 0.1
"""Prompts draw all the power that the GPU is allowed, and the clock follows. Within this time the clock covers at least two thirds
of the distance, also when decodes follow prompts. Timed iterations are thus near the steady state."""

LIGHT_ROWS, SETTLED_SECONDS = 16, 1.2
"""Iterations with more rows draw all the power without prompts, too. When such iterations or prompts begin after lighter ones, the clock of an
H200 is first too high, and from 0.5 to 1.1 s below its steady state."""

LEAST_SECONDS, LEAST_REPEATS = 0.1, 3
"""Least duration and number of repetitions of an iteration: the steady clock of an H200 moves by 5% within a quarter of a second."""

ROUNDS, LONG_SECONDS = 5, 0.1
"""Rounds in which iterations are timed in turn, as one timing of a prompt is off by 1 to 2%, and seconds of iterations that are timed once."""

MOST_SECONDS, MOST_REPEATS = 0.5, 9
"""Duration and number after which repetition ends. The median of three is right even if the host paused once. If a single
iteration takes this long, only the second iteration is timed."""


class Batch(NamedTuple):
    """An iteration to be timed.

    chunks: (tokens, preceding context) of each prompt's chunk. decodes: context of each decode, including its own token.
    shared: leading context tokens that all decodes share.
    drafts: of each decode, beyond its context.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()
    shared: int = 0
    drafts: int = 0

    @property
    def ends(self) -> list[int]:
        """Returns the tokens of each request in the KV cache after the iteration, decodes first."""
        return [*(context + self.drafts for context in self.decodes), *(sum(chunk) for chunk in self.chunks)]

    @property
    def num_tokens(self) -> list[int]:
        """Returns the tokens that each request computes, decodes first, as in policies' plans."""
        return [*[1 + self.drafts] * len(self.decodes), *(tokens for tokens, _ in self.chunks)]

    def shape(self) -> BatchShape:
        decodes = len(self.decodes)
        shape = BatchShape(self.chunks, decodes, sum(self.decodes), num_shared=max(decodes - 1, 0) * self.shared)
        return shape.with_drafts(decodes * self.drafts) if self.drafts else shape


class Laboratory:
    """Computes batches on a server of real tokens, for requests that exist only as rows. measured: seconds by timed batch."""

    def __init__(self, server: Server, vocabulary_size: int) -> None:
        self.executor, self.limits = server.executor, server.limits
        self.measured: dict[Batch, float] = {}
        limits = self.limits
        self._pool = BlockPool(*server.kv[:2], limits.max_batch, limits.max_request_tokens)
        self._table = RequestTable(limits.max_batch, 1, limits.max_request_tokens)
        assert self._table.tokens is not None, "an executor of real tokens reads them"
        self._table.tokens[:] = np.random.default_rng(0).integers(0, vocabulary_size, self._table.tokens.shape)
        self._requests = [Request(index, 1, 1) for index in range(limits.max_batch)]
        self._index = 0
        self._hot = 0.0  # seconds for which the last iterations drew much power

    def holds(self, batch: Batch) -> bool:
        """Returns whether the batch fits the limits and the KV cache."""
        ends, limits = batch.ends, self.limits
        return (
            len(ends) <= limits.max_batch
            and sum(batch.num_tokens) <= limits.max_tokens
            and max(ends) <= limits.max_request_tokens
            and sum(map(self._pool.blocks_for, ends)) <= self._pool.num_blocks
        )

    def seconds(self, batch: Batch) -> float:
        """Returns the seconds of an iteration with this batch, which must fit (`holds`)."""
        return self.time(batch)

    def time(self, batch: Batch) -> float:
        """Returns the median time between the starts of two iterations, measured once per batch."""
        if batch not in self.measured:
            self._give_blocks(batch.ends)
            tables, shared = self._pool.tables.copy(), self._pool.blocks_for(batch.shared)
            self._pool.tables[: len(batch.decodes), :shared] = tables[:1, :shared]
            self.measured[batch] = float(np.median(self._intervals(batch)))
            self._pool.tables[:] = tables
        return self.measured[batch]

    def time_in_rounds(self, batches: Iterable[Batch]) -> None:
        """Times each of these batches that fit once in every round, and keeps the medians for `time`."""
        taken = {batch: [self.time(batch)] for batch in batches if self.holds(batch)}
        drifts = [batch for batch, seconds in taken.items() if seconds[0] < LONG_SECONDS]
        for _, batch in product(range(1, ROUNDS), drifts):
            del self.measured[batch]
            taken[batch].append(self.time(batch))
        self.measured |= {batch: float(np.median(seconds)) for batch, seconds in taken.items()}

    def in_turn(self, batches: Sequence[Batch], pause: float = 0.0) -> tuple[list[float], float]:
        """Computes the batches in turn. Returns the seconds of each batch, and of the device's pause before the last batch.

        pause: idle seconds before the last batch.
        """
        self._give_blocks([max(ends) for ends in zip_longest(*(batch.ends for batch in set(batches)), fillvalue=0)])
        if pause:
            results = self._computed(batches[:-1])
            self.executor.sleep_until(self.executor.now() + pause)
            results += self._computed(batches[-1:])
        else:
            results = self._computed(batches)
        self._hot = WARM_UP_SECONDS * any(map(_is_hot, batches))
        ended = [0.0, *(result.ended for result in results)]
        seconds = [result.ended - max(result.started, last) for result, last in zip(results, ended, strict=False)]
        return seconds, max(results[-1].started - ended[-2], 0.0)

    def _computed(self, batches: Sequence[Batch]) -> list[StepResult]:
        """Computes batches, launching each before the preceding batch has ended."""
        before, results = None, []
        for batch in batches:
            after = self.executor.launch(self._step(batch))
            if before is not None:
                results.append(self.executor.wait(before))
            before = after
        return [*results, self.executor.wait(before)]

    def launch_seconds(self, batch: Batch) -> float:
        """Returns the host's median seconds to launch the batch on an idle device."""
        self._give_blocks(batch.ends)
        taken = []
        for _ in range(MOST_REPEATS + 1):  # the first launch may compile
            begin = self.executor.now()
            launched = self.executor.launch(self._step(batch))
            self.executor.ready_at()
            taken.append(self.executor.now() - begin)
            self.executor.wait(launched)
        return float(np.median(taken[1:]))

    def compute(self, batch: Batch) -> StepResult:
        """Computes the batch once and waits for it."""
        self._give_blocks(batch.ends)
        return self._computed([batch])[0]

    def _intervals(self, batch: Batch) -> Sequence[float]:
        """Returns the seconds between the starts of consecutive iterations, after the warm-up."""
        hot = _is_hot(batch)
        warm_up = WARM_UP_SECONDS if hot or self._hot else 0.0
        if hot:
            warm_up = max(warm_up, SETTLED_SECONDS - self._hot)
        self._hot = self._hot + warm_up if hot else 0.0
        started: list[float] = []
        first = 0  # first iteration that counts; at least one warms up
        before = self.executor.launch(self._step(batch))
        while not first or not _enough(started[first:]):
            after = self.executor.launch(self._step(batch))
            result = self.executor.wait(before)
            if result.ended - result.started >= MOST_SECONDS:
                second = self.executor.wait(after)
                seconds = second.ended - max(second.started, result.ended)
                if seconds >= MOST_SECONDS:
                    return [seconds]
                after = self.executor.launch(self._step(batch))  # the first launch compiled, or the host paused
            started.append(result.started)
            before = after
            if not first and len(started) > 1 and started[-1] - started[0] >= warm_up:
                first = len(started) - 1
        self.executor.wait(before)
        intervals: list[float] = np.diff(started[first:]).tolist()
        return intervals

    def _give_blocks(self, ends: Sequence[int]) -> None:
        """Gives each row the blocks for its number of tokens, and no blocks to other rows."""
        for row in self._pool.held.nonzero()[0].tolist():
            self._pool.release(row, after=None)
        for row, end in enumerate(ends):
            self._pool.extend(row, self._pool.blocks_for(end))

    def _step(self, batch: Batch) -> Step:
        num_requests = len(batch.ends)
        num_tokens = np.array(batch.num_tokens, np.int64)
        total = int(num_tokens.sum())
        drafts = np.where(np.arange(num_requests) < len(batch.decodes), batch.drafts, 0) if batch.drafts else None
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
            drafts=drafts,
            behind=None if drafts is None else np.zeros_like(drafts),
        )
        self._index += 1
        return step


def _is_hot(batch: Batch) -> bool:
    """Returns whether iterations of this batch draw all the power that the GPU is allowed."""
    return bool(batch.chunks) or sum(batch.num_tokens) > LIGHT_ROWS


def _enough(started: Sequence[float]) -> bool:
    """Returns whether there are enough iterations, given their starts."""
    repeats, seconds = len(started) - 1, started[-1] - started[0]
    if repeats >= MOST_REPEATS or (repeats >= 1 and seconds >= MOST_SECONDS):
        return True
    return repeats >= LEAST_REPEATS and seconds >= LEAST_SECONDS


class FittedLaboratory(Laboratory):
    """Predicts seconds by a fit to a few measured batches; `time` measures as in `Laboratory`."""

    def __init__(self, server: Server, vocabulary_size: int) -> None:
        super().__init__(server, vocabulary_size)
        batches = [batch for batch in dict.fromkeys(_sample(self.limits)) if self.holds(batch)]
        self._prices = fit_prices(np.array([features(batch) / self.time(batch) for batch in batches]))

    def seconds(self, batch: Batch) -> float:
        return float(features(batch) @ self._prices)

    def time_in_rounds(self, batches: Iterable[Batch]) -> None:
        """Times nothing, as the fit needs none of these."""


def features(batch: Batch) -> NDArray[np.float64]:
    """Returns 1, tokens, requests, context tokens that decodes read, and pairs of tokens in the attention of prompts."""
    shape = batch.shape()
    pairs = sum(scores(*chunk) for chunk in shape.chunks)
    return np.array([1.0, shape.num_tokens, shape.num_requests, shape.decode_context, pairs])


def fit_prices(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the nonnegative prices at which every row of features costs 1, by least squares.

    rows: [iterations, features], divided by the iteration's seconds, so that errors are relative.
    """
    scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens and pairs of tokens differ by orders of magnitude
    prices: NDArray[np.float64] = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return prices


def _sample(limits: Limits) -> Iterator[Batch]:
    """Yields batches with only decodes, with only a chunk, and with both, in ascending sizes."""
    most, longest = limits.max_batch, limits.max_request_tokens
    for context in (1, longest // 4, longest - 1):
        yield from (Batch((), (context,) * number) for number in sorted({1, max(most // 4, 1), most}))
    for tokens in (16, 64, 256, 512):
        if tokens <= limits.max_tokens - most:
            yield from (Batch(((tokens, context),)) for context in (0, longest // 2))
            yield Batch(((tokens, 0),), (longest // 4,) * (most - 1))
