"""Requests and a KV cache of plain attributes, for parts of policies and views that need no engine."""

from cbatch import KVView, Request
from cbatch.kv import Freed


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
        self.block_size, self.num_blocks = kv.block_size, kv.num_blocks
        self.num_free, self.num_retiring = kv.num_free, kv.num_retiring

    def num_held(self, request: Request) -> int:
        return request.held if isinstance(request, PlainRequest) else 0

    def freed_by_preempting(self, request: Request) -> Freed:
        held = self.num_held(request)
        return Freed(0, held) if isinstance(request, PlainRequest) and request.in_flight else Freed(held, 0)
