"""Chats: sessions whose turns follow each other, in closed loop, or as an open loop that does not wait for answers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import WrapValidator

from cbatch import Request
from cbatch.arrivals import Arrivals
from cbatch.validation import Give, not_negative, whole
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload, as_range
from experiments.workloads.lengths import LONGEST
from experiments.workloads.open_loop import DrawnRequests, drawn_times
from experiments.workloads.scripts import SYSTEM, Session, Turn
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.sessions import ClosedLoop
from experiments.workloads.trace import Floats, Ints, Trace

NumTurns = Annotated[
    tuple[Annotated[int, whole(1, MOST_REQUESTS)], Annotated[int, whole(1, MOST_REQUESTS)]],
    WrapValidator(as_range),
    Give("a whole number of turns, at least 1, or the least and the most: [2, 12]"),
]


class _Chats(NamedTuple):
    """Drawn chats. counts: turns of each chat. starts: seconds. The others: [turns of all chats]; pauses: seconds, 0 for first turns."""

    counts: Ints
    starts: Floats
    new: Ints
    answers: Ints
    pauses: Floats


@dataclass(frozen=True, kw_only=True, repr=False)
class Chat(DrawnRequests, ClosedLoop):
    """Chats. A turn's prompt is the system prompt, all earlier turns and answers, and new tokens.

    closed: a turn arrives `pause` seconds, on average, after the previous answer. False is an open loop, without `sessions`, `steady`,
        `max_length` and `too_long`: turns arrive at drawn times, whether or not the previous turn has been answered. With real tokens, the answers within prompts are
        drawn, and differ from the model's.
    num_requests: turns of all chats; in closed loop the last chat is whole. With `steady` there are fewer: the first chats are in the middle,
        and one request stands for all their turns before.
    arrivals: of chats. lengths: of a turn's new tokens, and of its answer.
    turns: of each chat, or the least and the most, drawn uniformly.
    system: tokens of the prompt that all chats share; 0: none. pause: seconds, exponentially distributed.
    """

    closed: bool = True
    turns: NumTurns = (8, 8)
    system: Annotated[int, whole(0, LONGEST)] = 1024
    pause: Annotated[float, not_negative("seconds")] = 10.0

    @property
    def unread(self) -> tuple[str, Collection[str]]:
        names = ("sessions", "steady", "max_length", "too_long")
        return "an open loop, workload.closed=false", () if self.closed else names

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        return (ClosedLoop if self.closed else DrawnRequests).requests(self, vocabulary)

    def source(self, vocabulary: Vocabulary | None) -> Arrivals:
        return (ClosedLoop if self.closed else Workload).source(self, vocabulary)

    def scripts(self) -> Sequence[Session]:
        chats, first = self._chats, 0
        sessions = list[Session]()
        columns = [column.tolist() for column in (chats.new, chats.answers, chats.pauses)]
        for number, count in enumerate(chats.counts.tolist()):
            (new, answer, _), *later = zip(*(column[first : first + count] for column in columns), strict=True)
            turns = [Turn(new, answer)]
            for place, (new, answer, pause) in enumerate(later):
                turns.append(Turn(new, answer, after=(place,), pause=pause, repeats=place))
            sessions.append(Session(str(number), turns, self.system))
            first += count
        return sessions

    def trace(self) -> Trace:
        chats = self._chats
        number, turn = (np.arange(chats.counts.max()) < chats.counts[:, None]).nonzero()
        table = np.zeros((2, len(chats.counts), chats.counts.max()))  # of each turn: new tokens and answer, pause
        table[:, number, turn] = chats.new + chats.answers, chats.pauses
        said, waits = table.cumsum(axis=2)[:, number, turn]
        times = chats.starts[number] + waits
        order = np.argsort(times, kind="stable")[: self.num_requests]
        shared = ((SYSTEM, 0),) if self.system else ()
        texts = [(*shared, (1 + chat, self.system)) for chat in number[order].tolist()]
        return Trace(
            source="chat",
            prompt_tokens=(self.system + said.astype(np.int64) - chats.answers)[order],
            output_tokens=chats.answers[order],
            arrival_time=times[order],
            fields={
                "session": number[order].astype(str).astype(object),
                "turn": turn[order].astype(object),
                "last": (turn == chats.counts[number] - 1)[order].astype(object),
                "texts": np.fromiter(texts, object, len(texts)),
            },
        )

    @cached_property
    def _chats(self) -> _Chats:
        least, most = self.turns
        counts = np.full(-(-self.num_requests // least), least)
        if least < most:
            counts = generator(self.seed, Purpose.GROUPS).integers(least, most, len(counts), endpoint=True)
            counts = counts[: np.searchsorted(np.cumsum(counts), self.num_requests) + 1]
        total = int(counts.sum())
        new, answers = self._lengths(total)
        numbers = generator(self.seed, Purpose.ARRIVALS)
        starts = drawn_times(self.arrivals, numbers, len(counts))
        pauses = numbers.exponential(self.pause, total)
        pauses[np.cumsum(counts) - counts] = 0
        return _Chats(counts, starts, new, answers, pauses)
