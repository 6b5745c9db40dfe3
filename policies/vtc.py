"""Virtual Token Counter: fair shares among clients (Sheng et al., OSDI 2024, arXiv 2401.00588, algorithm 2).

A client's counter holds the client's received service divided by its weight: prompt tokens count at admission, output tokens
when generated. A free place goes to the request whose turn it is; if that request does not fit, none is admitted.

    order   vtc   the oldest request of the waiting client with the smallest counter, lifted after a pause (`lift=false`: LCF)
            mdrr  the oldest request of a client while the client's `quantum` lasts, then of the next client; the artifact's quantum is KV tokens / 20
            fcfs  the oldest request; with `rpm`, the paper's baseline RPM
Running requests are never preempted: their limit is reserved at admission. Ties: the client that arrived first. Source: the
paper's algorithm from secondary notes, the code (Ying1123/VTC-artifact) directly. Differences: docs/policies/vtc.md.
"""

from math import inf

from cbatch import ConfigError, Plan, Request, View, WholePrompts
from policies.predictors import Predictor
from policies.shared.clients import RateLimit, clients_by


class VTC(WholePrompts):
    depends_on = ("clients",)
    steady = False  # set by each plan: True if no request waits and sums of charges do not depend on their grouping

    def __init__(
        self,
        predictor: Predictor,
        lift: bool = True,
        predict: bool = False,
        weights: dict[str, float] | None = None,
        prompt_weight: float = 1.0,
        output_weight: float = 2.0,
        charge_first: bool = True,
        charge_hits: bool = True,
        order: str = "vtc",
        quantum: float = 500.0,
        rpm: int | None = None,
    ) -> None:
        """predict: charge the predicted output at admission, and the rest when generated. weights: weights of clients by name; default 1.
        charge_first: charge first output tokens, as in the paper. charge_hits: charge prompt tokens that the prefix cache holds.
        rpm: most requests accepted per client within 60 s; None: all.
        """
        all_weights = (prompt_weight, output_weight, *(weights or {}).values())
        if not all(isinstance(each, int | float) and each is not True and 0 < each < inf for each in all_weights):
            raise ConfigError(f"policy.{weights=}, {prompt_weight=}, {output_weight=}: weights must be finite, above 0")
        self.predictor, self.predict, self.charge_hits = predictor, predict, charge_hits
        self.prompt_weight, self.output_weight, self.charge_first = prompt_weight, output_weight, charge_first
        self.lift, self.weights, self.order, self.quantum, self.rpm = lift, weights or None, order, quantum, rpm
        self._clients, self._limit = clients_by(order, weights or {}, lift, quantum), RateLimit(rpm)
        self._exact = not (weights or predict) and all(float(value).is_integer() for value in (*all_weights, quantum))
        self.counters = self._clients.counters
        self._begun, self._refused = list[Request](), set[Request]()  # to wait, since the last plan; beyond `rpm`
        self._prompts: dict[Request, float] = {}  # charged service of the prompts of admitted requests
        self._paid: dict[Request, float] = {}  # charged output tokens of admitted requests

    def plan(self, view: View) -> Plan:
        for request in view.running:
            if request not in self._paid:  # admitted by vLLM, not by this policy
                self._admit(request, request.num_prompt_tokens - request.num_cached_tokens)
            self._charge_output(request, max(self._counted(request.num_new_tokens), self._paid[request]))
        plan, self.steady = view.plan(), self._exact and not view.waiting
        # new requests enter the queue once the tokens generated before their arrival are charged
        for request in filter(view.is_waiting, self._begun):
            if request in self._refused:
                plan.reject(request, f"more than {self.rpm} requests of client {request.client} in 60 s")
            else:
                self._clients.push(request, again=self._refund(request))
        self._begun.clear()
        plan.add_decodes()
        while plan.can_admit and (new := self._clients.first()) and plan.add(new, whole=True, reserve=new.max_tokens):
            self._admit(new, new.num_ready)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        if not self._limit.accepts(request):
            self._refused.add(request)

    def on_wait(self, request: Request) -> None:
        self._begun.append(request)

    def on_finish(self, request: Request) -> None:
        self._clients.discard(request)
        self._refused.discard(request)
        self._refund(request)
        if self._prompts.pop(request, None) is not None:
            self.predictor.observe(request)
            self._charge_output(request, self._counted(request.num_output_tokens))
            del self._paid[request]

    def _admit(self, request: Request, missing: int) -> None:
        """Charges a request at its first admission. missing: prompt tokens that the prefix cache does not hold."""
        self._clients.take(request)
        if request not in self._prompts:
            tokens = request.num_prompt_tokens if self.charge_hits else missing
            self._prompts[request] = self.prompt_weight * tokens
            self._clients.charge(request.client, self._prompts[request])
            self._charge_output(request, self.predictor.output(request) if self.predict else 0.0)

    def _refund(self, request: Request) -> bool:
        """Takes back what a request was charged that was planned, and never admitted. Returns whether it was planned before."""
        if request not in self._prompts:
            return False
        if request.admitted_at is None:
            self._charge_output(request, 0.0)
            self._clients.charge(request.client, -self._prompts.pop(request))
            del self._paid[request]
        return True

    def _counted(self, tokens: int) -> int:
        """Returns how many of a request's output tokens are charged."""
        return tokens if self.charge_first else max(tokens - 1, 0)

    def _charge_output(self, request: Request, tokens: float) -> None:
        """Charges the uncharged part of this many output tokens; refunds tokens that were predicted but not generated."""
        self._clients.charge(request.client, self.output_weight * (tokens - self._paid.get(request, 0.0)))
        self._paid[request] = tokens
