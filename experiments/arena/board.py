"""The cells and capacities of a folder as tables, with the policies that cannot be told apart from the best one of each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from experiments.capacity.folder import read_searches
from experiments.store.intervals import compare, mean_of
from experiments.store.notes import notes_of
from experiments.store.run_folder import run_folders
from experiments.store.runs import ERRORS, Run, label_runs, read_runs
from experiments.store.text import flat

CELL = ["trace", "slo", "load"]
ATTAINED, LATENCY = "attained [%]", "latency / bound"
FIGURES = {
    ATTAINED: ("attainment.share", 100.0),
    LATENCY: ("regret.latency", 1.0),
    "violations over bound": ("regret.violations", 1.0),
    "TTFT p50 [s]": ("ttft_seconds.p50", 1.0),
    "TTFT p99 [s]": ("ttft_seconds.p99", 1.0),
    "TBT p99 [ms]": ("tbt_seconds.p99", 1e3),
    "preemptions": ("run.preemptions", 1.0),
}
"""Columns: the key of a figure in summary.json, and the factor of its unit."""

_SHOWN_APART = ("load", "slo", "workload", "accuracy", "cores")  # have columns of their own, or change no figure


@dataclass(frozen=True, eq=False)
class Board:
    """What the pages show.

    cells: a row per policy and cell, the highest attainment first: the columns of `CELL`; `rate` in requests per second; `best`,
        whether the policy cannot be told apart from the best one; of each figure the mean over the replications, as `NAME`, and
        half of its 95% interval, as `NAME ±`.
    capacities: a row per search: `rate`, `low` and `high` in requests per second; `of_bound`, a share, NaN without a bound.
    notes: where the figures come from, and what failed.
    """

    cells: pd.DataFrame
    capacities: pd.DataFrame
    notes: Sequence[str]


def read_board(root: Path) -> Board:
    """Reads what is finished in and below a folder."""
    runs, searches = read_runs(root) if run_folders(root) else [], read_searches(root)
    rows = [_replication(run, label) for run, label in zip(runs, _labels(runs), strict=True)]
    capacities = [_capacity(run, label) for run, label in zip(searches, _labels(searches), strict=True)]
    abouts = [run.about for run in (*runs, *searches)]
    notes = [_describe_origin(abouts), *notes_of(abouts), *_failed(root)]
    return Board(_cells(pd.DataFrame(rows)), _sort(pd.DataFrame(capacities), ["trace", "slo", "rate"]), notes)


def rank(cells: pd.DataFrame) -> pd.DataFrame:
    """Returns a row per policy: means over the cells that all policies have, the highest attainment first."""
    complete = cells.groupby(CELL)["policy"].transform("nunique") == cells["policy"].nunique()
    means = {
        ATTAINED: (ATTAINED, "mean"),
        "best": ("best", "sum"),
        "cells": ("best", "size"),
        LATENCY: (LATENCY, "mean"),
    }
    return _sort(cells[complete].groupby("policy", as_index=False).agg(**means), [ATTAINED])


def _labels(runs: Sequence[Run]) -> list[str]:
    """Returns the policies, and what else varies among runs of one kind that has no column of its own."""
    keys = {key for run in runs for key in run.settings if key.split(".")[0] in _SHOWN_APART}
    return label_runs(runs, {*keys, *_SHOWN_APART}, apart=False)


def _place(run: Run, label: str, slo: str) -> dict[str, Any]:
    """Returns the first columns of a row. slo: the default of the command."""
    overrides = [override.partition("=")[::2] for override in run.about["overrides"]]
    changed = [f"{key}={value}" for key, value in overrides if key.startswith("slo.")]
    name = dict(overrides).get("slo", slo)
    slo = " ".join(changed if name == "none" and changed else [name, *changed])
    return {"policy": label, "trace": str(run.about["workload"]).removeprefix("traces/"), "slo": slo}


def _replication(run: Run, label: str) -> dict[str, Any]:
    figures = dict(flat(run.summary))
    columns = {name: factor * figures.get(key, np.nan) for name, (key, factor) in FIGURES.items()}
    load, rate = (run.about["load"][key] for key in ("load", "rate"))
    place = _place(run, label, "strict")
    return {**place, "load": load, "rate": rate, "seed": run.settings["workload.seed"], **columns}


def _capacity(run: Run, label: str) -> dict[str, Any]:
    figures, regret = run.summary["capacity"], run.summary.get("regret", {})
    ends = {"rate": figures["requests_per_second"], "low": figures["low"], "high": figures["high"]}
    return {**_place(run, label, "none"), **ends, "of_bound": regret.get("capacity", np.nan)}


def _cells(replications: pd.DataFrame) -> pd.DataFrame:
    """Returns means over replications. Policies are compared in pairs of replications, which have the same requests."""
    cells = []
    for place, group in replications.groupby(CELL) if len(replications) else ():
        attained = {policy: own.set_index("seed")[ATTAINED].to_dict() for policy, own in group.groupby("policy")}
        best = max(attained.values(), key=lambda shares: fmean(shares.values()))
        for policy, own in group.groupby("policy"):
            as_good = attained[policy] == best or not compare(best, attained[policy], paired=True).apart
            cell = {
                "policy": policy,
                **dict(zip(CELL, place, strict=True)),
                "rate": own["rate"].iloc[0],
                "best": as_good,
            }
            for name in FIGURES:
                cell[name], cell[f"{name} ±"], _ = mean_of(own[name].tolist())
            cells.append(cell)
    return _sort(pd.DataFrame(cells), [*CELL, ATTAINED])


def _sort(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Sorts rows by the columns; by the last one from the highest value on."""
    ascending = [True] * (len(columns) - 1) + [False]
    return frame if frame.empty else frame.sort_values(columns, ascending=ascending, kind="stable", ignore_index=True)


def _describe_origin(abouts: Sequence[Mapping[str, Any]]) -> str:
    """Returns how much was simulated, when, and by which code."""
    seconds = sum(about["wall_seconds"] for about in abouts)
    days = sorted({str(about["date"])[:10] for about in abouts})
    commits = sorted({str(about["commit"])[:12] for about in abouts})
    span = " to ".join(dict.fromkeys((days[0], days[-1])))
    return f"{len(abouts)} runs and searches, {seconds:,.0f} s, {span}, commit {', '.join(commits)}"


def _failed(root: Path) -> list[str]:
    """Returns what the sweeps could not do, by their errors."""
    lines = [line for file in sorted(root.rglob(ERRORS)) for line in file.read_text(encoding="utf-8").splitlines()]
    return [f"not finished: {line}" for line in lines]
