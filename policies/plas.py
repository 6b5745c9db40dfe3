"""Least attained service of programs: PLAS and ATLAS of Autellix (Luo et al., arXiv 2502.13965), pausing and recomputing.

A program is a session. A call (a request) joins the queue whose range holds the seconds of service that its program has attained, over
all ended calls (PLAS) or along the longest chain of calls that it follows (ATLAS, `policy=atlas`). Served for the width of that range, it
moves to the tail of the next queue. An iteration takes the first calls of the first queues; others pause (give `max_running` above
`batch`), or are preempted, the last first, if the KV cache is full. A call whose program has waited `beta` times as long as it was served
moves to the first queue. Source: the paper's text; ATLAS from secondary notes. Differences: docs/policies/plas.md.
"""

from collections.abc import Sequence
from itertools import filterfalse, islice
from math import inf

from cbatch import Plan, Refusal, Request, View, is_steady
from policies.chunking import ChunkSelector
from policies.sarathi_serve import SarathiServe
from policies.shared.attained import AttainedQueues, Program
from policies.shared.repeats import Repeats
from policies.shared.waiting import WaitingQueue


class Plas(SarathiServe):
    depends_on: tuple[str, ...] = ("sessions", "places")
    steady = False  # set by each plan: True if it decodes all requests, and in the order of the next plan

    def __init__(
        self, chunking: ChunkSelector, thresholds: Sequence[float] = (2.0, 8.0, 32.0), beta: float = 10.0
    ) -> None:
        """thresholds: seconds at which the ranges of the second and the further queues begin. beta: .inf: no promotion."""
        super().__init__(chunking)
        self.thresholds, self.beta, self._queues = [*thresholds], beta, AttainedQueues(thresholds, beta)
        self._waiting, self._repeats = WaitingQueue(self._queues.place), Repeats(self._queues.charge)

    def plan(self, view: View) -> Plan:
        self._repeats.catch_up(view)
        self._waiting.push(*self._queues.promote(view.now))
        plan, batch = view.plan(), view.limits.max_batch
        newcomers = [*islice(self._waiting.in_order(view), min(view.num_places, batch))]
        first = sorted([*view.running, *newcomers], key=self._queues.place)[:batch]
        for request in filter(view.decoding.__contains__, first):
            self._waiting.add_by_preempting(request, plan, view)
        budget = min(self.chunking.num_tokens(view, plan.num_tokens), plan.tokens_left)
        for request in filterfalse(view.decoding.__contains__, first):
            chunk = min(budget, request.num_ready)
            self._waiting.add_by_preempting(request, plan, view, chunk, reserve=request.num_tokens)
            if plan.refusal in (Refusal.NONE_ASKED, Refusal.BLOCKS):
                break
            budget -= chunk if plan.refusal is None else 0
        plan.add_decodes()
        granted, shape = plan.plan.requests, self._repeats.charge(plan.plan, view)
        self._waiting.push(*newcomers)  # of which those that still wait stay
        decodes_all = 0 < shape.num_decodes == len(granted) == len(view.running) and not view.waiting
        self.steady = decodes_all and is_steady(self.chunking) and granted == sorted(granted, key=self._queues.place)
        self._repeats.expect(granted if self.steady else ())
        return plan.build(wake_at=self._queues.next_change(view.now, granted) if self.steady else inf)

    def on_arrival(self, request: Request) -> None:
        self._repeats.defer(self._join, request)

    def on_wait(self, request: Request) -> None:
        self._waiting.push(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self._repeats.defer(self._queues.leave, request)

    def _join(self, request: Request) -> None:
        self._queues.join(request, self.attained)

    def attained(self, program: Program, request: Request) -> float:
        """Returns the seconds of service that a new call's program has attained."""
        return program.served


class Atlas(Plas):
    """The longest chain of service before a call, not the sum over its program."""

    steady = False  # set by each plan

    def attained(self, program: Program, request: Request) -> float:
        return max((program.chains.get(parent, 0.0) for parent in request.follows), default=0.0)
