"""Scripts of sessions: what each turn says, repeats and waits for, known before the run. `sessions` serves them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SYSTEM = 0  # the number of the text that all sessions share; turn i of all begins text 1 + i


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


def resumed(session: Session, at: int) -> Session:
    """Returns a session that starts at turn `at`; its first turn recomputes the history and replaces all earlier turns."""
    turns, latest = session.turns, at - 1
    lengths = lengths_of(session)
    kept = {
        place: lengths[turn.repeats] if turn.kept is None else min(turn.kept, lengths[turn.repeats])
        for place, turn in enumerate(turns[at:], at)
        if turn.repeats is not None and turn.repeats < at
    }
    resumed = [Turn(max(max([session.system, *lengths[:at][-1:], *kept.values()]) - session.system, 1), 1)]
    for place, turn in enumerate(turns[at:], at):
        after = tuple(sorted({max(before - latest, 0) for before in turn.after})) or (0,)
        repeats = None if turn.repeats is None else max(turn.repeats - latest, 0)
        resumed.append(turn._replace(after=after, repeats=repeats, kept=kept.get(place, turn.kept)))
    return session._replace(turns=resumed)
