"""The form of a note on results, and the notes on the number of sessions."""

from collections.abc import Iterator, Sequence
from itertools import compress
from math import ceil
from typing import NamedTuple

from experiments.report.conditions import About, is_overloaded

_TOO_FEW = {
    "open": "about {:,.0f} would be open at this rate in the steady state",
    "kept": "workload.sessions={} is never reached",
}
"""Notes on sessions of `about.sessions`, by the number that they fall short of."""


class Note(NamedTuple):
    """A note on results. remedy: what the user may do about it, which is left out below a figure."""

    fact: str
    remedy: str = ""


def of_several(counts: Sequence[int]) -> str:
    """Returns in how many runs something was counted; an empty text for all of them."""
    return "" if all(counts) else f", in {sum(map(bool, counts))} of {len(counts)} runs"


def session_notes(known: Sequence[About]) -> Iterator[Note]:
    """Yields notes on sessions that begin at their times under overload, and on runs with fewer sessions than are to be open at once."""
    runs = [about.get("sessions") or {} for about in known]
    if any(full := ["open" in of and is_overloaded(about) for of, about in zip(runs, known, strict=True)]):
        more = "overload: the open sessions have no steady number, and figures depend on how many are served"
        sessions = "workload.sessions, or " * any(map(_keeps, compress(known, full)))
        yield Note(f"{more}{of_several(full)}", f"give {sessions}a lower rate")
    for key, why in _TOO_FEW.items():
        few = [not over and of.get(key, 0) > of.get("number", 0) for of, over in zip(runs, full, strict=True)]
        if any(few):
            pairs = compress(zip(runs, known, strict=True), few)
            of, about = max(pairs, key=lambda pair: pair[0][key] / pair[0]["number"])
            steady = f", and workload.sessions={of[key]:.0f} workload.steady=true to begin with as many"
            further = ", or a smaller workload.sessions" if key == "kept" else steady * _keeps(about)
            fact = f"{of['number']:,} sessions are too few: {why.format(of[key])}{of_several(few)}"
            yield Note(fact, _more_sessions(about, 2 * of[key] / of["number"], further))


def _more_sessions(about: About, factor: float, further: str) -> str:
    """Returns the advice to serve `factor` times as many sessions, and further advice."""
    identity = about.get("identity", {})
    for key in ("workload.num_sessions", "workload.num_requests"):
        if (number := identity.get(key)) is not None:
            return f"give {key}={ceil(factor * number)} or more{further}"
    return "serve more sessions"


def _keeps(about: About) -> bool:
    """Returns whether the workload of a run reads `sessions` and `steady`."""
    identity = about.get("identity", {})
    return "workload.steady" in identity and identity.get("workload.closed", True)
