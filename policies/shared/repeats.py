"""What a policy misses while a plan of decodes is repeated without it (`Policy.steady`), for policies that count service."""

from collections.abc import Callable, Sequence

from cbatch import BatchShape, Plan, Request, View
from policies.shared.step_times import shape_of


class Repeats:
    """Charges the service of plans, and at the next plan that of their newcomers and repeats. Arrivals and ends come after all of them."""

    def __init__(self, charge: Callable[[Request, float, bool], None]) -> None:
        """charge: called for each request with predicted seconds, and whether it gets a token."""
        self._charge = charge
        self._events = list[tuple[Callable[[Request], object], Request]]()  # since the latest plan
        self._iteration, self._shape, self._requests = 0, BatchShape(), list[Request]()  # of the latest plan, if steady
        self._newcomers = list[tuple[Request, float, bool]]()  # of the latest plan; vLLM may not admit them

    def defer(self, note: Callable[[Request], object], request: Request) -> None:
        """Calls `note` at the next plan."""
        self._events.append((note, request))

    def charge(self, plan: Plan, view: View) -> BatchShape:
        """Charges a plan. Returns its shape."""
        self._iteration, self._shape = view.iteration, shape_of(plan)
        seconds = view.cost.predict(self._shape) if plan.requests else 0.0
        for request, num_tokens in plan:
            service = request, seconds, num_tokens == request.num_ready
            if view.is_waiting(request):
                self._newcomers.append(service)
            else:
                self._charge(*service)
        return self._shape

    def expect(self, requests: Sequence[Request]) -> None:
        """Notes which requests the plan decodes if it may be repeated; none: it is not."""
        self._requests = [*requests]

    def catch_up(self, view: View) -> None:
        """Charges newcomers that were admitted and each repeat, then notes the events."""
        for request, seconds, samples in self._newcomers:
            if request.admitted_at is not None and not view.is_waiting(request):
                self._charge(request, seconds, samples)
        self._newcomers.clear()
        number, shape = len(self._requests), self._shape
        for repeat in range(1, view.iteration - self._iteration if number else 0):
            seconds = view.cost.predict(shape._replace(decode_context=shape.decode_context + repeat * number))
            for request in self._requests:
                self._charge(request, seconds, True)
        for note, request in self._events:
            note(request)
        self._events.clear()
