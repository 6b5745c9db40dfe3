"""Virtual Token Counter: fair shares among clients (Sheng et al., OSDI 2024, arXiv 2401.00588, algorithm 2).

A client's counter holds the service that it received, over its weight: prompt tokens at admission and output tokens as
they come. A free place goes to the oldest request of the waiting client with the smallest counter; if that does not
fit, nothing is admitted. A client that waits again after a pause is lifted to the smallest counter among the waiting
ones, or to that of the client that left the queue last, so that a pause earns no credit.

Running requests are never preempted: their limit is reserved at admission. Clients without a name are one client. Ties:
the client that arrived first. Source: the paper's algorithm from secondary notes, the code (Ying1123/VTC-artifact)
directly. Differs from that code: it looks for admissions every 10 decode steps only, computes prompts apart, and does
not charge first tokens.
"""

from collections import defaultdict, deque

from cbatch import ConfigError, Plan, Request, View
from policies.predictors import Predictor


class VTC:
    def __init__(
        self,
        predictor: Predictor,
        lift: bool = True,
        predict: bool = False,
        weights: dict[str, float] | None = None,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        charge_first: bool = True,
    ) -> None:
        """
        Args:
            lift: False is "least counter first". predict: charge the predicted output at admission, the rest as it
                comes.
            weights: of clients by name; 1 for others. charge_first: charge first output tokens, as the paper's
                definition does.
        """
        self.weights = weights or {}
        if min([prompt_weight, output_weight, *self.weights.values()], default=1.0) <= 0:
            raise ConfigError(f"policy.weights={self.weights}, {prompt_weight=}, {output_weight=}: weights are above 0")
        self.predictor, self.lift, self.predict, self.charge_first = predictor, lift, predict, charge_first
        self.prompt_weight, self.output_weight = prompt_weight, output_weight
        self.counters: dict[str | None, float] = {}
        self._arrived: list[Request] = []  # since the last plan
        self._waiting: dict[str | None, deque[Request]] = defaultdict(deque)
        self._paid: dict[Request, float] = {}  # output tokens that were charged for, of running requests
        self._left_last: str | None = None

    def plan(self, view: View) -> Plan:
        for request in view.running:
            self._charge_output(request, max(request.num_new_tokens - (not self.charge_first), self._paid[request]))
        self._enqueue()
        plan = view.plan()
        plan.add_decodes()
        while plan.can_admit and (waiting := [client for client in self.counters if self._waiting[client]]):
            client = min(waiting, key=lambda client: self.counters[client])
            request = self._waiting[client][0]
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
            self._left_last = self._waiting[client].popleft().client
            self.counters[client] += (
                self.prompt_weight * request.num_prompt_tokens / self.weights.get(client or "", 1.0)
            )
            self._paid[request] = 0.0
            self._charge_output(request, self.predictor.output(request) if self.predict else 0.0)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        self._arrived.append(request)

    def on_finish(self, request: Request) -> None:
        self.predictor.observe(request)
        self._charge_output(request, request.num_output_tokens - (not self.charge_first))
        del self._paid[request]

    def _enqueue(self) -> None:
        """Arrivals enter the queue once the tokens generated before them are charged."""
        for request in self._arrived:
            client = request.client
            others = [counter for other, counter in self.counters.items() if self._waiting[other]]
            floor = min(others) if others else self.counters.get(self._left_last, 0.0)
            counter = self.counters.setdefault(client, 0.0)
            if self.lift and not self._waiting[client]:
                self.counters[client] = max(counter, floor)
            self._waiting[client].append(request)
        self._arrived.clear()

    def _charge_output(self, request: Request, tokens: float) -> None:
        """Charge what is new of this many output tokens; refund where fewer came than were predicted."""
        weight = self.weights.get(request.client or "", 1.0)
        self.counters[request.client] += self.output_weight * (tokens - self._paid[request]) / weight
        self._paid[request] = tokens
