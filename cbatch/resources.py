"""What a plan can use of the host that carries it out: KV blocks, places, and the requests that run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from itertools import islice
from typing import NamedTuple

from cbatch.kv import blocks_for, blocks_lacking
from cbatch.limits import Limits
from cbatch.request import Request, Requests


class Freed(NamedTuple):
    """KV blocks that preempting a request frees: now, for the plan being made, and later, after an iteration."""

    now: int
    later: int


class KVView(ABC):
    """The KV cache as a policy sees it. Blocks that come free only when an iteration in flight ends count as taken."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    @abstractmethod
    def num_blocks(self) -> int: ...

    @property
    @abstractmethod
    def num_free(self) -> int: ...

    @property
    @abstractmethod
    def num_retiring(self) -> int:
        """Blocks that come free when the iterations in flight have ended."""

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Blocks that a request holds."""

    @abstractmethod
    def freed_by_preempting(self, request: Request) -> Freed: ...

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def num_lacking(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request needs beyond its own to hold `num_tokens`."""
        return blocks_lacking(num_tokens, self.num_held(request), self.block_size)


class Resources(ABC):
    """The part of a `View` that the plan builder reads.

    limits, kv: of the host.
    running: admitted requests with tokens left to compute, in admission order.
    decoding: those of `running` that have only their newest token left to compute.
    """

    limits: Limits
    kv: KVView
    running: Requests
    decoding: Requests

    @abstractmethod
    def is_waiting(self, request: Request) -> bool: ...

    @property
    def num_places(self) -> int:
        """Waiting requests that can be admitted before one ends or is preempted."""
        return self.limits.max_running - len(self.running)

    def ready_decodes(self, at_most: int, without: Set[Request] = frozenset()) -> tuple[list[Request], int]:
        """The first of `decoding` that have a token ready to compute, and the free blocks that those tokens take.

        without: requests to leave out. The list is not to be changed.
        """
        ready = (request for request in self.decoding if request.num_ready and request not in without)
        requests = list(islice(ready, at_most))
        return requests, sum(self.kv.num_lacking(request, request.num_computed + 1) for request in requests)

    def decode_blocks(self) -> Mapping[Request, int]:
        """Those of `decoding` that have a token ready to compute, and the free blocks that it takes: 0 or 1."""
        ready = (request for request in self.decoding if request.num_ready)
        return {request: self.kv.num_lacking(request, request.num_computed + 1) for request in ready}
