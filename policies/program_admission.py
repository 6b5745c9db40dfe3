"""Admits programs (sessions), not requests: the rules of ThunderAgent and of CONCUR (arXiv 2601.22705).

Requests of active programs are served in the order of the programs' admission, those of others are held back. What runs goes on. Every
`period` seconds a rule decides which are active:

    aimd     CONCUR: at most `width`, the earliest; one more after a good period, half after a congested one
    thunder  ThunderAgent: those whose tokens fit into `limit` of the KV cache; programs in a pause are held back first

Both are from secondary notes, completed freely: docs/policies/program_admission.md. If the KV cache is full, the newest request is preempted.
"""

from collections.abc import Iterator
from itertools import chain
from math import inf

from cbatch import ConfigError, Plan, Request, View, is_steady
from policies.chunking import ChunkSelector
from policies.sarathi_serve import SarathiServe
from policies.shared.admission import Admission, Aimd, Program, Thunder
from policies.shared.programs import OpenPrograms


class ProgramAdmission(SarathiServe):
    depends_on = ("sessions",)

    @property
    def steady(self) -> bool:
        return is_steady(self.chunking) and self.programs.is_steady

    def __init__(
        self,
        chunking: ChunkSelector,
        rule: str = "aimd",
        period: float = 5.0,
        limit: float = 0.9,
        least_found: float = 0.5,
        width: int = 8,
    ) -> None:
        """least_found: share of the prompts of later turns; 0 if there is no prefix cache. width: programs at first, of `aimd`."""
        super().__init__(chunking)
        if rule not in ("aimd", "thunder") or not 0 < period < inf:
            raise ConfigError(f"policy: need {rule=} in aimd, thunder, and a finite {period=} > 0")
        self.rule, self.period, self.limit, self.least_found, self.width = rule, period, limit, least_found, width
        self.programs: Admission = Aimd(limit, least_found, width) if rule == "aimd" else Thunder(limit)
        self._next, self._preempted, self._found, self._asked, self._open = period, False, 0, 0, OpenPrograms()
        self._newcomers = list[tuple[Request, Program, int]]()  # of the last plan, with the tokens found of each

    def plan(self, view: View) -> Plan:
        for request, program, found in self._newcomers:
            if request.admitted_at is not None and not view.is_waiting(request):  # as planned
                program.waiting.pop(request, None)
                if request.turn:
                    self._found, self._asked = self._found + found, self._asked + request.num_prompt_tokens
        if view.now >= self._next:
            share = self._found / self._asked if self._asked else 1.0
            self.programs.decide(view, share, self._preempted)
            self._next, self._preempted, self._found, self._asked = view.now + self.period, False, 0, 0
        self.programs.fill(view)
        plan = super().plan(view)
        waiting = filter(view.is_waiting, plan.requests)
        self._newcomers = [(request, self.programs.of(request), request.num_computed) for request in waiting]
        self._preempted |= bool(plan.preempt)
        plan.wake_at = self._next
        return plan

    def prompts(self, view: View) -> Iterator[Request]:
        waiting = (program.waiting for program in self.programs.active.values())
        return chain(view.prefilling, filter(view.is_waiting, chain.from_iterable(waiting)))

    def on_arrival(self, request: Request) -> None:
        self._open.arrive(request)
        self.programs.note(self.programs.of(request), 1, request.num_prompt_tokens)

    def on_wait(self, request: Request) -> None:
        program = self.programs.of(request)
        program.waiting[request] = None
        self.programs.note(program, 0, program.tokens)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        program = self.programs.of(request)
        program.waiting.pop(request, None)
        self.programs.note(program, -1, request.num_prompt_tokens + request.num_output_tokens)
        if self._open.finish(request) or (not program.num_open and request.last is None):
            self.programs.end(program)
