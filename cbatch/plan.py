"""A policy's decision for one iteration."""

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from cbatch.request import Ints, Request
from cbatch.request_table import Counters


class Plan:
    """An ordered list of (request, num_tokens) for the next iteration.

    A plan has no prefill or decode phase: a request with uncomputed prompt gets a chunk, any other request one token, or 1 + d with
    d drafts (`PlanBuilder.draft`). A plan admits the waiting requests that it contains.

    Attributes:
        requests, num_tokens: the columns of the list.
        preempt: running requests that lose their KV blocks and wait again; their tokens are recomputed later.
        reject: (waiting request, reason) pairs; these requests end without being served.
        reserve: by request, tokens of KV cache that the request holds from now on.
        give_up: by session in a pause, whether its blocks are worth a place in host memory, for evictions that read it
            (`Eviction.on_give_up`).
        pad_to: number of tokens to pad the iteration to (a tile, or the shape of a captured graph).
        wake_at: seconds; the policy plans again at this time unless a request arrives earlier. After an empty plan with nothing in
            flight, which waits (a time that is not after `View.now` counts as None); and if `Policy.steady`, instead of a repeat.
        least_free: KV blocks that must stay free for the plan to be repeated.
        note: free text for the log of this iteration.
        refusal: why the builder's last `add` granted no tokens; None if it granted tokens, or if there was no builder.
    """

    __slots__ = (
        *("give_up", "least_free", "note", "num_tokens", "pad_to", "preempt"),
        *("refusal", "reject", "requests", "reserve", "wake_at"),
    )

    def __init__(
        self, entries: Iterable[tuple[Request, int]] = (), *, wake_at: float | None = None, note: str = ""
    ) -> None:
        self.requests: list[Request] = []
        self.num_tokens: list[int] = []
        for request, num_tokens in entries:
            self.requests.append(request)
            self.num_tokens.append(num_tokens)
        self.preempt: list[Request] = []
        self.reject: list[tuple[Request, str]] = []
        self.reserve: dict[Request, int] = {}
        self.give_up: dict[str, bool] = {}
        self.pad_to: int | None = None
        self.wake_at, self.least_free = wake_at, 0
        self.note = note
        self.refusal: Refusal | None = None

    def __iter__(self) -> Iterator[tuple[Request, int]]:
        return zip(self.requests, self.num_tokens, strict=True)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"Plan({' '.join(f'{request.id}:{count}' for request, count in self)})"


class Refusal(Enum):
    """Why `PlanBuilder.add` granted no tokens."""

    ROWS = "the plan holds max_batch requests"
    PLACES = "max_running requests are admitted"
    GONE = "the request neither waits nor runs"
    NAMED = "the plan names the request already"
    NOT_READY = "the request has no token to compute in this iteration"
    NONE_ASKED = "fewer than one token was asked for"
    TOKENS = "the tokens left of max_tokens do not suffice"
    BLOCKS = "the free KV blocks do not suffice"


class CheckedPlan(NamedTuple):
    """A legal plan, with results of the check that `State.apply` reads.

    newcomers: the waiting requests among `plan.requests`, in plan order.
    rows: int64 [batch], table rows; -1 for requests that were never admitted.
    num_tokens: int64 [batch], tokens to compute. end: int64 [batch], tokens in the KV cache after the iteration.
    taking, num_blocks: places of the requests that take KV blocks, and the number of blocks for each.
    num_batch_tokens: total tokens to compute. num_decodes: requests that have only their newest token left.
    counters: the batch's counters before the plan is carried out. drafts: see `Step`.
    """

    plan: Plan
    newcomers: list[Request]
    rows: Ints
    num_tokens: Ints
    end: Ints
    taking: Ints
    num_blocks: list[int]
    num_batch_tokens: int
    num_decodes: int
    counters: Counters
    drafts: Ints | None
