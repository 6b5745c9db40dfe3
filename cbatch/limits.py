"""The resources for a plan: the limits of an iteration, and the host's KV blocks, places and running requests."""

from abc import ABC
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from cbatch.drafts import NO_DRAFTS, Drafts
from cbatch.errors import ConfigError
from cbatch.kv import KVView
from cbatch.request import WAITING, Request, Requests


class _Default(int):
    """A derived `max_running`; `dataclasses.replace` derives it again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that an iteration may hold.

    max_batch: requests in one iteration.
    max_tokens: tokens in one iteration.
    max_request_tokens: tokens of prompt and output of one request (the model's positions).
    tile: tokens per tile of matrix products; a total that is a multiple of the tile wastes no work. 1: unknown.
    graph_sizes: tokens of the mixed iterations to capture graphs for, ascending; empty: chosen by the runtime.
    num_stages: pipeline stages; a token sampled by iteration N can be fed to iteration N + num_stages.
    max_running: requests admitted at once, at least max_batch; 0, the default, means max_batch * num_stages. An admitted
        request that is not in an iteration's batch is paused and keeps its KV blocks.
    max_drafts: draft tokens of one request in one iteration; 0 without a drafter.
    """

    max_batch: int
    max_tokens: int
    max_request_tokens: int
    tile: int = 128
    graph_sizes: tuple[int, ...] = ()
    num_stages: int = 1
    max_running: int = 0
    max_drafts: int = 0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_tokens", "max_request_tokens", "tile", "num_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_running == 0 or isinstance(self.max_running, _Default):
            object.__setattr__(self, "max_running", _Default(self.max_batch * self.num_stages))
        if self.max_running < self.max_batch:
            raise ConfigError(f"max_running={self.max_running} is below max_batch={self.max_batch}; raise it")

    @property
    def max_rows(self) -> int:
        """Returns the most rows of an iteration with real tokens, where each draft is a row of its own."""
        return max(self.max_batch, min(self.max_batch * (1 + self.max_drafts), self.max_tokens))


class Resources(ABC):
    """The part of a `View` that the plan builder reads.

    running: admitted requests with tokens left to compute, in admission order.
    decoding: requests of `running` that have only their newest token left to compute.
    drafts: speculation; without a drafter `NO_DRAFTS`.
    """

    limits: Limits
    kv: KVView
    running: Requests
    decoding: Requests
    drafts: Drafts = NO_DRAFTS

    def is_waiting(self, request: Request) -> bool:
        return request.status is WAITING

    @property
    def num_places(self) -> int:
        """Returns the number of waiting requests that can be admitted before a request ends or is preempted."""
        return self.limits.max_running - len(self.running)

    def ready_decodes(self, at_most: int, without: Set[Request] = frozenset()) -> tuple[list[Request], int]:
        """Returns the first `at_most` requests of `decoding` with a ready token, and the free blocks that these tokens take.

        without: requests to leave out. Callers must not modify the list.
        """
        ready = (request for request in self.decoding if request.num_ready and request not in without)
        requests = list(islice(ready, at_most))
        return requests, sum(self.kv.num_lacking(request, request.num_computed + 1) for request in requests)

    def num_lacking(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> int:
        """Returns the free blocks that so many further tokens of running requests take together."""
        pairs = zip(requests, num_tokens, strict=True)
        return sum(self.kv.num_lacking(request, request.num_computed + number) for request, number in pairs)

    def decode_blocks(self) -> Mapping[Request, int]:
        """Returns the requests of `decoding` with a ready token, and the free blocks that the token takes."""
        ready = (request for request in self.decoding if request.num_ready)
        return {request: self.kv.num_lacking(request, request.num_computed + 1) for request in ready}
