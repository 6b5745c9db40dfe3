"""A second host for policies: a view over plain Python objects, with nothing of the engine behind it."""

from collections.abc import Iterable

from cbatch import KVView, Request, View
from cbatch.kv import Freed
from cbatch.request import spec_of


class PlainRequest(Request):
    """A request with plain attributes for counters."""

    __slots__ = ("computed", "held", "in_flight", "known", "ready", "total")

    computed: int
    held: int
    in_flight: bool
    known: int
    ready: int
    total: int

    @property
    def num_known(self) -> int:
        return self.known

    @property
    def num_tokens(self) -> int:
        return self.total

    @property
    def num_computed(self) -> int:
        return self.computed

    @property
    def num_ready(self) -> int:
        return self.ready


class PlainKVView(KVView):
    def __init__(self, kv: KVView) -> None:
        self._block_size, self._num_blocks = kv.block_size, kv.num_blocks
        self._num_free, self._num_retiring = kv.num_free, kv.num_retiring

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_retiring(self) -> int:
        return self._num_retiring

    def num_held(self, request: Request) -> int:
        return request.held if isinstance(request, PlainRequest) else 0

    def freed_by_preempting(self, request: Request) -> Freed:
        held = self.num_held(request)
        return Freed(0, held) if isinstance(request, PlainRequest) and request.in_flight else Freed(held, 0)


class PlainView(View):
    def __init__(self, view: View, host: "PlainHost") -> None:
        self.now, self.limits, self.kv, self.cost = view.now, view.limits, PlainKVView(view.kv), view.cost
        self.waiting, self.running = host.copies(view.waiting, view), host.copies(view.running, view)
        self.decoding, self.prefilling = host.copies(view.decoding, view), host.copies(view.prefilling, view)
        self._iteration, self._num_in_flight = view.iteration, view.num_in_flight
        self._predicted_end = view.predicted_end

    @property
    def iteration(self) -> int:
        return self._iteration

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def predicted_end(self) -> float:
        return self._predicted_end

    def is_in_flight(self, request: Request) -> bool:
        return isinstance(request, PlainRequest) and request.in_flight

    def is_waiting(self, request: Request) -> bool:
        return request in self.waiting


class PlainHost:
    """Keeps one plain copy of each request, so that a policy may remember it from view to view."""

    def __init__(self) -> None:
        self.by_id: dict[int, PlainRequest] = {}

    def look(self, view: View) -> PlainView:
        return PlainView(view, self)

    def copies(self, requests: Iterable[Request], view: View) -> list[Request]:
        return [self.copy(request, view) for request in requests]

    def copy(self, request: Request, view: View | None = None) -> PlainRequest:
        copy = self.by_id.setdefault(request.id, PlainRequest.from_spec(spec_of(request)))
        copy.status, copy.num_output_tokens = request.status, request.num_output_tokens
        copy.known, copy.total, copy.computed = request.num_known, request.num_tokens, request.num_computed
        copy.token_times = (request.first_token_at, request.last_token_at)  # type: ignore[assignment]
        copy.ready, copy.num_preemptions = request.num_ready, request.num_preemptions
        copy.held = 0 if view is None else view.kv.num_held(request)
        copy.in_flight = view is not None and view.is_in_flight(request)
        return copy
