"""The interface between deciding and computing: an engine passes a `Step` to an `Executor` and waits for the step's tokens.

There are three executors: real tokens on a CPU, real tokens on a GPU, and predicted time in simulation. Engine and policies
cannot tell them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cbatch.cost import BatchShape, CostModel
from cbatch.kv import BlockPool, Copies
from cbatch.request import Ints, Request
from cbatch.request_table import ONE, RequestTable

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Step:
    """One iteration, checked and entered in the state, ready to be computed. Never modified but for what `known_` caches.

    Arrays have one entry per request of the batch, in plan order; "place" means an index into these arrays.

    index: number of the iteration, from 0.
    rows: the requests' rows in `table` and `pool`.
    num_tokens: tokens to compute. start: tokens already in the KV cache, equal to the position of the first computed token.
    sampled: places of the requests for which this iteration samples a token.
    carry: the place in iteration `index - table.num_stages` whose sampled token is this request's last input token; -1
        if the host knows all input tokens, or if tokens are not carried over (`RequestTable.carries`).
    num_batch_tokens: tokens of the batch. num_decode_tokens: number of requests with only their newest token left.
    pad_to: number of tokens to pad the batch to, at least num_batch_tokens.
    table, pool: token values and block tables. They are live: an executor reads them inside `launch` and never later.
    found: of each admitted request that found tokens in the prefix cache, their number.
    copies: of KV blocks between host memory and device, before the iteration; None: none.
    drafts: drafts of each request, int64, which are the last of its `num_tokens`; None: no request has any, here or in flight.
    behind: drafts of each request in the iteration in flight that samples its newest token. `start` counts all of them: it is too large by
        those that are rejected. None without `drafts`.
    within: place of each row of `split` among those of its request; None elsewhere.
    sent: int32 [num_batch_tokens]; where each token's keys and values are written in another executor's cache too: its cache index
        plus what `StreamExecutor.send_to` returned. 0: nowhere. None: no token is.
    known_shape, known_seconds: `shape()` and `seconds()`, if already known.
    """

    index: int
    requests: list[Request]
    rows: Ints
    num_tokens: Ints
    start: Ints
    sampled: Ints
    carry: Ints
    num_batch_tokens: int
    num_decode_tokens: int
    pad_to: int
    table: RequestTable
    pool: BlockPool
    note: str = ""
    found: Sequence[int] = ()
    copies: Copies | None = None
    drafts: Ints | None = None
    behind: Ints | None = None
    within: Ints | None = None
    sent: Tokens | None = None
    known_shape: BatchShape | None = None
    known_seconds: float | None = None

    def again(self, num_times: int) -> "Step":
        """Returns the iteration `num_times` later, if this iteration has only decodes and the batch stays the same."""
        _, num_decodes, context, num_padding, num_shared, _ = self.shape()
        shape = BatchShape((), num_decodes, context + num_times * num_decodes, num_padding, num_shared)
        made: dict[str, Any] = {"found": (), "copies": None, "known_shape": shape, "known_seconds": None}
        return replace(self, index=self.index + num_times, start=self.start + num_times, **made)

    @property
    def first_rows(self) -> Ints:
        """Returns the row of each request in `split`, of a request with drafts the first of several, [requests]."""
        places = np.arange(len(self.rows))
        return places if self.drafts is None else places + self.drafts.cumsum() - self.drafts

    def split(self) -> "Step":
        """Returns the same iteration with a row per draft: d drafts make 1 + d rows of one token each, with the same KV blocks.

        Every layer writes the keys and values of all rows before its attention reads any, so each row sees the tokens before it.
        """
        if self.drafts is None:
            return self
        times = self.drafts + ONE
        places, samples = np.arange(len(times)).repeat(times), np.zeros(len(times), np.bool_)
        samples[self.sampled] = True
        within = np.arange(len(places)) - self.first_rows[places]
        return replace(
            self,
            requests=[self.requests[place] for place in places.tolist()],
            rows=self.rows[places],
            num_tokens=(self.num_tokens - self.drafts)[places],
            start=self.start[places] + within,
            within=within,
            sampled=samples[places].nonzero()[0],
            carry=self.carry[places],
            behind=None if self.behind is None else self.behind[places],
            drafts=None,
        )

    def seconds(self, cost: CostModel) -> float:
        """Returns the predicted seconds; calls the cost model once."""
        if self.known_seconds is None:
            self.known_seconds = cost.predict(self.shape())
        return self.known_seconds

    def shape(self) -> BatchShape:
        """Returns the shape for a cost model. A request that computes one token counts as a decode."""
        if self.known_shape is not None:
            return self.known_shape
        if self.drafts is not None:
            return self._shape_with_drafts(self.drafts)
        start = self.start.tolist()  # summing a short list is faster than a short array
        num_requests, context = len(start), sum(start) + len(start)
        num_padding = self.pad_to - self.num_batch_tokens
        if self.num_batch_tokens == num_requests:
            num_shared = self.pool.num_shared_tokens(self.rows) if self.pool.shares else 0
            self.known_shape = BatchShape((), num_requests, context, num_padding, num_shared)
            return self.known_shape
        chunks = []
        for place in (self.num_tokens > ONE).nonzero()[0].tolist():
            before = start[place]
            chunks.append((self.num_tokens.item(place), before))
            context -= before + 1
        num_shared = self.pool.num_shared_tokens(self.rows[self.num_tokens == ONE]) if self.pool.shares else 0
        self.known_shape = BatchShape(tuple(chunks), num_requests - len(chunks), context, num_padding, num_shared)
        return self.known_shape

    def _shape_with_drafts(self, drafts: Ints) -> BatchShape:
        """Returns the shape of `split`: a decode and its drafts are rows that share the decode's context."""
        is_decode = self.num_tokens - drafts == ONE
        context, more = self.start[is_decode] + ONE, drafts[is_decode]
        chunks = zip(self.num_tokens[~is_decode].tolist(), self.start[~is_decode].tolist(), strict=True)
        num_shared, num_padding = int((more * context).sum()), self.pad_to - self.num_batch_tokens
        total = int(context.sum()) + num_shared + int((more * (more + ONE)).sum()) // 2
        num_shared += self.pool.num_shared_tokens(self.rows[is_decode])
        num_drafts = int(more.sum())
        self.known_shape = BatchShape(tuple(chunks), len(more) + num_drafts, total, num_padding, num_shared, num_drafts)
        return self.known_shape


class CopyTimes(NamedTuple):
    """When an iteration's inputs were copied to the device and its tokens back; seconds on the executor's clock."""

    upload_started: float
    upload_ended: float
    download_started: float
    download_ended: float


class BlockCopies(NamedTuple):
    """The copies of KV blocks between host memory and device before an iteration; seconds on the executor's clock.

    num_out, num_back: blocks copied to the host, and from it. waited: seconds for which the iteration's start waited for the copies.
    In a pipeline, the times describe the first stage.
    """

    iteration: int
    num_out: int
    num_back: int
    started: float
    ended: float
    waited: float


StageSpans = tuple[tuple[float, float], ...]
"""When each pipeline stage began and ended its part of an iteration; seconds on the executor's clock."""


class StepResult(NamedTuple):
    """The outcome of an iteration.

    tokens: int32 [rows of `Step.split`], the token sampled at each row, undefined outside `Step.sampled`; None in simulation.
    accepted: int64 [batch], accepted drafts of each request; None: none.
    started, ended: when the device began and finished computing, seconds on the executor's clock.
    copies: None if nothing is copied, or if copy timing is off.
    num_computed_tokens: tokens of the computed shape, including padding, such as a captured graph's; None: `Step.pad_to`.
    stages: None for a single stage, and in simulation, which keeps its own accounts of stages.
    blocks: None without `Step.copies`.
    """

    tokens: Tokens | None
    started: float
    ended: float
    copies: CopyTimes | None = None
    num_computed_tokens: int | None = None
    stages: StageSpans | None = None
    blocks: BlockCopies | None = None
    accepted: Ints | None = None


Turn = tuple[float, float, Any, float]
"""An iteration's planning and launch times, its handle, and when the iteration that the turn waited for had ended."""


class Executor(Protocol):
    """Computes steps in the order of their launch. Methods without a result do nothing by default.

    num_stages: the carry distance: a token sampled by iteration N can be fed back on the device from iteration N + num_stages
        on. 1 for one GPU, the number of stages for a pipeline. At most `num_stages` iterations are in flight before a launch.
    needs_tokens: whether prompts must hold real token values.

    An executor whose `repeats` is true has `repeat`, which replaces several launches and waits: `SimExecutor.repeat`. An
    executor may have `timed`, which wraps the policy's `plan`: `PlanningExecutor.timed`.
    """

    num_stages: int
    needs_tokens: bool

    def launch(self, step: Step) -> Any:
        """Starts computing. Returns a handle at once; `wait` for an earlier step and `ready_at` go on with a launch that takes long."""

    def wait(self, in_flight: Any) -> StepResult:
        """Blocks until the step's tokens are on the host. Called once for each launch, in launch order."""

    def ready_at(self) -> float:
        """Returns when the host can plan again. In real time it first finishes what the latest launch has left, and returns a time in the past."""
        return 0.0

    def ends_at(self, in_flight: Any) -> float:
        """Returns when the step has ended or will have ended; infinity if it computes and its end is not known."""

    def restart(self) -> None:
        """Resets the clock to 0 for a new run. No step may be in flight."""
        return

    def now(self) -> float:
        """Returns the seconds since the clock was first read after a restart; virtual in simulation."""

    def sleep_until(self, time: float) -> None:
        """Waits until `time`, when there is nothing to compute before."""
        return

    def close(self) -> None:
        """Releases threads and memory. No step may be in flight."""
        return
