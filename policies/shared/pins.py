"""Sarathi-Serve for sessions, some of which are pinned: their cached KV blocks are not given to other sessions.

A pin is a promise of this policy, not of the KV cache: it admits no request that would take pinned blocks. How many free blocks hold the
tokens of pinned sessions is estimated: the tokens of all pins, at most what is cached. An eviction has to choose the same blocks last.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator
from math import inf
from typing import Any, NamedTuple

from cbatch import Plan, PlanBuilder, Request, View
from policies.chunking import ChunkSelector
from policies.pauses import Pauses
from policies.sarathi_serve import SarathiServe
from policies.shared.programs import OpenPrograms, ended_at, ends_program, program_of
from policies.shared.waiting import WaitingQueue


class Pin(NamedTuple):
    """number: in the order of making. num_tokens: in the KV cache. since, until: seconds. pause: predicted seconds; None: unknown.

    to_host: whether host memory should keep the blocks if the pin is given up.
    """

    number: int
    num_tokens: int
    since: float
    until: float
    pause: float | None
    to_host: bool = False


class PinnedSessions(SarathiServe, ABC):
    """Pins a session for `keep` seconds when a turn that is not its last has ended, until its next turn is admitted.

    If a running request lacks a block, or the first waiting one if nothing runs and the times of all pins are over, the pin with the latest
    end goes. Then the newest running request is preempted. Waiting requests are ordered by `rank`; ties: arrival.
    """

    depends_on = ("prefix_cache", "sessions")

    def __init__(self, chunking: ChunkSelector, pauses: Pauses, pins: bool = True) -> None:
        """pauses: learns the pauses of sessions, and predicts them. pins: False: blocks of pinned sessions are given to others."""
        super().__init__(chunking)
        self.pauses, self.pins = pauses, pins
        self.pinned: dict[Hashable, Pin] = {}
        self.first: dict[Hashable, int] = {}  # sessions in the order of their first arrivals
        self.waiting: defaultdict[Hashable, set[Request]] = defaultdict(set)
        self._queue, self._open, self._num_events = WaitingQueue(self.rank), OpenPrograms(), 0
        self._given_up: dict[str, bool] = {}  # since the last plan
        self._used: dict[Request, Pin] = {}  # by requests that the last plan admits

    @abstractmethod
    def keep(self, request: Request) -> float | None:
        """Returns the seconds for which to pin a session, of whose requests this one has ended; None: not at all."""

    def rank(self, request: Request) -> Any:
        return self.first[program_of(request)]

    def lapse(self, view: View) -> None:
        """Ends pins before a plan."""

    def plan(self, view: View) -> Plan:
        self._used.clear()
        self.lapse(view)
        plan = view.plan()
        missing = view.ready_decodes(plan.rows_left)[1]
        while self.pinned and missing > plan.free_blocks - self._num_blocks(view):
            self._unpin_latest()
        self.fill(plan, view, self._in_order(plan, view))
        plan.plan.give_up, self._given_up = self._given_up, {}
        ends = [pin.until for pin in self.pinned.values() if pin.until > view.now]
        built = plan.build(wake_at=min(ends, default=inf))
        built.least_free = self._num_blocks(view)
        return built

    def on_arrival(self, request: Request) -> None:
        self.pauses.note_arrival(request)
        self._open.arrive(request)
        self._num_events += 1
        self.first.setdefault(program_of(request), self._num_events)

    def on_wait(self, request: Request) -> None:
        program = program_of(request)
        if (pin := self._used.pop(request, None)) is not None:  # planned, and not admitted
            self.pinned.setdefault(program, pin)
        self.waiting[program].add(request)
        self._queue.push(*self.waiting[program])

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        program, now = program_of(request), ended_at(request)
        self._leave(request)
        if self._open.finish(request):
            self.unpin(program)
            del self.first[program]
        elif not ends_program(request) and (seconds := self.keep(request)) is not None:
            self._num_events += 1
            tokens = request.num_prompt_tokens + request.num_output_tokens - 1
            self.pinned[program] = Pin(self._num_events, tokens, now, now + seconds, self.pauses.mean(request))
            self._queue.push(*self.waiting.get(program, ()))
        self.pauses.note_end(request, now)

    def unpin(self, program: Hashable) -> None:
        if self.pinned.pop(program, None) is not None:
            self._queue.push(*self.waiting.get(program, ()))

    def give_up(self, program: Hashable) -> None:
        """Ends a pin before the session's next turn is admitted, and tells the eviction (`Plan.give_up`)."""
        self._given_up[str(program)] = self.pinned[program].to_host
        self.unpin(program)

    def _in_order(self, plan: PlanBuilder, view: View) -> Iterator[Request]:
        """Yields prompts under way, then waiting requests as long as they take no pinned blocks."""
        yield from view.prefilling
        for request in self._queue.in_order(view):
            program, needed = program_of(request), view.kv.num_lacking(request, request.num_tokens)
            while needed > plan.free_blocks - self._num_blocks(view, but=program):
                busy = plan.num_requests or view.num_in_flight
                if busy or any(pin.until > view.now for pin in self.pinned.values()) or not self._unpin_latest(program):
                    return
            yield request
            self._leave(request)  # reached only if the plan admits the request
            if program in self.pinned:
                self._used[request] = self.pinned[program]
            self.unpin(program)

    def _num_blocks(self, view: View, but: Hashable = None) -> int:
        """Returns the free blocks that sessions other than `but` have pinned."""
        if not self.pins:
            return 0
        tokens = (pin.num_tokens for program, pin in self.pinned.items() if program != but)
        return min(sum(number // view.kv.block_size for number in tokens), view.kv.num_cached)

    def _unpin_latest(self, but: Hashable = None) -> bool:
        """Ends the pin with the latest end, other than `but`. Returns False if there is none."""
        others = [(pin.until, pin.number, program) for program, pin in self.pinned.items() if program != but]
        if others:
            self.give_up(max(others)[-1])
        return bool(others)

    def _leave(self, request: Request) -> None:
        program = program_of(request)
        self.waiting[program].discard(request)
        if not self.waiting[program]:
            del self.waiting[program]
