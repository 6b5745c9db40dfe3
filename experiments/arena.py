"""`python -m experiments.arena key=value ...`: a leaderboard of policies on traces, loads and objectives. `--help` lists all keys.

The arena is a sweep of ordinary runs with `workload.load=`, one run per replication. The same command resumes the sweep, and
another command adds runs to it. The page shows all runs in the sweep's folder.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd

from cbatch import ConfigError
from cbatch.validation import parse, whole
from experiments.capacity.command import SimulatedKeys, SimulatedSettings, slo_text
from experiments.job import Command
from experiments.report.headings import heading_of
from experiments.report.intervals import compare, mean_of
from experiments.report.labels import is_seed, label_runs, settings_of
from experiments.report.notes import made_text, notes_of
from experiments.run import main, run_sweep
from experiments.settings.command_line import HELP, exit_status
from experiments.settings.settings import read_as
from experiments.store.provenance import write_text
from experiments.store.run_folder import ERRORS, run_folders
from experiments.store.runs import read_runs
from experiments.sweep import FailedRunsError, sweep_folder

_READING = (
    "Load: the request rate over the highest that any policy can sustain (B3). attained: share of the requests that meet all "
    "of their objectives, mean and ± half of the 95% interval over replications; best: does not differ significantly from the best "
    "policy of the cell, paired by replication, which is weak evidence with few replications. latency / bound: mean end-to-end latency over "
    "what no policy can beat (B6). The ranking's means are over the cells that all policies have, without an interval."
)

CELL = ["trace", "slo", "load"]
ATTAINED, LATENCY, FOUND = "attained [%]", "latency / bound", "found in cache [%]"
_KEYS = (
    *("attainment.share", "regret.latency", "regret.violations", "ttft_seconds.p50", "ttft_seconds.p99"),
    *("tbt_seconds.p99", "prefix_cache.hit_share", "run.preemptions"),
)
FIGURES = {heading_of(key).text: key for key in _KEYS}  # columns: keys of figures in summary.json by heading

_SHOWN_APART = ("load", "slo", "workload")  # have separate columns


def count_runs(root: Path) -> str:
    return f"{len(run_folders(root))} runs"


def page_of(root: Path) -> str:
    """Returns the page about the finished runs in and below a folder: tables, the origin of the figures, and failed runs."""
    runs = read_runs(root)
    abouts = [summary["about"] for summary in runs["summary"]]
    seconds = sum(about["wall_seconds"] for about in abouts)
    origin = f"{len(abouts)} runs, {seconds:,.0f} s, {made_text(abouts)}"
    errors = [line for file in sorted(root.rglob(ERRORS)) for line in file.read_text(encoding="utf-8").splitlines()]
    notes = [origin, *notes_of(abouts), *(f"not finished: {line}" for line in errors)]
    return markdown(_cells(_replications(runs)), notes)


def rank(cells: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per policy with means over the cells that all policies have, highest attainment first."""
    complete = cells.groupby(CELL)["policy"].transform("nunique") == cells["policy"].nunique()
    means = {ATTAINED: (ATTAINED, "mean"), "best": ("best", "sum"), "cells": ("best", "size")}
    means[LATENCY] = LATENCY, "mean"
    ranked = cells[complete].groupby("policy", as_index=False).agg(**means)
    return ranked.sort_values(ATTAINED, ascending=False, kind="stable", ignore_index=True)


def markdown(cells: pd.DataFrame, notes: Sequence[str]) -> str:
    tables = ("Ranking", rank(cells)), ("Cells", cells)
    parts = [f"## {heading}\n\n{frame.to_markdown(index=False, floatfmt='.4g')}" for heading, frame in tables]
    return "\n\n".join(["# Arena of scheduling policies", _READING, *parts, *notes]) + "\n"


def _replications(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per run with policy (and settings that vary and have no column), cell, seed and figures."""
    shown = [key for key in map(str, runs) if key.split(".")[0] in _SHOWN_APART]
    slos = []
    for overrides in (summary["about"]["overrides"] for summary in runs["summary"]):
        given = dict(override.partition("=")[::2] for override in overrides)
        slos.append(slo_text(given.get("slo", "strict"), overrides))
    place = {"policy": label_runs(runs, shown), "trace": _traces(runs, slos), "slo": slos}
    cell = {"load": runs["load.load"], "rate": runs["load.rate"], "seed": runs["workload.seed"]}
    figures = {name: heading_of(key).factor * runs.get(key, np.nan) for name, key in FIGURES.items()}
    return pd.DataFrame({**place, **cell, **figures})


def _traces(runs: pd.DataFrame, slos: Sequence[str]) -> "pd.Series[str]":
    """Returns the workload of each run, with the workload's settings that differ between its runs of equal objectives and load."""
    traces = names = runs["workload"].str.removeprefix("traces/")
    cells, settings = [names, pd.Series(slos, runs.index), runs["load.load"]], settings_of(runs)
    for key in map(str, settings):
        if key.startswith("workload.") and not is_seed(key):
            differs = settings[key].groupby(cells).transform("nunique", dropna=False) > 1
            traces = traces + (f", {key.removeprefix('workload.')}=" + settings[key].fillna("null")).where(differs, "")
    return traces


def _cells(replications: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per policy and cell, highest attainment first. Comparisons pair replications, which have the same requests.

    Columns: `policy`, the columns of `CELL`, `rate` in requests per second; `best`, whether the policy does not differ significantly from
    the best; for each figure the mean over replications, as `NAME`, and half of its 95% interval, as `NAME ±`.
    """
    cells = []
    for place, group in replications.groupby(CELL):
        by_seed = {policy: rows.set_index("seed") for policy, rows in group.groupby("policy")}
        whole = max(map(len, by_seed.values()))  # some runs may have failed
        complete = [rows[ATTAINED] for rows in by_seed.values() if len(rows) == whole]
        best = max(complete, key=lambda shares: float(shares.mean())).to_dict()
        for policy, rows in by_seed.items():
            attained = rows[ATTAINED].to_dict()
            cell = {"policy": policy, **dict(zip(CELL, place, strict=True)), "rate": rows["rate"].iloc[0]}
            cell["best"] = len(attained) < 2 or compare(best, attained, paired=True).difference[2] >= 0
            for name in FIGURES:
                cell[name], cell[f"{name} ±"], _ = mean_of(rows[name].tolist())
            cells.append(cell)
    order, ascending = [*CELL, ATTAINED], [True, True, True, False]
    frame = pd.DataFrame(cells)
    if frame[FOUND].isna().all():  # without a prefix cache
        frame = frame.drop(columns=[FOUND, f"{FOUND} ±"])
    return frame.sort_values(order, ascending=ascending, kind="stable", ignore_index=True)


_OWN = ("-m", "--multirun", "sweep=", "replications=")

COMMAND = Command("arena", partial(read_as, SimulatedSettings, SimulatedKeys), table=count_runs)


def arena(arguments: Sequence[str]) -> int:
    """Runs the command line. Returns its exit status."""
    if HELP & {*arguments}:
        return main(arguments, COMMAND)
    return exit_status(partial(_arena, arguments), "")


def _arena(arguments: Sequence[str]) -> int:
    keys = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    folder_of_traces = keys.get("traces", "traces")
    if "traces/" in keys.get("workload", "traces/") and not Path(folder_of_traces).is_dir():
        problem = "no such folder; give the one with the published traces, or workload="
        raise ConfigError(f"traces={folder_of_traces}: {problem}")
    replications = parse(Annotated[int, whole(2, 10_000)], keys.get("replications", "5"), "replications")
    sweep = keys.get("sweep", "arena").removesuffix("/runs")
    runs = [argument for argument in arguments if not argument.startswith(_OWN)]
    runs += [] if "experiment" in keys else ["experiment=arena"]
    runs += ["slo=none"] if "slo" not in keys and any(key.startswith("slo.") for key in keys) else []
    seeds = f"workload.seed={','.join(map(str, range(replications)))}"
    try:
        run_sweep([*runs, f"workload.replications={replications}", seeds, f"sweep={sweep}/runs"], COMMAND)
    except FailedRunsError:
        _write_page(sweep_folder(sweep))
        raise
    _write_page(sweep_folder(sweep))
    return 0


def _write_page(folder: Path) -> None:
    if run_folders(folder):
        print(write_text(folder / "arena.md", page_of(folder)))


if __name__ == "__main__":
    sys.exit(arena(sys.argv[1:]))
