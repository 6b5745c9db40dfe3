"""Figures of sessions whose turns follow the ends of earlier ones: a session is a job, its turns are requests (docs/metrics.md).

`early_turns` counts turns that do not follow them.

arrival of turn 0 |===served===|   pause   |=turn 1=| pause |==turn 2==|
                  |            |        |==sub-agent==|     |          |
                  |<-- busy -->|        |<-- busy --->|     |<- busy ->|
                  |<---------------------- job ----------------------->|
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np

from cbatch.request import SERVED
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Entry, Served, Window, busy_seconds, mean, statistics


def session_figures(
    run: Gathered, window: Window, seconds: float, num_warming: int, block_size: int | None
) -> dict[str, Any] | None:
    """Returns the figures of sessions that begin and of turns that end in the window; None if no request states its turn and its pause.

    A session counts if it begins in the window, up to its end, even after the window. If sessions counted by their ends, long ones that
    begin late would be missing, and the mean job would be too short.

    Args:
        seconds: duration of the measured part of the run.
        num_warming: requests that compute what sessions said before the run: these sessions are not whole jobs.
        block_size: tokens per block of the prefix cache; None without one.
    """
    ended, warming = run.ended, run.warming(num_warming)
    if not any(request.turn is not None and request.pause is not None for request in ended):
        return None
    sessions, before = dict[str, list[Entry]](), {request.id for request in warming}
    for request in ended:
        if request.session is not None and request.turn is not None and request.id not in before:
            sessions.setdefault(request.session, []).append(request)
    resumed = {request.session for request in warming}
    begun = [turns for name, turns in sessions.items() if name not in resumed]
    firsts = [min(turns, key=attrgetter("turn", "arrival_time")) for turns in begun]
    counts = [not first.turn and window.start <= first.arrival_time < window.end for first in firsts]
    jobs = [*compress(begun, counts)]
    whole = [turns for turns in jobs if all(turn.finish_reason in SERVED for turn in turns)]
    done = [turns for turns in whole if any(turn.last for turn in turns)]
    rate = 3600 * _num_completed(sessions.values(), done, window) / (seconds or float("nan"))
    times = np.array([_times(turns) for turns in done]).reshape(-1, 3)
    each = times[:, 1] / times[:, 2]
    figures = {
        "completed": len(done),
        "abandoned": len(jobs) - len(whole),
        "per_hour": rate,
        "job_seconds": {**statistics(times[:, 0]), "geometric_mean": float(np.exp(mean(np.log(times[:, 0]))))},
        "busy_seconds": statistics(times[:, 1]),
        "turn_seconds": statistics(each),
        "jain_index": float(each.sum() ** 2 / (len(each) * (each @ each))) if each.any() else float("nan"),
        "ttft_seconds": _first_tokens([turn for turns in begun for turn in turns], run.served, window),
    }
    if block_size is None:
        return figures
    for request in warming:
        sessions.get(request.session or "", []).insert(0, request)
    tokens = [_lost(turns, window, block_size) for turns in sessions.values()]
    lost, repeated = np.array(tokens, int).reshape(-1, 2).sum(axis=0).tolist()
    return {**figures, "cache_lost_share": lost / repeated if repeated else float("nan")}


def _is_in(window: Window, turn: Entry) -> bool:
    return window.start < (turn.finished_at or 0.0) <= window.end


def _num_completed(sessions: Iterable[Sequence[Entry]], done: Sequence[Sequence[Entry]], window: Window) -> float:
    """Returns the turns that end in the window, also of sessions begun before it, over the mean turns of `done`. Abandoned sessions do not count."""
    ended = [turns for turns in sessions if all(turn.finish_reason in SERVED for turn in turns)]
    num_turns = sum(_is_in(window, turn) for turns in ended if any(turn.last for turn in turns) for turn in turns)
    return num_turns * len(done) / sum(map(len, done)) if done else float("nan" if num_turns else 0)


def _times(turns: Collection[Entry]) -> tuple[float, float, int]:
    """Returns the seconds of a session, its seconds with an unfinished turn, and the number of its turns."""
    begins, ends = (np.array([getattr(turn, name) for turn in turns]) for name in ("arrival_time", "finished_at"))
    whole = Window(float(begins.min()), float(ends.max()))
    return whole.seconds, busy_seconds(begins, ends, whole), len(turns)


def _first_tokens(turns: Collection[Entry], served: Served, window: Window) -> dict[str, dict[str, float]]:
    """Returns the number of turns 0, 1, 2-3, 4-7 and so on, and their times to first token."""
    inside = window.holds(served.last_token)
    ttft = dict(zip(served.id[inside].tolist(), served.ttft[inside].tolist(), strict=True))
    pairs = [((turn.turn or 0).bit_length(), ttft[turn.id]) for turn in turns if turn.id in ttft]
    group, values = np.array(pairs).reshape(-1, 2).T
    groups = {_group_name(int(number)): values[group == number] for number in np.unique(group)}
    return {name: {"turns": len(times), **statistics(times)} for name, times in groups.items()}


def _group_name(bits: int) -> str:
    first = 1 << bits >> 1
    return f"{first}" if bits < 2 else f"{first}-{2 * first - 1}"


def _lost(turns: Sequence[Entry], window: Window, block_size: int) -> tuple[int, int]:
    """Returns, of the tokens in whole blocks that prompts repeat of ended turns of their session, those not found, and all."""
    lost = repeated = 0
    extents = dict[tuple[int, int], int]()  # of each text, up to which position it has entered the cache
    ends = deque(turn for turn in turns if turn.finish_reason in SERVED)
    for turn in sorted(turns, key=attrgetter("arrival_time")):
        while ends and (ends[0].finished_at or 0.0) <= turn.arrival_time:
            before = ends.popleft()
            entered = before.num_prompt_tokens + before.num_output_tokens - 1  # the last token never enters
            extents |= {text: max(extents.get(text, 0), end) for text, end in _parts(before, entered)}
        if turn.admitted_at is None or not _is_in(window, turn):
            continue
        common = 0
        for text, end in _parts(turn, turn.num_prompt_tokens - 1):
            common = max(common, min(extents.get(text, 0), end))
            if common < end:
                break
        whole = common // block_size * block_size
        lost, repeated = lost + max(whole - turn.num_cached_tokens, 0), repeated + whole
    return lost, repeated


def _parts(turn: Entry, length: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields the texts of a turn's first `length` tokens, each with its begin, and its end."""
    for place, text in enumerate(turn.texts):
        following = turn.texts[place + 1][1] if place + 1 < len(turn.texts) else length
        yield text, min(following, length)


def last_begin(requests: Iterable[Entry]) -> float:
    """Returns when the last session begins. From then on, sessions that end have no successor."""
    return max((request.arrival_time for request in requests if not request.turn), default=0.0)


def sessions_open(ended: Iterable[Entry], at_a_time: int | None = None) -> dict[str, float]:
    """Returns the sessions of a run, their turns, and how many are to be open; empty if that is not known.

    kept: `at_a_time`. open: without it, how many would be open in the steady state: their rate times their mean duration (Little's law);
    not known unless they begin at several times. A run of fewer sessions never has as many open.
    """
    turns = [request for request in ended if request.turn is not None and request.session is not None]
    begins, ends = dict[str | None, float](), dict[str | None, float]()
    for turn in turns:
        begins[turn.session] = min(begins.get(turn.session, np.inf), turn.arrival_time)
        ends[turn.session] = max(ends.get(turn.session, 0.0), turn.finished_at or turn.arrival_time)
    numbers: dict[str, float] = {"number": len(begins), "turns": len(turns)}
    if at_a_time is not None:
        return {**numbers, "kept": at_a_time}
    span = max(begins.values(), default=0.0) - min(begins.values(), default=0.0)
    if not span:
        return {}
    rate = (len(begins) - 1) / span
    seconds = np.array([ends[session] - begin for session, begin in begins.items()])
    return {**numbers, "open": rate * mean(seconds)}


def early_turns(ended: Iterable[Entry], served: Served) -> dict[str, int]:
    """Counts turns that an open loop sends, or a server answers, before the answer in their prompt exists; empty without later turns.

    turns: served ones whose prompt is long enough for the previous turn and its answer. arrived: before that answer was complete.
    answered: got a token before.
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
