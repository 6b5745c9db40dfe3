"""A request: what its client asked for, and how far it has come.

The counters of admitted requests live in a `RequestTable`, a column each, so that the engine updates a whole batch with
one array operation; a `Request` reads its own row. Counters are *predicted*: what iterations in flight will have done is
counted as done, so that a policy plans the next iteration without knowing whether the engine runs asynchronously.

Knows nothing of tensors, policies or executors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

NEVER = -1
"""The row of a request that has none, and the iteration of what has not happened."""

ZERO, ONE = np.array(0), np.array(1)
"""For arithmetic on the columns of a batch: numpy converts a Python integer anew each time, which takes as long as the rest."""


class Status(Enum):
    PENDING = "pending"  # has not arrived yet
    WAITING = "waiting"  # arrived, or preempted; holds no KV blocks
    RUNNING = "running"  # admitted
    FINISHED = "finished"


class FinishReason(Enum):
    LENGTH = "length"  # max_new_tokens generated
    STOP = "stop"  # an end-of-sequence token was generated
    REJECTED = "rejected"  # by the policy; the reason is in `Request.reject_reason`


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of one request are drawn.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the two filters off; both apply to the tempered
    distribution, top-k first. The random number of a token depends on `seed` and the token's position only, so the
    same seed gives the same tokens in any batch, under any policy, sync or async.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"sampling out of range (temperature >= 0, top_k >= 0, 0 < top_p <= 1): {self}")


GREEDY = Sampling()


class Request:
    """One request of a workload.

    What was asked for is set by the workload and never changes. `priority`, `client`, `deadline` (seconds, absolute)
    and `predicted_new_tokens` are for policies; the framework itself never reads them.
    """

    __slots__ = (
        "__weakref__",
        "admitted_at",
        "arrival_iteration",
        "arrival_time",
        "client",
        "deadline",
        "finish_reason",
        "finished_at",
        "id",
        "max_new_tokens",
        "num_output_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed_tokens",
        "output",
        "predicted_new_tokens",
        "priority",
        "prompt",
        "reject_reason",
        "row",
        "sampling",
        "status",
        "stop_tokens",
        "table",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        num_prompt_tokens: int,
        max_new_tokens: int,
        *,
        arrival_time: float = 0.0,
        arrival_iteration: int = 0,
        prompt: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        stop_tokens: Sequence[int] = (),
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        predicted_new_tokens: int | None = None,
    ) -> None:
        """
        Args:
            id: unique in the run.
            num_prompt_tokens: at least 1.
            max_new_tokens: tokens to generate unless an end-of-sequence token comes first; at least 1.
            arrival_time: seconds from the start of the run.
            arrival_iteration: the request arrives no earlier than this iteration of the engine (a stagger that does not
                depend on the hardware's speed). If nothing else is left to run, it arrives at once.
            prompt: token ids; None where only lengths matter (simulation).
            stop_tokens: token ids that end the request; the stop token itself is the last token of the output.

        Raises:
            ValueError: a length below 1, a negative arrival, or a prompt that is not num_prompt_tokens long.
        """
        if num_prompt_tokens < 1 or max_new_tokens < 1:
            raise ValueError(f"request {id}: prompt and output need at least 1 token each, "
                             f"got {num_prompt_tokens} and {max_new_tokens}")  # fmt: skip
        if arrival_time < 0 or arrival_iteration < 0:
            raise ValueError(f"request {id}: arrival must not be negative")
        if prompt is not None and len(prompt) != num_prompt_tokens:
            raise ValueError(
                f"request {id}: prompt has {len(prompt)} tokens, num_prompt_tokens says {num_prompt_tokens}"
            )
        self.id = id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.arrival_time = arrival_time
        self.arrival_iteration = arrival_iteration
        self.prompt = prompt
        self.sampling = sampling
        self.stop_tokens = tuple(stop_tokens)
        self.priority = priority
        self.client = client
        self.deadline = deadline
        self.predicted_new_tokens = predicted_new_tokens

        self.status = Status.PENDING
        self.finish_reason: FinishReason | None = None
        self.reject_reason = ""
        self.table: RequestTable | None = None
        self.row = NEVER
        self.output: list[int] = []  # token ids; filled when the request ends, empty in simulation
        self.num_output_tokens = 0  # set when the request ends
        self.admitted_at: float | None = None  # seconds; first admission
        self.finished_at: float | None = None  # seconds
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of prompt and output at which the request ends by length."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def num_known(self) -> int:
        """Prompt tokens plus the generated tokens whose values the host has."""
        if self.table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return int(self.table.known[self.row])

    @property
    def num_tokens(self) -> int:
        """Prompt tokens plus generated tokens, those that iterations in flight generate counted."""
        if self.table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return int(self.table.known[self.row] + self.table.sampling[self.row])

    @property
    def num_new_tokens(self) -> int:
        """Generated tokens, those in flight counted."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the KV cache, those in flight counted."""
        return 0 if self.table is None else self.table.computed.item(self.row)

    @property
    def num_ready(self) -> int:
        """Tokens that could be computed in the next iteration: see `RequestTable.ready`."""
        if self.status is Status.FINISHED:
            return 0
        if self.table is None:
            return self.num_prompt_tokens
        return self.table.ready_of(self.row)

    def __repr__(self) -> str:
        return (f"Request({self.id}: {self.num_prompt_tokens}+{self.max_new_tokens} tokens, {self.status.value}, "
                f"{self.num_computed} of {self.num_tokens} computed)")  # fmt: skip


class Counters(NamedTuple):
    """Columns of some requests, [requests] each.

    known: tokens whose values the host has. total: those and the tokens that iterations in flight generate.
    computed: tokens in the KV cache, iterations in flight counted. limit: tokens at which the request ends by length.
    """

    known: Ints
    total: Ints
    computed: Ints
    limit: Ints


class RequestTable:
    """Counters of the requests that have been admitted, a row each, from the first admission until the end.

    Owner and only writer: `State`. A row is given back when no iteration in flight refers to it any more, as its KV
    blocks are, so a step in flight can name its rows without holding a lock on them.

    Columns, all int64 [rows] unless noted:
        prompt: prompt tokens.
        known: prompt tokens plus generated tokens whose values the host has.
        sampling: tokens that iterations in flight generate.
        computed: tokens in the KV cache, iterations in flight counted.
        limit: tokens at which the request ends by length.
        scheduled_at: the last iteration that computes tokens of the request.
        sampled_at: the last iteration that samples a token of the request.
        sampled_row: the request's place in that iteration's batch.
        decoding: bool; all but the newest token is computed, so that each further iteration computes one.
        can_stop: bool; the request has stop tokens.
        temperature, top_k, top_p, seed: its `Sampling`; float32, int32, float32, uint64.
        ended: bool; the request has ended, whatever iterations in flight still generate.
        tokens: int32 [rows, width]; prompt and known output, where token values matter. None in simulation.
    """

    def __init__(self, num_rows: int, num_stages: int, token_width: int | None = None) -> None:
        """num_stages: how many iterations lie between sampling a token and being able to feed it back on the device."""
        self.num_stages = num_stages
        self.iteration = 0  # the iteration that is being planned
        self.id = np.full(num_rows, NEVER, np.int64)
        self.prompt = np.zeros(num_rows, np.int64)
        self.known = np.zeros(num_rows, np.int64)
        self.sampling = np.zeros(num_rows, np.int64)
        self.computed = np.zeros(num_rows, np.int64)
        self.limit = np.zeros(num_rows, np.int64)
        self.scheduled_at = np.full(num_rows, NEVER, np.int64)
        self.sampled_at = np.full(num_rows, NEVER, np.int64)
        self.sampled_row = np.full(num_rows, NEVER, np.int64)
        self.decoding = np.zeros(num_rows, np.bool_)
        self.can_stop = np.zeros(num_rows, np.bool_)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.ended = np.zeros(num_rows, np.bool_)
        self.tokens = None if token_width is None else np.zeros((num_rows, token_width), np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_rows(self) -> int:
        return len(self.known)

    def counters(self, rows: Ints) -> Counters:
        """What plans are checked against and carried out from."""
        known = self.known[rows]
        return Counters(known, known + self.sampling[rows], self.computed[rows], self.limit[rows])

    def ready(self, rows: Ints, counters: Counters | None = None) -> Ints:
        """Tokens that each request could compute in the iteration being planned, [len(rows)].

        The rest of the prompt (after a preemption, of prompt and output); 1 for a decode whose input the host knows or
        the device can carry over; 0 while that input is still deeper in the pipeline, and once the end is in flight.

        counters: those of `rows`, if they are at hand.
        """
        known, total, computed, limit = counters or self.counters(rows)
        ready = total - computed
        if self.num_stages > 1:
            ready -= (total - known) * (self.sampled_at[rows] > self.iteration - self.num_stages)
        ready[total >= limit] = 0
        return ready

    def ready_of(self, row: int) -> int:
        """`ready` of one row, without the cost of arrays."""
        known, sampling = self.known.item(row), self.sampling.item(row)
        if known + sampling >= self.limit.item(row):
            return 0
        carried = sampling if self.sampled_at.item(row) <= self.iteration - self.num_stages else 0
        return int(known + carried - self.computed.item(row))

    def admit(self, request: Request) -> None:
        """Give the request a row and write its start values."""
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        request.table, request.row = self, row
        self.id[row] = request.id
        self.prompt[row] = self.known[row] = request.num_prompt_tokens
        self.limit[row] = request.max_tokens
        self.sampling[row] = self.computed[row] = 0
        self.scheduled_at[row] = self.sampled_at[row] = self.sampled_row[row] = NEVER
        self.decoding[row] = self.ended[row] = False
        self.can_stop[row] = bool(request.stop_tokens)
        sampling = request.sampling
        self.temperature[row], self.seed[row] = sampling.temperature, sampling.seed
        self.top_k[row], self.top_p[row] = sampling.top_k, sampling.top_p
        if self.tokens is not None:
            if request.prompt is None:
                raise ValueError(f"request {request.id} has no prompt tokens, and this executor computes real ones")
            self.tokens[row, : request.num_prompt_tokens] = request.prompt

    def close(self, request: Request) -> None:
        """End the request: it keeps its output and loses its row, which stays taken until `free`."""
        row = request.row
        known = int(self.known[row])
        request.num_output_tokens = known - request.num_prompt_tokens
        if self.tokens is not None:
            request.output = self.tokens[row, request.num_prompt_tokens : known].tolist()
        request.table, request.row = None, NEVER
        self.ended[row] = True

    def free(self, row: int) -> None:
        self.id[row] = NEVER
        self._free_rows.append(row)

    def _grow(self) -> None:
        """Double the table: preempted requests keep their rows, so the batch limit does not bound them."""
        old = self.num_rows
        for name, column in list(vars(self).items()):
            if isinstance(column, np.ndarray):
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._free_rows = list(range(2 * old - 1, old - 1, -1))


class RequestSet:
    """An ordered set of requests, with a list and the rows of them that are built again only after a change.

    To a policy it is a read-only `Collection[Request]`; `State` alone adds and removes.
    """

    __slots__ = ("_list", "_members", "_rows")

    def __init__(self) -> None:
        self._members: dict[Request, None] = {}
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
        """In order; not to be changed."""
        if self._list is None:
            self._list = list(self._members)
        return self._list

    @property
    def rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.fromiter(map(attrgetter("row"), self._members), np.int64, len(self._members))
        return self._rows

    def without(self, requests: set[Request]) -> set[Request]:
        """Those of `requests` that are not members."""
        return requests.difference(self._members)

    def add(self, request: Request) -> None:
        self._members[request] = None
        self._rows = self._list = None

    def discard(self, request: Request) -> None:
        if self._members.pop(request, self) is None:
            self._rows = self._list = None
