"""A plan that is being filled, and what is left of the limits of batch, tokens and KV cache: the base of the plan builder."""

from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from operator import index
from typing import Final

from cbatch.errors import PlanError
from cbatch.kv import blocks_lacking
from cbatch.limits import Resources
from cbatch.plan import Plan, Refusal
from cbatch.request import Request, read_only

_FROM_VIEW = ("_ahead", "_block_size", "_kv", "_limits", "_view")
_IN_PLAN = ("_bulk", "_decodes", "_named", "_num_tokens", "_padding", "_plan", "_refusal", "_shared")
_LEFT = ("_coming_blocks", "_free_blocks", "_places", "_rows_left", "_tokens_left")


class Filling:
    """The plan so far, and what is left for it. The attributes are read-only:

    plan: the plan so far. num_tokens, num_requests: tokens in the plan, and requests that compute them.
    tokens_left, rows_left, free_blocks: tokens, requests and KV blocks that are left for this iteration.
    can_admit: whether there is a place for another waiting request.
    refusal: why the latest `add` granted no tokens; None if it granted tokens.
    """

    __slots__ = (*_FROM_VIEW, *_IN_PLAN, *_LEFT)

    plan: Final[Plan] = read_only("_plan")
    num_tokens: Final[int] = read_only("_num_tokens")
    tokens_left: Final[int] = read_only("_tokens_left")
    rows_left: Final[int] = read_only("_rows_left")
    free_blocks: Final[int] = read_only("_free_blocks")
    refusal: Final[Refusal | None] = read_only("_refusal")

    def __init__(self, view: Resources) -> None:
        limits, kv = view.limits, view.kv
        self._plan = Plan()
        self._num_tokens = 0
        self._tokens_left = limits.max_tokens
        self._rows_left = limits.max_batch
        self._free_blocks = kv.num_free
        self._refusal: Refusal | None = None
        self._padding: int | None = None
        self._view, self._limits, self._kv = view, limits, kv
        self._block_size, self._ahead = kv.block_size, kv.num_ahead
        self._places = view.num_places
        self._coming_blocks = kv.num_retiring
        self._named: set[Request] = set()  # added one by one, preempted or rejected
        self._bulk: list[Request] = []  # decodes added together; never modified
        self._shared: dict[Request, int] = {}  # blocks that newcomers will share with other requests
        self._decodes: Mapping[Request, int] | None = None  # `decode_blocks`, once a decode is added singly

    @property
    def num_requests(self) -> int:
        return len(self._plan.requests)

    @property
    def can_admit(self) -> bool:
        return self._places > 0 and self._rows_left > 0 and self._tokens_left > 0

    def _num_held(self, request: Request, waiting: bool) -> int:
        """Returns the blocks that the request need not take: held blocks, and shared blocks unless a preemption may free them."""
        if not waiting:
            return self._kv.num_held(request)
        return 0 if self._plan.preempt else self._kv.num_shared(request)

    def _refusal_of(self, request: Request, waiting: bool) -> Refusal | None:
        """Returns why the request cannot be added, regardless of tokens and blocks."""
        if self._rows_left <= 0:
            return Refusal.ROWS
        if waiting and self._places <= 0:
            return Refusal.PLACES
        if request in self._named:
            return Refusal.NAMED
        if waiting:
            return None
        if request not in self._view.running:
            return Refusal.GONE
        return Refusal.NAMED if request in self._view.decoding and request in self._bulk else None

    def _grant(self, request: Request, num_tokens: int) -> int:
        self._refusal = None
        self._named.add(request)
        self._plan.requests.append(request)
        self._plan.num_tokens.append(num_tokens)
        self._count(1, num_tokens)
        return num_tokens

    def _refuse(self, refusal: Refusal) -> int:
        self._refusal = refusal
        return 0

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self._rows_left -= num_requests
        self._tokens_left -= num_tokens
        self._num_tokens += num_tokens

    def _depart(self, request: Request, how: str) -> None:
        """Withdraws the tokens and blocks that the plan granted a preempted or rejected request."""
        plan, planned = self._plan, self._plan.requests
        if request in planned:
            place = planned.index(request)
            del planned[place]
            granted, reserve = plan.num_tokens.pop(place), plan.reserve.pop(request, 0)
            held, kept = self._shared.pop(request, 0), max(request.num_computed + granted, reserve) + self._ahead
            held += self._kv.num_held(request)
            self._free_blocks += blocks_lacking(kept, held, self._block_size)
            self._places += self._view.is_waiting(request)
            self._count(-1, -granted)
        elif request in self._named:
            raise illegal(request, f"{how} twice", "a request is named once in a plan")
        self._named.add(request)


def whole_number(value: int, name: str, request: Request) -> int:
    if type(value) is int and value >= 0:  # nearly always
        return value
    with suppress(TypeError):
        if (whole := index(value)) >= 0:
            return whole
    raise illegal(request, f"{name}={value!r}", "token counts are whole numbers, at least 0")


def check_numbers(request: Request, **values: object) -> None:
    """Raises PlanError for what cannot be compared with a number of tokens, such as a text; None is no number given."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Real):
            raise illegal(request, f"{name}={value!r}", "token counts are whole numbers, at least 0")


def illegal(request: Request, problem: str, rule: str) -> PlanError:
    return PlanError(f"request {request.id}: illegal plan ({problem}); rule: {rule}")
