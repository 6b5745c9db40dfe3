"""A request: the client's specification (`RequestSpec`), and the progress. Knows nothing about tensors, policies or executors.

The counters of an admitted `Request` are in a row (`_row`) of a `RequestTable` (`_table`), which the request reads.
"""

from collections.abc import Collection, Mapping, Reversible, Sequence
from enum import Enum
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cbatch.request_spec import SLO, RequestSpec, Sampling

Ints = NDArray[np.int64]

NEVER = -1  # means "no row" or "in no iteration"


class Status(Enum):
    PENDING = "pending"  # has not arrived yet
    WAITING = "waiting"  # arrived, or preempted; holds KV blocks only if it has moved here with them
    RUNNING = "running"  # admitted
    MOVING = "moving"  # left an engine, and does not wait at the next one yet
    FINISHED = "finished"


class FinishReason(Enum):
    LENGTH = "length"  # max_new_tokens generated
    STOP = "stop"  # an end-of-sequence token or a stop string was generated
    REJECTED = "rejected"  # by the policy; the reason is in `Request.reject_reason`
    CANCELLED = "cancelled"  # its client has left


SERVED = (FinishReason.LENGTH, FinishReason.STOP)  # reasons that end a request with its whole output
WAITING = Status.WAITING  # read where speed matters: looking a member up in its class takes several times as long


class RequestColumns(Protocol):
    """The columns of a `RequestTable` that requests read."""

    known: Ints
    total: Ints
    computed: Ints

    def ready_of(self, row: int) -> int: ...

    def token_times(self, row: int) -> tuple[float, float] | tuple[None, None]: ...


def read_only(path: str) -> Any:
    """Returns a read-only property that reads another attribute, or an attribute's attribute, by its dotted path."""
    return property(attrgetter(path))


def _of_spec(name: str) -> Any:
    """Returns a read-only property that reads a field of the request's spec."""
    return read_only(f"_spec.{name}")


_PLACE = ("__weakref__", "_arrival_time", "_prefix", "_row", "_spec", "_table", "status")
_TIMES_AND_REASONS = ("admitted_at", "finish_reason", "finished_at", "reject_reason")
_COUNTS = ("num_cached_again", "num_cached_tokens", "num_output_tokens", "num_preemptions", "num_recomputed_tokens")
_LOST = ("num_host_tokens", "num_lost_tokens", "num_moves", "_lost_to", "_resumed_at")
_MOVED = ("num_recomputed_after_moves", "num_recomputed_after_lost_leases", "_preempted_to", "_leased_to")
_OUTPUT = ("output", "token_times")


class Request:
    """One request of a run.

    The fields of `RequestSpec` are read-only here. The true output length is hidden: `max_new_tokens` is the limit at which the
    request ends, unless it ends by itself earlier.

    arrival_time: seconds. A request that arrives by iteration gets the time when that iteration was planned.
    admitted_at, finished_at: seconds of the first admission and of the end; None before.
    num_moves: to another engine.
    num_lost_tokens: tokens of KV cache lost by preemptions, or left behind by moves. Of these, num_recomputed_tokens were computed again, counted at the next
        preemption, move or end, and num_cached_again were found in the prefix cache; the others were not needed any more.
    num_recomputed_after_moves, num_recomputed_after_lost_leases: of the tokens computed again, those that a move has lost, without and with the
        blocks of its lease; the other ones were lost by preemptions.
    num_cached_tokens: tokens that the prefix cache held at the first admission; of these, num_host_tokens in host memory.
    finish_reason, reject_reason, num_output_tokens, output: set when the request ends.

    Attributes that begin with an underscore belong to the engine; other modules of `cbatch` read and set them, policies do not.
    """

    __slots__ = (*_PLACE, *_TIMES_AND_REASONS, *_COUNTS, *_LOST, *_MOVED, *_OUTPUT)

    id: Final[int] = _of_spec("id")
    num_prompt_tokens: Final[int] = _of_spec("num_prompt_tokens")
    max_new_tokens: Final[int] = _of_spec("max_new_tokens")
    max_tokens: Final[int] = _of_spec("max_tokens")
    arrival_time: Final[float] = read_only("_arrival_time")
    prompt: Final[Sequence[int] | None] = _of_spec("prompt")
    sampling: Final[Sampling] = _of_spec("sampling")
    stop_tokens: Final[tuple[int, ...]] = _of_spec("stop_tokens")
    stop_strings: Final[tuple[str, ...]] = _of_spec("stop_strings")
    client: Final[str | None] = _of_spec("client")
    session: Final[str | None] = _of_spec("session")
    turn: Final[int | None] = _of_spec("turn")
    last: Final[bool | None] = _of_spec("last")
    pause: Final[float | None] = _of_spec("pause")
    follows: Final[tuple[int, ...]] = _of_spec("follows")
    tier: Final[str | None] = _of_spec("tier")
    priority: Final[int] = _of_spec("priority")
    slo: Final[SLO] = _of_spec("slo")
    predicted_new_tokens: Final[int | None] = _of_spec("predicted_new_tokens")
    prefix_hashes: Final[tuple[int, ...]] = _of_spec("prefix_hashes")
    hash_block: Final[int] = _of_spec("hash_block")
    texts: Final[tuple[tuple[int, int], ...]] = _of_spec("texts")
    salt: Final[str] = _of_spec("salt")
    extra: Final[Mapping[str, Any]] = property(lambda request: MappingProxyType(request._spec.extra))  # type: ignore[assignment]

    def __init__(self, id: int, num_prompt_tokens: int, max_new_tokens: int, **fields: Any) -> None:
        """Takes the fields of `RequestSpec`. Raises ValueError like `RequestSpec`."""
        self._begin(RequestSpec(id, num_prompt_tokens, max_new_tokens, **fields))

    @classmethod
    def from_spec(cls, spec: RequestSpec) -> Self:
        request = cls.__new__(cls)
        request._begin(spec)
        return request

    def _begin(self, spec: RequestSpec) -> None:
        self._spec = spec
        self._arrival_time = spec.arrival_time
        self.status = Status.PENDING
        self.finish_reason: FinishReason | None = None
        self.reject_reason, self._row = "", NEVER
        self._table: RequestColumns | None = None
        self._prefix: Any = None  # a `kv.hashes.Prefix` with a prefix cache, until the request ends
        self.token_times: tuple[float, float] | tuple[None, None] = (None, None)  # set when the request ends
        self.output: list[int] = []  # token ids; filled when the request ends, empty in simulation
        self.num_output_tokens = self.num_preemptions = self.num_moves = self.num_recomputed_tokens = 0
        self.num_cached_tokens = self.num_host_tokens = self.num_cached_again = self.num_lost_tokens = 0
        self.num_recomputed_after_moves = self.num_recomputed_after_lost_leases = 0
        self._lost_to = 0  # the most tokens computed before a preemption or a move
        self._preempted_to = 0  # the most computed before a preemption since the latest move
        self._leased_to = 0  # tokens of the blocks that a lost lease held
        self._resumed_at = 0  # tokens found at the latest admission
        self.admitted_at: float | None = None  # seconds; first admission
        self.finished_at: float | None = None  # seconds

    def arrive(self, now: float | None = None) -> None:
        """Makes the request wait. now: seconds; becomes the arrival time of a request that arrives by iteration."""
        self.status = Status.WAITING
        if now is not None:
            self._arrival_time = now

    def lose(self, num_computed: int) -> None:
        """Counts a preemption that takes the KV cache of `num_computed` tokens."""
        self.count_recomputed(num_computed)
        self.num_preemptions += 1
        self._leave_behind(num_computed)
        self._preempted_to = max(self._preempted_to, num_computed)

    def lose_accepted(self, number: int, num_computed: int) -> None:
        """Counts drafts that a preemption took in flight and that were then accepted, which makes `num_computed` tokens lost."""
        self.num_lost_tokens += number
        self._lost_to = max(self._lost_to, num_computed)
        self._preempted_to = max(self._preempted_to, num_computed)

    def move(self, num_computed: int) -> None:
        """Counts a move to another engine, which finds what was sent of the KV cache of `num_computed` tokens."""
        self.num_moves += 1
        self._leave_behind(num_computed)
        self._preempted_to = self._leased_to = 0

    def lose_lease(self, num_tokens: int) -> None:
        """Counts a lease of the first `num_tokens` tokens that was over before they could be read."""
        self._leased_to = num_tokens

    def _leave_behind(self, num_computed: int) -> None:
        self.num_lost_tokens += num_computed
        self._lost_to, self._resumed_at = max(self._lost_to, num_computed), 0

    def resume(self, num_found: int) -> None:
        """Counts tokens that a preempted request finds in the prefix cache at its admission."""
        self._resumed_at = num_found
        self.num_cached_again += min(num_found, self._lost_to)

    def count_recomputed(self, num_computed: int) -> None:
        """Counts the lost tokens computed again since the latest admission, when `num_computed` tokens are in the KV cache."""
        end = min(num_computed, self._lost_to)
        self.num_recomputed_tokens += max(end - self._resumed_at, 0)
        if self.num_moves:
            begin = max(self._resumed_at, self._preempted_to)  # earlier tokens were lost by a preemption after the move
            leased = max(min(end, self._leased_to) - begin, 0)
            self.num_recomputed_after_lost_leases += leased
            self.num_recomputed_after_moves += max(end - begin, 0) - leased

    @property
    def deadline(self) -> float | None:
        """Returns when the last token is due, in seconds from the start of the run; None without `slo.total`."""
        return None if self.slo.total is None else self.arrival_time + self.slo.total

    @property
    def is_cut(self) -> bool:
        """Returns whether `max_new_tokens` ended the request before its true length, a stop token or a stop string."""
        spec = self._spec
        longer = spec.can_stop if spec.true_new_tokens is None else spec.true_new_tokens > spec.max_new_tokens
        return longer and self.finish_reason is FinishReason.LENGTH

    @property
    def num_known(self) -> int:
        """Returns the prompt tokens plus the generated tokens whose values the host has."""
        if self._table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return self._table.known.item(self._row)

    @property
    def num_tokens(self) -> int:
        """Returns the prompt tokens plus generated tokens, including tokens in flight."""
        if self._table is None:
            return self.num_prompt_tokens + self.num_output_tokens
        return self._table.total.item(self._row)

    @property
    def num_new_tokens(self) -> int:
        """Returns the generated tokens, including tokens in flight."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def first_token_at(self) -> float | None:
        """Returns when the first generated token reached the host, in seconds from the start of the run; None before."""
        return self.token_times[0] if self._table is None else self._table.token_times(self._row)[0]

    @property
    def last_token_at(self) -> float | None:
        """Returns when the latest generated token reached the host, in seconds; None before the first token."""
        return self.token_times[1] if self._table is None else self._table.token_times(self._row)[1]

    @property
    def num_computed(self) -> int:
        """Returns the tokens in the KV cache, including tokens in flight; for a waiting request, tokens in the prefix cache."""
        if self._prefix is not None and self.status is WAITING:
            num_cached: int = self._prefix.num_cached
            return num_cached
        return 0 if self._table is None else self._table.computed.item(self._row)

    @property
    def num_ready(self) -> int:
        """Returns the tokens that the next iteration could compute: see `RequestTable.ready`."""
        if self._prefix is not None and self.status is WAITING:
            total = self.num_prompt_tokens if self._table is None else self._table.ready_of(self._row)
            ready: int = total - self._prefix.num_cached
            return max(ready, 0)  # with drafts in flight
        if self._table is None:
            return 0 if self.status is Status.FINISHED else self.num_prompt_tokens
        return self._table.ready_of(self._row)

    def __repr__(self) -> str:
        progress = f"{self.num_computed} of {self.num_tokens} computed"
        return f"Request({self.id}: {self.num_prompt_tokens}+{self.max_new_tokens} tokens, {self.status.value}, {progress})"


def spec_of(request: Request) -> RequestSpec:
    """Returns a request's specification, including its true length. For the engine and results, not for policies."""
    return request._spec


def leaves_at(request: Request) -> float:
    """Returns when the client leaves, in seconds from the start of the run; infinity if the client stays. Not for policies."""
    timeout = request._spec.timeout
    return inf if timeout is None else request.arrival_time + timeout


class Requests(Collection[Request], Reversible[Request], Protocol):
    """An ordered, read-only set of requests that follows the host's state."""
