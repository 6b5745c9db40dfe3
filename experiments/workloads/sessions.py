"""Sessions in closed loop: a turn follows the ends of earlier turns after a pause, and its prompt begins with what they said.

    turn 0     prompt: system new0                            answer0
    turn 1                        pause, after turn 0's end -> prompt: system new0 answer0 new1     answer1
    sub-agent                     pause, after turn 0's end -> prompt: system task                  report
    turn 2     pause, after the ends of turn 1 and of the sub-agent -> prompt: system new0 ... answer1 new2

With real tokens a prompt holds the tokens that the model answered; in simulation `RequestSpec.texts` says which tokens are the same.
A turn that is not served, as its client has left or the policy has rejected it, ends its session: no further turn comes.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf
from typing import Annotated, Any, Literal, Self

import numpy as np

from cbatch import Request, RequestSpec, WorkloadError
from cbatch.arrivals import Arrivals, Listed
from cbatch.facts import facts_of
from cbatch.request import SERVED, spec_of
from cbatch.validation import Give, whole
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload
from experiments.workloads.drawn import Drawn
from experiments.workloads.open_loop import ArrivalProcess, drawn_times
from experiments.workloads.scripts import SYSTEM, Said, Session, Turn, draw_open, lengths_of, places_of, prompts_of
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import Trace


@dataclass(eq=False)
class _Open:
    """A session that has begun. left: by turn, the number of ends that it waits for. tokens: prompt and answer by turn, if real."""

    number: int
    left: dict[int, int]
    latest: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_running: int = 0
    is_over: bool = False


class Sessions(Listed):
    """The arrivals of sessions. A request's id is the number of its turn, counted over all sessions, under every policy."""

    follow_ends = True

    def __init__(
        self,
        sessions: Sequence[Session],
        specs: Sequence[RequestSpec],
        starts: Sequence[float],
        draw: Callable[[int, int], list[int]] | None = None,
        num_open: int = 0,
        dropped: Collection[int] = (),
    ) -> None:
        """
        specs: requests of the turns of all sessions, in order. This class sets arrival times, and with `draw` also prompts.
        starts: seconds at which the first sessions begin. Every other session begins when an earlier one ends.
        draw: called with the number of a text and a number of tokens; returns the text's first tokens. None: no token values.
        num_open: for a steady start, the number of first sessions that are in the middle. Their first turns compute the history.
            When all of these turns have ended, the pauses after them begin. Their clients wait.
        dropped: tokens of answers that are left out of later prompts.
        """
        super().__init__()
        self._sessions, self._specs, self._draw, self._num_open = sessions, [*specs], draw, num_open
        self._dropped = frozenset(dropped)
        self._firsts = [0, *np.cumsum([len(session.turns) for session in sessions]).tolist()]
        self._followers = [_followers(session) for session in sessions]
        self._open, self._held = dict[int, _Open](), list[tuple[int, int]]()
        self._num_warming = num_open
        for first in self._firsts[:num_open]:
            self._specs[first] = replace(self._specs[first], timeout=None)
        made = map(Request.from_spec, self._specs)
        self.facts = replace(facts_of(made), num_warming=num_open)
        self._num_begun = 0
        for start in starts[: len(sessions)]:
            self._begin(start)

    def ended(self, request: Request) -> None:
        super().ended(request)
        number = bisect_right(self._firsts, request.id) - 1
        session, turn, end = self._open[number], request.id - self._firsts[number], request.finished_at or 0.0
        session.num_running -= 1
        session.is_over |= request.finish_reason not in SERVED
        if self._draw is not None:
            answer = [token for token in request.output if token not in self._dropped]
            session.tokens[turn] = [*(request.prompt or ()), *answer]
        is_warming = not turn and number < self._num_open
        for follower in () if session.is_over else self._followers[number][turn]:
            session.left[follower] -= 1
            session.latest[follower] = max(session.latest.get(follower, 0.0), end)
            if not session.left[follower]:
                session.num_running += 1
                if is_warming:
                    self._held.append((number, follower))
                else:
                    self._send(session, follower, session.latest[follower] + self._turn(number, follower).pause)
        if is_warming:
            self._warmed(end)
        if not session.num_running:
            del self._open[number]
            self._begin(end)

    def _warmed(self, now: float) -> None:
        """Lets the sessions of a steady start continue once all their first turns have ended."""
        self._num_warming -= 1
        if not self._num_warming:
            for number, turn in self._held:
                self._send(self._open[number], turn, now + self._turn(number, turn).pause)

    def _begin(self, now: float) -> None:
        """Begins the next session, if there is one."""
        if (number := self._num_begun) == len(self._sessions):
            return
        self._num_begun += 1
        turns = self._sessions[number].turns
        self._open[number] = session = _Open(number, {place: len(turn.after) for place, turn in enumerate(turns)})
        for place, turn in enumerate(turns):
            if not turn.after:
                session.num_running += 1
                self._send(session, place, now + turn.pause)

    def _send(self, session: _Open, turn: int, time: float) -> None:
        spec = self._specs[id_ := self._firsts[session.number] + turn]
        if self._draw is not None:
            of, system = self._turn(session.number, turn), self._sessions[session.number].system
            before = self._draw(SYSTEM, system) if of.repeats is None else session.tokens[of.repeats][: of.kept]
            prompt = before + self._draw(1 + id_, of.new)
            spec = replace(spec, prompt=prompt, num_prompt_tokens=len(prompt))
        self.add([Request.from_spec(replace(spec, arrival_time=time))])

    def _turn(self, number: int, turn: int) -> Turn:
        return self._sessions[number].turns[turn]


def _followers(session: Session) -> list[list[int]]:
    """Returns, for each turn of a session, the turns that wait for its end."""
    followers: list[list[int]] = [[] for _ in session.turns]
    for place, turn in enumerate(session.turns):
        for before in turn.after:
            followers[before].append(place)
    return followers


@dataclass(frozen=True, kw_only=True, repr=False)
class ClosedLoop(Workload):
    """Base of workloads in closed loop: `scripts` are the sessions, and requests follow the ends of others.

    sessions: at a time; when one ends, the next one begins. None: sessions begin at the times of `arrivals`.
    steady: the first `sessions` begin in the middle, in the states that a long run has at a random time; they are copies of sessions drawn from all
        of `scripts`. Their histories are computed first, and figures count from then on. Needs `sessions`. The times of answers are not
        known before the run, so all begin in a pause: at first, turns arrive as fast as if answers took no time.
    max_length, too_long: a session with a turn of more tokens is refused ("error"), ends before this turn ("clip"), or is left out ("drop").
    """

    sessions: Annotated[int, whole(1, MOST_REQUESTS)] | None = None
    steady: bool = False
    max_length: Annotated[int, whole(2)] | None = None
    too_long: Literal["error", "clip", "drop"] = "error"
    arrivals: (
        Annotated[ArrivalProcess, Give("keys of it, as in workload.arrivals._target_=...; it must have times()")] | None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steady and self.sessions is None:
            raise WorkloadError("workload.steady=true: needs a number of sessions at a time; give workload.sessions=")
        if self.sessions is None and self.arrivals is None:
            problem = "workload.sessions=null: sessions have no times"
            raise WorkloadError(f"{problem}; give workload.sessions= or workload.arrivals=")

    @abstractmethod
    def scripts(self) -> Sequence[Session]:
        """Returns the sessions in the order of their begins."""

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        """Returns the turns of all sessions, of which none has arrived, without tokens."""
        return self._turns(self._fitting(), vocabulary)

    def within(self, positions: int) -> Self:
        if self.too_long == "error":
            return self
        return replace(self, max_length=min(self.max_length or positions, positions))

    def _fitting(self) -> list[Session]:
        """Returns the sessions within `max_length`. Raises WorkloadError if there is none, or one does not fit and must."""
        sessions, most = list[Session](), self.max_length or inf
        for session in self.scripts():
            lengths = lengths_of(session)
            num_fit = next((place for place, length in enumerate(lengths) if length > most), len(lengths))
            if num_fit < len(lengths) and self.too_long == "error":
                turn = f"session {session.name}: turn {num_fit}"
                problem = f"{turn} has {lengths[num_fit]} tokens, more than workload.max_length={most}"
                raise WorkloadError(f"{problem}; raise it, or set workload.too_long to clip or drop")
            if num_fit == len(lengths) or (self.too_long == "clip" and num_fit):
                sessions.append(session._replace(turns=session.turns[:num_fit]))
        if not sessions:
            remedy = "raise it, or lower workload.length_scale"
            raise WorkloadError(f"workload: no session fits max_length={most}; {remedy}")
        return sessions

    def _turns(self, sessions: Sequence[Session], vocabulary: Vocabulary | None) -> Drawn:
        turns, prompts, places = list[Turn](), list[Said](), list[dict[str, Any]]()
        for session in sessions:
            prompts += prompts_of(session, len(turns))
            places += places_of(session, len(turns))
            turns += session.turns
        columns = {name: [place[name] for place in places] for name in places[0]}
        columns |= {"texts": [said.texts for said in prompts], "extra": [turn.extra for turn in turns]}
        trace = Trace(
            source="sessions",
            prompt_tokens=np.array([said.num_tokens for said in prompts]),
            output_tokens=np.array([turn.output for turn in turns]),
            fields={name: np.fromiter(column, object, len(turns)) for name, column in columns.items()},
        )
        return self._build(trace, vocabulary, prompts=False)

    def source(self, vocabulary: Vocabulary | None) -> Arrivals:
        sessions, num_open = self._fitting(), 0
        if self.sessions is None:
            assert self.arrivals is not None
            starts = drawn_times(self.arrivals, generator(self.seed, Purpose.ARRIVALS), len(sessions))
        else:
            starts = np.zeros(self.sessions)
        if self.steady:
            num_open = min(len(starts), len(sessions))
            draws = generator(self.seed, Purpose.STEADY).random((num_open, 2)).tolist()
            sessions[:num_open] = draw_open(sessions, draws)
        requests = self._turns(sessions, vocabulary)
        draw = None if vocabulary is None else words(self.seed, vocabulary.size)
        return Sessions(sessions, [spec_of(request) for request in requests.stream()], starts.tolist(), draw, num_open)


def words(seed: int, vocabulary_size: int) -> Callable[[int, int], list[int]]:
    """Returns a function that draws the first tokens of a text: its number and how many."""

    def drawn(text: int, number: int) -> list[int]:
        numbers = generator(seed, Purpose.PROMPTS, 0, text)
        tokens: list[int] = numbers.integers(vocabulary_size, size=number).tolist()
        return tokens

    system = lru_cache(maxsize=1)(partial(drawn, SYSTEM))
    return lambda text, number: drawn(text, number) if text else system(number)
