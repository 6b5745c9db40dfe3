"""Selects the runs of a folder to show, repeated ones once, and says which are left out, and why."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

from cbatch import ConfigError
from experiments.store.claim import UNFINISHED
from experiments.store.run_folder import CONFIG, WITHOUT_EFFECT, read_summary
from experiments.store.runs import ERRORS, Run, named_options, read_runs
from experiments.store.text import name_of


class Omitted(NamedTuple):
    """A run that is not shown."""

    name: str
    reason: str


def select_runs(folder: Path, text: str) -> tuple[list[Run], list[Omitted]]:
    """The finished runs that `text` chooses, repeated ones once, and those of the folder that are left out."""
    found, repeated = drop_repeats(choose_runs(read_runs(folder), text))
    return found, [*repeated, *(run for run in find_unfinished(folder) if _any_in(text, run.name))]


def choose_runs(runs: Sequence[Run], text: str) -> list[Run]:
    """The runs whose folder names, or settings on the command line, contain `text`, or one of several: vtc|mlfq.

    Raises:
        ConfigError: there are none.
    """
    chosen = [run for run in runs if _any_in(text, run.folder.name, ",".join(run.about["overrides"]))]
    if not chosen:
        names = ", ".join(run.folder.name for run in runs[:5])
        raise ConfigError(f"runs={text}: no folder name contains this; there are {names} ...")
    return chosen


def _any_in(text: str, *names: str) -> bool:
    """Whether a text chooses one of the names: rate=4 is no part of rate=40 or rate=4.5."""
    whole = [re.escape(part) + (r"(?!\.?\d)" if part[-1:].isdigit() else "") for part in text.split("|")]
    return any(re.search(part, name) for part in whole for name in names)


def say(omitted: Iterable[Omitted]) -> None:
    """Print which runs are left out, and why."""
    if text := omitted_text(omitted):
        print(text, file=sys.stderr)


def find_unfinished(root: Path) -> list[Omitted]:
    """Runs without results in and below a folder: failed, killed, or still running."""
    found: dict[Path, str] = {}
    for file in sorted(root.rglob(ERRORS)):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        found |= {file.parent / name: error for name, _, error in (line.partition(": ") for line in lines)}
    for folder in sorted(path.parent for path in root.rglob(CONFIG)):
        found.setdefault(folder, _why_unfinished(folder))
    return [Omitted(path.name, why) for path, why in found.items() if read_summary(path) is None]


def _why_unfinished(folder: Path) -> str:
    try:
        said = json.loads((folder / UNFINISHED).read_text(encoding="utf-8"))
        return str(said.get("error", "is running, or was killed"))
    except (OSError, ValueError, KeyError):
        return "did not finish"


def drop_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[Omitted]]:
    """The runs without those that have the same effective settings and figures as an earlier one, and these.

    So a policy without chunks is shown once where chunks were swept. Measured runs are never equal.
    """
    first: dict[str, Run] = {}
    omitted = []
    for run in runs:
        figures = {key: value for key, value in run.summary.items() if key != "about"}
        key = json.dumps([name_of(run.about), named_options(run), run.effective, figures], sort_keys=True, default=str)
        if (same := first.setdefault(key, run)) is not run:
            omitted.append(Omitted(run.folder.name, _why_repeated(run, same)))
    return list(first.values()), omitted


def _why_repeated(run: Run, same: Run) -> str:
    unread = sorted({key for key in (*run.given, *same.given) if run.given.get(key) != same.given.get(key)})
    unread = [key for key in unread if key.split(".")[0] not in WITHOUT_EFFECT]
    if not unread:
        return "each repeats another run"
    return f"each differs from another run only in {', '.join(unread)}, which {name_of(run.about)} does not read"


def omitted_text(omitted: Iterable[Omitted]) -> str:
    """A line for each reason, and below it the names of the runs; empty if nothing was left out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in omitted:
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        runs = "1 run" if len(names) == 1 else f"{len(names)} runs"
        lines += [f"{runs} not shown: {reason}", *(f"  {name}" for name in _combine(names))]
    return "\n".join(lines)


def _combine(names: Sequence[str]) -> list[str]:
    """Names of all combinations of some values as one: a=1,b=1 and a=2,b=1 as a=1|2,b=1; other names as they are."""
    columns = [list(dict.fromkeys(parts)) for parts in zip_longest(*(name.split(",") for name in names), fillvalue="")]
    keys = [{part.partition("=")[0] for part in parts} for parts in columns]
    if prod(map(len, columns)) != len(set(names)) or any(len(found) > 1 for found in keys):
        return list(names)
    return [",".join("|".join([first, *(part.partition("=")[2] for part in rest)]) for first, *rest in columns)]
