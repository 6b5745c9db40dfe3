"""The waiting and running requests. Counters of admitted requests are columns, so that one array operation updates a whole batch.

Counters are *predicted*: work in flight counts as done, so that a policy plans the same way whether or not the engine runs
asynchronously.
"""

from collections.abc import Iterator
from math import isnan
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedKeyList

from cbatch.errors import WorkloadError
from cbatch.request import NEVER, WAITING, Ints, Request, Status
from cbatch.request_spec import LEAST_TEMPERATURE, RequestSpec

ZERO, ONE, NONE = np.array(0), np.array(1), np.array(NEVER)
"""Operands for columns of a batch, since numpy takes as long to convert a Python integer as to compute."""

_HOTTEST, _ALL = float(np.finfo(np.float32).max), int(np.iinfo(np.int32).max)
"""The largest temperature and top-k of a row."""


class Counters(NamedTuple):
    """Counters of requests, [requests] each.

    known: prompt tokens plus generated tokens whose values the host has.
    total: known tokens plus tokens that iterations in flight generate.
    computed: tokens in the KV cache, including tokens in flight.
    """

    known: Ints
    total: Ints
    computed: Ints


class RequestTable:
    """Counters of admitted requests, one row per request, from the first admission until the end.

    Owner and only writer: `State`. Like a KV block, a row is freed once no iteration in flight refers to the row.

    carries: whether `sampled_at` and `sampled_row` are kept; a simulation of one stage does not need them.

    Columns, all int64 [rows] unless noted:
        known, total, computed: see `Counters`.
        limit: tokens at which the request ends by length.
        scheduled_at: the last iteration that computes tokens of the request.
        sampled_at: the last iteration that samples a token of the request.
        sampled_row: the request's place in the batch of iteration `sampled_at`.
        first_token_at, last_token_at: seconds when the first and the latest token reached the host; float64, NaN before.
        stop: tokens at which the request ends by itself; 0 if that is not below `limit`.
        can_stop: bool; whether the request has stop tokens or strings.
        ended: bool; whether the request has ended; iterations in flight may still compute its tokens.
        drafts: drafts in flight. `total` and `computed` are upper bounds: they count all of them until the outcome is absorbed.
        temperature, top_k, top_p, seed: the request's `Sampling`; float32, int32, float32, uint64. Greedy temperatures are 0.
        tokens: int32 [rows, width]; prompt and known output if token values matter. None in simulation.
    """

    def __init__(self, num_rows: int, num_stages: int, token_width: int | None = None) -> None:
        """num_stages: iterations from sampling a token to feeding it back on the device."""
        self.num_stages = num_stages
        self.carries = num_stages > 1 or token_width is not None
        self.iteration = 0  # the iteration being planned
        self.has_hidden_lengths = False  # whether an admitted request ends before its limit
        self.num_drafting = 0  # drafts in flight
        self.id = np.full(num_rows, NEVER, np.int64)
        self.known, self.total, self.computed, self.limit, self.stop = np.zeros((5, num_rows), np.int64)
        self.drafts = np.zeros(num_rows, np.int64)
        self.scheduled_at, self.sampled_at, self.sampled_row = np.full((3, num_rows), NEVER, np.int64)
        self.first_token_at, self.last_token_at = np.full((2, num_rows), np.nan)
        self.can_stop, self.ended = np.zeros((2, num_rows), np.bool_)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.tokens = None if token_width is None else np.zeros((num_rows, token_width), np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return len(self.known)

    def counters(self, rows: Ints) -> Counters:
        """Returns copies of the counters of these rows."""
        return Counters(self.known[rows], self.total[rows], self.computed[rows])

    def ready(self, rows: Ints, counters: Counters | None = None) -> Ints:
        """Returns the tokens of running or waiting requests that the planned iteration could compute, [len(rows)].

        They are the rest of the prompt (after a preemption, of prompt and output). A decode has 1 if the host knows its input or
        the device can carry the input over, and 0 while the input is still deeper in the pipeline. With drafts in flight, it has 0 if they may
        reach its limit, and a preempted request has 0, which recomputes known tokens.

        counters: the counters of `rows`, if already read.
        """
        known, total, computed = counters or self.counters(rows)
        ready = total - computed
        if self.num_stages > 1:
            ready -= (total - known) * (self.sampled_at[rows] > self.iteration - self.num_stages)
        if self.num_drafting:
            waits = (ready < ONE) | (total >= self.limit[rows]) | (self.computed[rows] == ZERO)
            ready[(self.drafts[rows] > ZERO) & (rows >= ZERO) & waits] = 0
        return ready

    def ready_of(self, row: int) -> int:
        """Returns `ready` of one row, without the cost of arrays; 0 once the request's last token is in flight."""
        total = self.total.item(row)
        if total >= self.limit.item(row):
            return 0
        if self.sampled_at.item(row) > self.iteration - self.num_stages:
            total = self.known.item(row)
        computed = self.computed.item(row)
        if self.num_drafting and self.drafts.item(row):
            return int(0 < computed < total)
        return int(total - computed)

    def take_row(self, id_: int) -> int:
        """Returns a row that only holds KV blocks, for a request that runs elsewhere; `admit` returns one with which a request can run."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self.id[row], self.scheduled_at[row] = id_, NEVER
        return row

    def admit(self, spec: RequestSpec, prompt: NDArray[np.int32] | None = None) -> int:
        """Writes the start values of a request. Returns the request's row. prompt: its tokens as an array, which is copied faster than a list."""
        row = self.take_row(spec.id)
        self.known[row] = self.total[row] = spec.num_prompt_tokens
        self.limit[row] = spec.max_tokens
        self.stop[row] = 0
        if spec.has_hidden_length:
            assert spec.true_new_tokens is not None
            self.stop[row] = spec.num_prompt_tokens + spec.true_new_tokens
            self.has_hidden_lengths = True
        self.computed[row] = self.drafts[row] = 0
        self.sampled_at[row] = self.sampled_row[row] = NEVER
        self.first_token_at[row] = self.last_token_at[row] = np.nan
        self.ended[row] = False
        self.can_stop[row] = spec.can_stop
        sampling = spec.sampling
        tempered = sampling.temperature >= LEAST_TEMPERATURE
        self.temperature[row] = min(sampling.temperature, _HOTTEST) if tempered else 0
        self.seed[row], self.top_p[row], self.top_k[row] = sampling.seed, sampling.top_p, min(sampling.top_k, _ALL)
        if self.tokens is not None:
            if spec.prompt is None:
                problem = f"request {spec.id} has no prompt tokens, and this executor computes real ones"
                raise WorkloadError(f"{problem}; give token ids, as in Request(..., prompt=[...])")
            self.tokens[row, : spec.num_prompt_tokens] = spec.prompt if prompt is None else prompt
        return row

    def token_times(self, row: int) -> tuple[float, float] | tuple[None, None]:
        """Returns when the first and the latest token of a row reached the host, in seconds; None before the first token."""
        first = self.first_token_at.item(row)
        return (None, None) if isnan(first) else (first, self.last_token_at.item(row))

    def close(self, row: int, num_prompt_tokens: int) -> tuple[int, list[int]]:
        """Marks the request as ended. Returns the number of output tokens, and their ids if token values matter."""
        self.ended[row] = True
        known = self.known.item(row)
        output = [] if self.tokens is None else self.tokens[row, num_prompt_tokens:known].tolist()
        return known - num_prompt_tokens, output

    def free(self, row: int) -> None:
        self.id[row] = NEVER
        self._free_rows.append(row)

    def _grow(self) -> None:
        """Doubles the table: preempted requests keep their rows, so the batch limit does not bound their number."""
        old = self.num_rows
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free_rows = list(range(2 * old - 1, old - 1, -1))


class RequestSet:
    """An ordered set of requests, read-only for policies. `members` and `rows` are rebuilt only after a change."""

    __slots__ = ("_list", "_members", "_rows")

    def __init__(self) -> None:
        self._members: dict[Request, int] = {}  # values: table rows
        self._rows: Ints | None = None
        self._list: list[Request] | None = None

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._members)

    def __contains__(self, request: object) -> bool:
        return request in self._members

    @property
    def members(self) -> list[Request]:
        """Returns the requests in order. Callers must not modify the list."""
        if self._list is None:
            self._list = list(self._members)
        return self._list

    @property
    def rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.fromiter(self._members.values(), np.int64, len(self._members))
        return self._rows

    def without(self, requests: set[Request]) -> set[Request]:
        """Returns the `requests` that are not members."""
        return requests.difference(self._members)

    def add(self, request: Request) -> None:
        self._members[request] = request._row
        self._rows = self._list = None

    def discard(self, request: Request) -> None:
        if self._members.pop(request, None) is not None:
            self._rows = self._list = None


class Queues:
    """The waiting and running requests.

    waiting: in arrival order.

    running: admitted requests with tokens left to compute, in admission order. A request leaves once its last token by
        length is in flight.
    decoding, prefilling: the two parts of `running`.
    """

    def __init__(self) -> None:
        self.waiting: SortedKeyList[Request, tuple[float, int]] = SortedKeyList(key=attrgetter("arrival_time", "id"))
        self.running, self.decoding, self.prefilling = RequestSet(), RequestSet(), RequestSet()

    def wait(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.add(request)

    def admit(self, request: Request, now: float) -> None:
        self.waiting.remove(request)
        if request.admitted_at is None:
            request.admitted_at = now
        request.status = Status.RUNNING
        self.running.add(request)
        self.prefilling.add(request)

    def begin_decoding(self, request: Request) -> None:
        self.prefilling.discard(request)
        self.decoding.add(request)

    def leave(self, request: Request) -> None:
        """Removes the request from all queues."""
        if request.status is WAITING:
            self.waiting.remove(request)
        for part in (self.running, self.decoding, self.prefilling):
            part.discard(request)
