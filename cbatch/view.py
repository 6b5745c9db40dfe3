"""What a policy sees of the host that serves its requests.

`View` and `KVView` (in `resources`) are abstract: `engine_view` implements them over this package's engine; another serving
system can implement them over its own state, and the same policies run there.
"""

from abc import abstractmethod
from collections.abc import Sequence

from cbatch.cost import CostModel
from cbatch.plan_builder import PlanBuilder
from cbatch.request import Request, Requests
from cbatch.resources import Resources


class View(Resources):
    """What a policy may look at: the host's state as it is now, without copies. The host updates the attributes.

    now: seconds since the start of the run.
    limits, kv, running, decoding: see `Resources`. cost: predicts the seconds of an iteration of a given shape.
    waiting: requests that have arrived and hold nothing, in arrival order; preempted ones are among them.
    prefilling: those of `running` with prompt tokens (after a preemption, prompt and output) left.
    """

    now: float
    cost: CostModel
    waiting: Sequence[Request]
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

    def plan(self) -> PlanBuilder:
        """A fresh, empty plan for this iteration."""
        return PlanBuilder(self)
