"""Scripts of sessions: what each turn says, repeats and waits for, known before the run. `sessions` serves them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SYSTEM = 0  # the number of the text that all sessions share; turn i of all begins text 1 + i
_ANSWER = 1e-6  # seconds: far below any pause, and more than nothing, so that sessions without pauses have a duration


class Turn(NamedTuple):
    """A request of a session. Turns are numbered in an order in which each follows only earlier ones.

    new, output: tokens of the prompt after what it repeats, and of the answer; at least 1.
    after: turns whose ends it follows; empty: it follows the session's begin. pause: seconds from the latest of these ends.
    repeats: the turn whose prompt and answer its prompt begins with; None: with the system prompt. kept: the first tokens of these; None: all.
    extra: of `RequestSpec`.
    """

    new: int
    output: int
    after: tuple[int, ...] = ()
    pause: float = 0.0
    repeats: int | None = None
    kept: int | None = None
    extra: Mapping[str, Any] = {}


class Session(NamedTuple):
    """A session by its name. system: tokens that the prompts of all sessions share."""

    name: str
    turns: Sequence[Turn]
    system: int = 0


class Said(NamedTuple):
    """The prompt of a turn if all earlier answers have their whole length, and its texts (`RequestSpec.texts`)."""

    num_tokens: int
    texts: tuple[tuple[int, int], ...]


def prompts_of(session: Session, first: int) -> list[Said]:
    """Returns the prompts of a session's turns. first: number of its first turn, counted over all sessions.

    The first turn that repeats all of another goes on with the same text; further ones begin texts of their own.
    """
    said, continued = list[Said](), set[int]()
    for number, turn in enumerate(session.turns, first):
        kept, is_new = session.system, True
        texts: tuple[tuple[int, int], ...] = ((SYSTEM, 0),) if session.system else ()
        if turn.repeats is not None:
            before = said[turn.repeats]
            kept = before.num_tokens + session.turns[turn.repeats].output
            is_new = turn.kept is not None or turn.repeats in continued
            kept = kept if turn.kept is None else min(turn.kept, kept)
            texts = tuple(part for part in before.texts if not is_new or part[1] < kept)
            continued |= set() if is_new else {turn.repeats}
        said.append(Said(kept + turn.new, (*texts, (1 + number, kept)) if is_new else texts))
    return said


def lengths_of(session: Session) -> list[int]:
    """Returns the tokens of each turn's prompt and answer."""
    return [said.num_tokens + turn.output for said, turn in zip(prompts_of(session, 0), session.turns, strict=True)]


def places_of(session: Session, first: int) -> Iterator[dict[str, Any]]:
    """Yields the fields of `RequestSpec` that say where each turn belongs. first: id of the session's first turn."""
    last = len(session.turns) - 1
    for number, turn in enumerate(session.turns):
        follows = tuple(first + before for before in turn.after)
        names = {"session": session.name, "turn": number, "last": number == last}
        yield {**names, "pause": turn.pause, "follows": follows}


def draw_open(sessions: Sequence[Session], draws: Sequence[Sequence[float]]) -> list[Session]:
    """Returns sessions as a long run has them open at a random time; `draws` are pairs of random numbers from 0 to below 1.

    Each is drawn uniformly as a point of the time lines of all sessions, laid end to end. So a session of twice the duration is found
    twice as often (length-biased), as is a pause, and the share of the pause that has passed is uniform.
    """
    durations, found = [max(_ends(session)) for session in sessions], list[Session]()
    shares = np.cumsum(durations) / np.cumsum(durations)[-1]
    for number, (which, share) in enumerate(draws):
        place = int(np.searchsorted(shares, which, side="right"))
        session = resumed(sessions[place], share * durations[place])
        found.append(session._replace(name=f"open {number}: {session.name}"))
    return found


def resumed(session: Session, passed: float) -> Session:
    """Returns a session of which the first `passed` seconds are over; its first turn recomputes the history of the turns that have ended."""
    turns, lengths, ends = session.turns, lengths_of(session), _ends(session)
    left = [place for place, end in enumerate(ends) if end > passed]
    places = {place: number for number, place in enumerate(left, 1)}  # turns that have ended are turn 0
    kept = {
        place: lengths[turn.repeats] if turn.kept is None else min(turn.kept, lengths[turn.repeats])
        for place in left
        if (turn := turns[place]).repeats is not None and turn.repeats not in places
    }
    ended = [length for place, length in enumerate(lengths) if place not in places]
    resumed = [Turn(max(max([session.system, *ended[-1:], *kept.values()]) - session.system, 1), 1)]
    for place in left:
        turn = turns[place]
        after = tuple(sorted({places.get(before, 0) for before in turn.after})) or (0,)
        pause = max(ends[place] - _ANSWER - passed, 0.0) if after == (0,) else turn.pause
        repeats = None if turn.repeats is None else places.get(turn.repeats, 0)
        resumed.append(turn._replace(after=after, pause=pause, repeats=repeats, kept=kept.get(place, turn.kept)))
    return session._replace(turns=resumed)


def _ends(session: Session) -> list[float]:
    """Returns when each turn ends, in seconds from the session's begin, if an answer takes `_ANSWER` seconds."""
    ends = list[float]()
    for turn in session.turns:
        ends.append(max((ends[before] for before in turn.after), default=0.0) + turn.pause + _ANSWER)
    return ends
