"""The schedule of a recorded run: what each request does in each iteration."""

from collections.abc import Iterable, Sequence
from copy import copy
from enum import StrEnum
from typing import NamedTuple

from cbatch.replay.decisions import Decision, StepEnd
from cbatch.request import Request


class Doing(StrEnum):
    """What a request does in an iteration.

    PREFILL, DECODE: computes tokens of its prompt (after a preemption, also of its output), or its newest token.
    WAITING: has not been admitted. PAUSED: is left out and keeps its KV blocks. PREEMPTED: loses them.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    WAITING = "waiting"
    PAUSED = "paused"
    PREEMPTED = "preempted"


class Cell(NamedTuple):
    """A request in an iteration. tokens: that are computed."""

    doing: Doing
    tokens: int = 0


class Schedule:
    """cells: by request id, then by iteration, of the iterations in which a request has arrived and not ended."""

    def __init__(self, events: Iterable[Decision | StepEnd], requests: Sequence[Request]) -> None:
        """events: as `record_decisions` gives them, or a decisions file. requests: those of the run."""
        self.cells: dict[int, dict[int, Cell]] = {request.id: {} for request in requests}
        for event in events:
            if isinstance(event, Decision):
                self._add(event)

    @property
    def num_iterations(self) -> int:
        return 1 + max((iteration for row in self.cells.values() for iteration in row), default=-1)

    def window(self, first: int, iterations: int) -> "Schedule":
        """Returns the schedule of `iterations` iterations from the `first` on."""
        part = copy(self)
        shown = range(first, first + iterations)
        part.cells = {id_: {at: row[at] for at in row if at in shown} for id_, row in self.cells.items()}
        return part

    def text(self, names: Sequence[str]) -> str:
        """Returns text as in "A2 B2 | A1 B3 pre C": by iteration, requests with the tokens computed, and those preempted."""
        entries = []
        for iteration in range(self.num_iterations):
            column = {names[id_]: row[iteration] for id_, row in self.cells.items() if iteration in row}
            words = [f"{name}{cell.tokens}" for name, cell in column.items() if cell.tokens]
            words += [f"pre {name}" for name, cell in column.items() if cell.doing is Doing.PREEMPTED]
            entries.append(" ".join(words))
        return " | ".join(entries)

    def _add(self, decision: Decision) -> None:
        iteration, seen, decided, _ = decision
        for id_ in seen.waiting:
            self.cells[id_].setdefault(iteration, Cell(Doing.WAITING))
        for progress in seen.running:
            if progress.ready:  # else its next token is still being computed
                self.cells[progress.id][iteration] = Cell(Doing.PAUSED)
        for id_ in decided.preempt:
            self.cells[id_][iteration] = Cell(Doing.PREEMPTED)
        for id_, tokens in decided.entries:
            self.cells[id_][iteration] = Cell(Doing.DECODE if id_ in seen.decoding else Doing.PREFILL, tokens)
