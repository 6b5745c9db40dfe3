"""Selects the runs of a folder to show, repeated ones once, and says which are left out, and why."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from cbatch import ConfigError
from experiments.store.claim import read_state
from experiments.store.labels import label_runs, settings_of
from experiments.store.run_folder import CONFIG, ERRORS, read_summary
from experiments.store.runs import read_runs
from experiments.store.text import figures_text

_REPEATED = "each repeats another run: its policy does not read what differs"


class Omitted(NamedTuple):
    """A run that is not shown."""

    name: str
    reason: str


def select_runs(folder: str | Path, text: str = "") -> tuple[pd.DataFrame, list[Omitted]]:
    """Returns the finished runs that `text` chooses, repeated ones once, and those of the folder that are left out.

    The frame is that of `read_runs`, with labels for what is left.
    """
    runs, repeated = drop_repeats(choose_runs(read_runs(folder), text))
    unfinished = [run for run in find_unfinished(Path(folder)) if _any_in(text, run.name)]
    return runs.assign(label=label_runs(runs)), [*repeated, *unfinished]


def choose_runs(runs: pd.DataFrame, text: str) -> pd.DataFrame:
    """Returns the runs whose folder names, or settings on the command line, contain `text`, or one of several: vtc|mlfq.

    Raises:
        ConfigError: there are none.
    """
    names = [Path(folder).name for folder in runs["folder"]]
    given = [",".join(summary["about"]["overrides"]) for summary in runs["summary"]]
    chosen = runs[[_any_in(text, *texts) for texts in zip(names, given, strict=True)]]
    if chosen.empty:
        raise ConfigError(f"runs={text}: no folder name contains this; there are {', '.join(names[:5])} ...")
    return chosen


def _any_in(text: str, *names: str) -> bool:
    """Returns whether a text chooses one of the names: rate=4 is no part of rate=40 or rate=4.5."""
    whole = [re.escape(part) + (r"(?!\.?\d)" if part[-1:].isdigit() else "") for part in text.split("|")]
    return any(re.search(part, name) for part in whole for name in names)


def drop_repeats(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[Omitted]]:
    """Returns the runs without those that have the settings and figures of an earlier one, and the latter.

    So a policy without chunks is shown once where chunks were swept. Measured runs are never equal.
    """
    texts = settings_of(runs).assign(figures=runs["summary"].map(figures_text))
    repeated = texts.duplicated()
    return runs[~repeated], [Omitted(Path(folder).name, _REPEATED) for folder in runs.loc[repeated, "folder"]]


def find_unfinished(root: Path) -> list[Omitted]:
    """Returns the runs without results in and below a folder: failed, killed, or still running."""
    reasons: dict[Path, str] = {}
    for file in sorted(root.rglob(ERRORS)):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons |= {file.parent / name: error for name, _, error in (line.partition(": ") for line in lines)}
    for folder in sorted(path.parent for path in root.rglob(CONFIG)):
        state = read_state(folder)
        reasons.setdefault(folder, state.get("error", "is running, or was killed") if state else "did not finish")
    return [Omitted(path.name, why) for path, why in reasons.items() if read_summary(path) is None]


def print_omitted(omitted: Iterable[Omitted]) -> None:
    """Prints which runs are left out, and why."""
    if text := omitted_text(omitted):
        print(text, file=sys.stderr)


def omitted_text(omitted: Iterable[Omitted]) -> str:
    """Returns a line for each reason, and below it the names of the runs; empty if nothing was left out."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in omitted:
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        runs = "1 run" if len(names) == 1 else f"{len(names)} runs"
        lines += [f"{runs} not shown: {reason}", *(f"  {name}" for name in names)]
    return "\n".join(lines)
