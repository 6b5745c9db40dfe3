"""What a policy sees of the host that serves its requests.

`View` and `KVView` (`kv_view`) are abstract: `engine_view` implements them over this package's engine; another serving system can
implement them over its own state, and the same policies run there.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from itertools import islice

from cbatch.cost import CostModel
from cbatch.kv_view import KVView
from cbatch.limits import Limits
from cbatch.plan_builder import PlanBuilder
from cbatch.request import Request, Requests


class View(ABC):
    """What a policy may look at: the host's state as it is now, without copies. The host updates the attributes.

    now: seconds since the start of the run.
    limits, kv: capacity. cost: predicts the seconds of an iteration of a given shape.
    waiting: requests that have arrived and hold nothing, in arrival order; preempted ones are among them.
    running: admitted requests with tokens left to compute, in admission order.
    decoding: those of `running` that have only their newest token left to compute.
    prefilling: those of `running` with prompt tokens (after a preemption, prompt and output) left.
    """

    now: float
    limits: Limits
    kv: KVView
    cost: CostModel
    waiting: Sequence[Request]
    running: Requests
    decoding: Requests
    prefilling: Requests

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The number of the iteration being planned."""

    @property
    @abstractmethod
    def num_in_flight(self) -> int:
        """Iterations launched and not yet ended."""

    @property
    @abstractmethod
    def predicted_end(self) -> float:
        """Seconds: when the iterations in flight are predicted (by `cost`) to have ended; `now` if there are none."""

    @abstractmethod
    def is_in_flight(self, request: Request) -> bool:
        """Whether an iteration in flight computes tokens of this request."""

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

    def plan(self) -> PlanBuilder:
        """A fresh, empty plan for this iteration."""
        return PlanBuilder(self)
