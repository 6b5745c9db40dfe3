"""Shortest predicted remaining output first, limited preemption: TRAIL (Shahout et al., ICLR 2025, arXiv 2410.01035).

A waiting request may replace the running request with the most predicted output left, unless that request has generated
more than a share `c` of its first prediction. c = 0 preempts only before the first token; c = inf is SRPT (`policy=srpt`).
Victims are recomputed.

Source: the authors' patch of SGLang (harvard-cns/TRAIL-llm-scheduling); the paper's body was not read. The paper has c = 0.8,
the default here and in the patch; the authors' launch script sets 0. Differences: prompts are chunked within Sarathi-Serve's
budget; if the KV cache is full, the newest running request is preempted (SGLang drops the request with the fewest output
tokens). Ties among victims: the newest admitted.
"""

from collections.abc import Iterable
from math import inf

from cbatch import ConfigError, Plan, PlanBuilder, Request, View, is_steady
from policies.chunking import ChunkSelector
from policies.predictors import Predictor
from policies.sarathi_serve import SarathiServe
from policies.shared.waiting import WaitingQueue


class Trail(SarathiServe):
    steady = False  # set by each plan: True only if no request waits

    def __init__(self, chunking: ChunkSelector, predictor: Predictor, c: float = 0.8, margin: float = 0.0) -> None:
        """margin: tokens by which a victim's predicted remaining output must exceed the newcomer's."""
        super().__init__(chunking)
        for name, value, unit in (("c", c, "a share of the first prediction"), ("margin", margin, "tokens")):
            if not value >= 0:
                raise ConfigError(f"policy.{name}={value}: give {unit}, at least 0")
        self.predictor, self.c, self.margin = predictor, c, margin
        self._first: dict[Request, float] = {}  # prediction at arrival
        self._queue = WaitingQueue(predictor.remaining)

    def on_arrival(self, request: Request) -> None:
        self._first[request] = self.predictor.output(request)

    def on_wait(self, request: Request) -> None:
        self._queue.push(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self.predictor.observe(request)
        self._first.pop(request, None)

    def plan(self, view: View) -> Plan:
        plan, self.steady = view.plan(), not view.waiting and is_steady(self.chunking)
        newcomers = self._newcomers(plan, view)
        prefilling = [request for request in view.prefilling if request not in plan.plan.preempt]
        self.fill(plan, view, [*prefilling, *newcomers])
        self._queue.push(*newcomers)  # of which those that still wait stay
        return plan.build()

    def _newcomers(self, plan: PlanBuilder, view: View) -> list[Request]:
        """Returns queued requests that get a free place, or the place of a running request, which is preempted."""
        newcomers: list[Request] = []
        places, victims = view.num_places, None
        for request in self._queue.in_order(view):
            if len(newcomers) >= places:
                if victims is None:
                    victims = sorted(self._preemptible(view))
                if not victims or victims[-1][0] <= self.predictor.remaining(request) + self.margin:
                    break
                plan.preempt(victims.pop()[-1])
            newcomers.append(request)
        return newcomers

    def _preemptible(self, view: View) -> Iterable[tuple[float, int, Request]]:
        for place, request in enumerate(view.running):
            if request.num_new_tokens <= self.c * self._first[request]:
                yield self.predictor.remaining(request), place, request


class Srpt(Trail):
    """Preempts at any time: c = inf."""

    steady = False  # set by each plan, as in Trail

    def __init__(self, chunking: ChunkSelector, predictor: Predictor, c: float = inf, margin: float = 0.0) -> None:
        super().__init__(chunking, predictor, c, margin)
