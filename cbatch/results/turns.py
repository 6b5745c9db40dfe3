"""Counts the turns of conversations that an open loop sends, or that a server answers, before the answer in their prompt exists."""

from collections.abc import Iterable

import numpy as np

from cbatch.results.metrics import Entry, Served


def early_turns(ended: Iterable[Entry], served: Served) -> dict[str, int]:
    """Counts the served turns whose prompt is long enough for the previous turn and its answer, and the early ones; empty if none.

    turns: all such turns. arrived: turns that arrived before that answer was complete. answered: turns that got a token before.
    """
    sessions = {request.id: request.session for request in ended if request.session is not None}
    names = ("id", "arrival", "first_token", "last_token", "prompt_tokens", "output_tokens")
    columns = [getattr(served, name) for name in names]
    # by session: when the answers so far are complete; tokens of the latest turn and its answer
    latest: dict[str, tuple[float, int]] = {}
    turns = arrived = answered = 0
    for row in np.lexsort((served.id, served.arrival)).tolist():
        id_, arrival, first_token, last_token, prompt, output = (column[row].item() for column in columns)
        if (session := sessions.get(id_)) is None:
            continue
        complete, length = latest.get(session, (-np.inf, prompt + 1))
        if length <= prompt:
            turns, arrived, answered = turns + 1, arrived + (arrival < complete), answered + (first_token < complete)
        latest[session] = max(complete, last_token), prompt + output
    return {"turns": turns, "arrived": arrived, "answered": answered} if turns else {}
