"""Which programs (sessions) are active: the requests of others are held back. Two rules, from secondary notes of ThunderAgent and CONCUR."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cbatch import ConfigError, Request, View
from policies.shared.programs import program_of


@dataclass(eq=False)
class Program:
    """number: in the order of first arrivals. tokens: of its latest request. num_open: requests that have arrived and not ended, of which
    `waiting` wait.
    """

    key: Hashable
    number: int
    tokens: int = 0
    num_open: int = 0
    waiting: dict[Request, None] = field(default_factory=dict)


class Admission(ABC):
    """active: programs by key, in the order of their admission. held: the others."""

    def __init__(self, limit: float) -> None:
        """limit: share of the KV cache."""
        if not 0 < limit <= 1:
            raise ConfigError(f"policy: need 0 < {limit=} <= 1")
        self.limit = limit
        self.active: dict[Hashable, Program] = {}
        self.held: dict[Hashable, Program] = {}
        self._num_programs = 0

    def of(self, request: Request) -> Program:
        """Returns the program of a request. A new one is held."""
        key = program_of(request)
        if (known := self.active.get(key) or self.held.get(key)) is None:
            self._num_programs += 1
            self.held[key] = known = Program(key, self._num_programs)
        return known

    def note(self, program: Program, opened: int, tokens: int) -> None:
        """Called when a request of the program, of these tokens, has arrived (1), ended (-1) or begun to wait (0)."""
        program.num_open, program.tokens = program.num_open + opened, tokens

    def end(self, program: Program) -> None:
        self.active.pop(program.key, None)
        self.held.pop(program.key, None)

    @property
    def is_steady(self) -> bool:
        """Returns whether `fill` admits no more programs as time passes."""
        return True

    @abstractmethod
    def fill(self, view: View) -> None:
        """Admits programs."""

    @abstractmethod
    def decide(self, view: View, found: float, preempted: bool) -> None:
        """Called once a period. found: share of the prompts of later turns that the cache held. preempted: whether any request was."""


class Aimd(Admission):
    """CONCUR (arXiv 2601.22705): the earliest `width` programs are active; one more after a good period, half of them after a congested one.

    Congested: the KV cache is held beyond `limit`, a request was preempted, or later turns found less than `least_found` of their prompts.
    """

    def __init__(self, limit: float, least_found: float, width: int) -> None:
        super().__init__(limit)
        if not (0 <= least_found <= 1 and width >= 1):
            raise ConfigError(f"policy: need 0 <= {least_found=} <= 1 and {width=} >= 1")
        self.least_found, self.width = least_found, width

    def fill(self, view: View) -> None:
        while self.held and len(self.active) < self.width:
            key = next(iter(self.held))
            self.active[key] = self.held.pop(key)

    def decide(self, view: View, found: float, preempted: bool) -> None:
        is_full = view.kv.num_free < (1 - self.limit) * view.kv.num_blocks
        if not (is_full or preempted or found < self.least_found):
            self.width += bool(self.held)
            return
        self.width = max(min(self.width, len(self.active)) // 2, 1)
        kept = sorted(self.active.values(), key=lambda program: program.number)
        self.active = {program.key: program for program in kept[: self.width]}
        self.held = {program.key: program for program in kept[self.width :]} | self.held


class Thunder(Admission):
    """ThunderAgent: the tokens of active programs, and those of paused ones, halved each second, are within `limit`.

    Above it as many programs are held as hold the excess, those in a pause first, then the smallest. Those with a waiting request come back first, then the smallest.
    """

    def __init__(self, limit: float) -> None:
        super().__init__(limit)
        self._paused: dict[Hashable, float] = {}  # when
        self._order: list[
            tuple[bool, int, int, Hashable]
        ] = []  # held programs; an entry unlike its program does not count

    @property
    def is_steady(self) -> bool:
        return not (self._paused and self._order)

    def note(self, program: Program, opened: int, tokens: int) -> None:
        super().note(program, opened, tokens)
        if program.key in self.held:
            heappush(self._order, self._entry(program))

    def fill(self, view: View) -> None:
        limit, used = self.limit * view.kv.num_tokens, self._used(view)
        while self._order:
            *_, key = entry = self._order[0]
            program = self.held.get(key)
            if program is not None and entry == self._entry(program):
                used += program.tokens - self._weight(program, view)
                if used > limit and not self._is_idle(view):
                    return
                self.active[key] = self.held.pop(key)
                self._paused.pop(key, None)
            heappop(self._order)

    def decide(self, view: View, found: float, preempted: bool) -> None:
        rank = sorted(self.active.values(), key=lambda program: (program.num_open > 0, program.tokens, program.number))
        used = self._used(view)
        for program in rank[:-1]:
            if used <= self.limit * view.kv.num_tokens:
                break
            used -= program.tokens
            self.held[program.key] = self.active.pop(program.key)
            self._paused[program.key] = view.now
            heappush(self._order, self._entry(program))

    def _used(self, view: View) -> float:
        for key in [key for key in self._paused if key not in self.held or self._weight(self.held[key], view) < 1]:
            del self._paused[key]
        return sum(program.tokens for program in self.active.values()) + sum(
            self._weight(self.held[key], view) for key in self._paused
        )

    def _weight(self, program: Program, view: View) -> float:
        since = self._paused.get(program.key)
        return 0.0 if since is None else program.tokens * 2.0 ** (since - view.now)

    def _is_idle(self, view: View) -> bool:
        return not (view.running or view.num_in_flight or any(program.waiting for program in self.active.values()))

    @staticmethod
    def _entry(program: Program) -> tuple[bool, int, int, Hashable]:
        return not program.waiting, program.tokens, program.number, program.key
