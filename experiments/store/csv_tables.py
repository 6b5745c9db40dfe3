"""Writes the CSV tables of a run, at once or in pieces, and checks whether a file still has all rows."""

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Self, TextIO

from cbatch import SLO, Request, RunRecord, StepRecord
from cbatch.request import SERVED, spec_of
from cbatch.results.metrics import Served

_SPEC = ("id", "max_new_tokens", "true_new_tokens", "client", "session", "tier", "priority", "predicted_new_tokens")
_OBJECTIVES = SLO.__slots__[:-1]  # later ones are stated where requests have them
_OUTCOME = {  # column: attribute of the request
    "arrival": "arrival_time",
    "admitted": "admitted_at",
    "first_token": "first_token_at",
    "last_token": "last_token_at",
    "ended": "finished_at",
    "prompt_tokens": "num_prompt_tokens",
    "output_tokens": "num_output_tokens",
    "finish_reason": "finish_reason.value",
    "reject_reason": "reject_reason",
    "preemptions": "num_preemptions",
    "recomputed_tokens": "num_recomputed_tokens",
}
_LATENCIES = ("scheduling_delay", "ttft", "tpot", "end_to_end")
_SLO_COLUMNS = [f"slo_{name}_seconds" for name in _OBJECTIVES]
LATENCY_COLUMNS = [f"{name}_seconds" for name in _LATENCIES]
REQUEST_COLUMNS = (*_SPEC, *_SLO_COLUMNS, *_OUTCOME, *LATENCY_COLUMNS)
_TURNS = {"turn": "turn", "pause": "pause"}
_TPOT = {"slo_tpot_seconds": "slo.tpot"}
_CACHED = {
    "cached_tokens": "num_cached_tokens",
    "cached_again_tokens": "num_cached_again",
    "lost_tokens": "num_lost_tokens",
}
REPLICA, POOL, PREFILLED_ON = "replica", "pool", "prefilled_on"
EXTRA = "extra."  # prefix of the columns of `Request.extra` in requests.csv

REQUESTS, STEPS, ENERGY = "requests.csv", "steps.csv", "energy.csv"


class RunTables:
    """Writes requests.csv and steps.csv, at once or in pieces; closes them at the end of a `with`."""

    def __init__(
        self, folder: Path, extra: Sequence[str] = (), stated: Mapping[str, str] = {}, drafts: bool = False
    ) -> None:
        """extra, stated: see `request_columns`. drafts: whether steps have the columns of drafts."""
        self._step_names = step_names(drafts)
        folder.mkdir(parents=True, exist_ok=True)
        self._extra, self._stated = extra, stated
        self._files = [_open(folder / name) for name in (REQUESTS, STEPS)]
        self._requests = csv.writer(self._files[0])
        self._has_header = False

    def write(self, record: RunRecord, served: Served) -> None:
        """Appends the rows of a record, or of a piece of it. served: the served requests of the record, or of the piece."""
        if not self._has_header:
            self._has_header = True
            self._requests.writerow(request_columns(self._extra, self._stated, record))
            self._files[1].write(",".join([*self._step_names, *place_columns(record)]) + "\r\n")
        lines = map(partial(_step_line, ",".join(["%s"] * len(self._step_names))), record.steps)
        lines = map("{},{}".format, lines, record.replicas) if record.replicas else lines
        lines = map("{},{}".format, lines, map(record.pools.__getitem__, record.replicas)) if record.pools else lines
        self._files[1].writelines(f"{line}\r\n" for line in lines)
        self._requests.writerows(request_rows(record, served, self._extra, self._stated))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


_time_text = lru_cache(maxsize=32)(str)  # lines share most times: an iteration begins when another ends


def _step_line(line: str, step: StepRecord) -> str:
    """Returns a line of steps.csv; csv.writer is slower, since it checks every character of the numbers. line: with %s per column."""
    note = step.note
    if note and not note.isalnum():
        step = step._replace(note='"{}"'.format(note.replace('"', '""')))
    return line % (step[0], *map(_time_text, step[1:8]), *step[8 : line.count("%")])


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Writes a small table."""
    with _open(path) as file:
        csv.writer(file).writerows(chain([header], rows))


def _open(path: Path) -> TextIO:
    """Opens a table for writing. A lone surrogate, which JSON allows and UTF-8 does not, is written as an escape."""
    return path.open("w", newline="", encoding="utf-8", errors="backslashreplace")


def write_energy(folder: Path, readings: Sequence[Sequence[float]]) -> None:
    """Writes the readings of the GPUs' energy counters, if there are any."""
    if readings:
        names = ["time", *(f"joules_{gpu}" for gpu in range(len(readings[0]) - 1))]
        write_csv(folder / ENERGY, names, readings)


def has_rows(path: Path, num_rows: int) -> bool:
    """Returns whether a table has this number of rows and its last row is complete."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        return False
    if content.count(b"\r\n") == 1 + num_rows:
        return True
    # texts may have line breaks
    with suppress(csv.Error), path.open(newline="", encoding="utf-8", errors="replace") as file:
        return sum(1 for _ in csv.reader(file)) == 1 + num_rows
    return False


def extra_names(requests: Iterable[Request]) -> list[str]:
    """Returns the keys of `Request.extra`, in the order of their first occurrence."""
    return list(dict.fromkeys(name for request in requests for name in request.extra))


def extra_text(value: object) -> str:
    """Returns a value of `Request.extra` as text for `read_extra`: plain if unambiguous, else JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) and read_extra(value) == value else json.dumps(value, default=str)


def read_extra(text: str) -> object:
    """Returns the value that `extra_text` converted to this text."""
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def step_names(drafts: bool) -> Sequence[str]:
    """Returns the columns of steps.csv; only runs with a drafter have those of drafts."""
    return StepRecord._fields if drafts else StepRecord._fields[:-4]


def place_columns(record: RunRecord) -> list[str]:
    """Returns the columns that say where a request or an iteration was served: its replica, and the replica's pool."""
    return [*[REPLICA] * bool(record.replica_of), *[POOL] * bool(record.pools)]


def stated_columns(cached: bool, paused: bool, tpot: bool = False) -> dict[str, str]:
    """Returns the columns, each with its attribute of a request, that only runs with a prefix cache, pauses of sessions, or objectives of TPOT have."""
    return {**(_TPOT if tpot else {}), **(_TURNS if paused else {}), **(_CACHED if cached else {})}


def request_columns(extra: Sequence[str], stated: Iterable[str], record: RunRecord) -> list[str]:
    """Returns the columns of requests.csv. extra: keys of `Request.extra`. stated: see `stated_columns`."""
    moves = [PREFILLED_ON] * (record.prefilled_on is not None)
    return [*REQUEST_COLUMNS, *stated, *place_columns(record), *moves, *(f"{EXTRA}{name}" for name in extra)]


def request_rows(
    record: RunRecord, requests: Served, extra: Sequence[str] = (), stated: Mapping[str, str] = {}
) -> Iterator[tuple[object, ...]]:
    """Yields the rows of requests.csv, in order of completion; rejected and cancelled requests have no latencies.

    extra, stated: see `request_columns`.
    """
    latencies = zip(*(getattr(requests, name).tolist() for name in _LATENCIES), strict=True)
    spec, objectives, outcome = attrgetter(*_SPEC), attrgetter(*_OBJECTIVES), attrgetter(*_OUTCOME.values())
    given = [attrgetter(name) for name in stated.values()]
    for request in record.requests:
        seconds = next(latencies) if request.finish_reason in SERVED else (math.nan,) * len(_LATENCIES)
        yield (
            *spec(spec_of(request)),
            *objectives(request.slo),
            *outcome(request),
            *(None if math.isnan(value) else value for value in seconds),
            *(of(request) for of in given),
            *_place(record, request),
            *(extra_text(request.extra.get(name)) for name in extra),
        )


def _place(record: RunRecord, request: Request) -> list[object]:
    """Returns the values of `place_columns`, blank for a request that was cancelled before its arrival, and where it was prefilled."""
    replica = record.replica_of.get(request.id)
    moves = () if record.prefilled_on is None else (record.prefilled_on.get(request.id),)
    if replica is None:
        return [*[None] * len(place_columns(record)), *moves]
    return [replica, *([record.pools[replica]] if record.pools else ()), *moves]
