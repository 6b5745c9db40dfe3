"""Reads the complete runs of a folder as one frame, selects runs to show, explains omitted runs, and makes a sweep's table.

All plots, tables and comparisons read runs through this module.
"""

import csv
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import pandas as pd
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.report.conditions import is_extrapolated, is_stated_overload
from experiments.report.headings import COLUMNS, MOST_OF_A_PATTERN, flat, heading_of
from experiments.report.intervals import few_text, mean_of
from experiments.report.labels import chosen_settings, code_text, label_runs, layouts, settings_of, with_given
from experiments.report.notes import notes_of, tail_text
from experiments.report.text import Summary, count_text, figures_text, format_mean, format_number
from experiments.store.claim import read_state
from experiments.store.run_folder import CONFIG, ERRORS, SUMMARY, check_whole, read_summary, run_folders

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, EOFError, BadZipFile, csv.Error, zlib.error)

_MOST_EQUAL = 3  # groups of equal rows that are named below a table

ONE_REPLICATION = (
    "the seed changes nothing here: 1 replication, no interval; draw from a trace's lengths "
    "(workload=traces/azure_conv_lengths workload.lengths.path=FILE), or compare capacities"
)

_RARE = (".preemptions", "hit_share", "recomputed_share", "hidden_share")
"""Ends of the keys of events, which a run may lack."""


def read_runs(folder: str | Path) -> pd.DataFrame:
    """Reads the complete runs in and below a folder: one row per run, in the order of the sweep.

    Columns:
        label: the policy, and other settings that vary, except seeds; repeated runs share a label, as in plots.
        All settings that the run depends on, by key (`policy`, `workload.pd_ratio`), the fields of `about` (`simulated`, ...;
        its `hardware` as `device`), and all figures by group and name (`ttft_seconds.p99`). NaN if a run has no such value.
        backend.pools: if any pool has a role, the replicas of each role, as in `1 prefill + 3 decode`.
        folder: the run's folder, as text. summary: the dictionary of summary.json.
    Raises ConfigError if there is no such folder, it has no complete run, or a file of a run was changed.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder; give the folder of a run or of a sweep")
    if not (folders := run_folders(root)):
        raise ConfigError(f"{root}: holds no finished run; give the folder of a run or of a sweep, or run it again")
    return frame_of((path, _read(path)) for path in folders)


def frame_of(results: Iterable[tuple[Path, Summary]]) -> pd.DataFrame:
    """Makes the frame of `read_runs` from the folders and summaries of results."""

    def place(row: Mapping[str, Any]) -> tuple[str, int, str]:
        """Returns the sweep's folder, the run's number in the sweep, and the date."""
        about = row["summary"]["about"]
        return str(Path(row["folder"]).parent), about.get("number") or 0, about.get("date") or ""

    rows: list[dict[str, Any]] = sorted((_row(*result) for result in results), key=place)
    frame = pd.DataFrame(rows)
    if not frame.empty:
        frame = frame.assign(policy=with_given(frame), **layouts(frame))
        frame.insert(0, "label", label_runs(frame))
    return frame


def _row(folder: Path, summary: Summary) -> dict[str, Any]:
    about = summary["about"]
    code = {**about.get("code", {}), "own": code_text(about)}
    named = {"device" if key == "hardware" else key: value for key, value in {**about, "code": code}.items()}
    facts = flat({key: value for key, value in named.items() if key != "identity"})
    figures = flat({key: part for key, part in summary.items() if key != "about"})
    return {**about["identity"], **dict(facts), **dict(figures), "folder": str(folder), "summary": summary}


def _read(folder: Path) -> Summary:
    with reading(folder / SUMMARY):
        summary = read_summary(folder)
        assert summary is not None, "a run's folder has a summary"
        _ = summary["run"]["counted_requests"], summary["about"]["identity"]  # earlier versions lack them
    check_whole(folder, summary)
    return summary


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises ConfigError if reading `path` within this context fails, since the file was changed after the run."""
    try:
        yield
    except (OSError, *_MALFORMED) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise ConfigError(f"{path}: is damaged ({what}); run it again") from error


class Omitted(NamedTuple):
    """A run that is not shown. name: empty if the run need not be named."""

    name: str
    reason: str


def select_runs(folder: str | Path, text: str) -> tuple[pd.DataFrame, list[Omitted]]:
    """Returns the finished runs that `text` chooses, without repetitions, and the omitted runs of the folder.

    The frame has the columns of `read_runs`, with labels for the chosen runs, and `chosen`, the result of `chosen_settings`.
    """
    every = read_runs(folder)
    runs, repeated = drop_repeats(choose_runs(every, text))
    unfinished = [run for run in find_unfinished(Path(folder)) if _any_in(text, run.name)]
    settings: Any = chosen_settings(every, runs) if text else {}
    return runs.assign(label=label_runs(runs), chosen=[settings] * len(runs)), [*repeated, *unfinished]


def choose_runs(runs: pd.DataFrame, text: str) -> pd.DataFrame:
    """Returns the runs whose folder name, command line or policy contains a text, or any of several: vtc|mlfq. Raises ConfigError without any."""
    names = [Path(folder).name for folder in runs["folder"]]
    given = [",".join(summary["about"]["overrides"]) for summary in runs["summary"]]
    chosen = runs[[_any_in(text, *texts) for texts in zip(names, given, runs["policy"], strict=True)]]
    if chosen.empty:
        whole = ", as values after = are compared whole" * ("=" in text)
        parts = [{*re.sub(r"'|,[^,]*,~[0-9a-f]{8}$", "", name).split(",")} for name in names]  # those not cut off
        known = parts[0].union(*parts) - parts[0].intersection(*parts) or {*names}
        raise ConfigError(f"runs={text}: no folder name contains this{whole}; {nearest(text, known)}")
    return chosen


def _any_in(text: str, *names: str) -> bool:
    """Returns whether a text chooses any of the names. rate=4 does not choose rate=40, policy=sarathi not policy=sarathi_serve.

    The hash at the end of a long name is ignored.
    """
    whole = [re.escape(part) + (r"(?!\.?\w)" if re.search(r"=[^=]*\w$", part) else "") for part in text.split("|")]
    readable = [re.sub(r"'|,~[0-9a-f]{8}$", "", name) for name in names]
    return any(re.search(part, name) for part in whole for name in readable)


def drop_repeats(runs: pd.DataFrame) -> tuple[pd.DataFrame, list[Omitted]]:
    """Separates runs from repetitions: runs with the settings and figures of an earlier run. Returns both.

    For example, a policy without chunks is shown once in a sweep over chunks. Measured runs are never equal.
    """
    texts = settings_of(runs).assign(figures=runs["summary"].map(figures_text))
    repeated = texts.duplicated()
    reason = "each repeats another run: {} does not read what differs"
    policies = [policy.partition("(")[0] for policy in runs.loc[repeated, "policy"]]
    return runs[~repeated], [Omitted("", reason.format(policy)) for policy in policies]


def find_unfinished(root: Path) -> list[Omitted]:
    """Returns the runs in and below a folder that have no readable results: failed, killed, still running, or damaged."""
    reasons: dict[Path, str] = {}
    for file in sorted(root.rglob(ERRORS)):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons |= {file.parent / name: error for name, _, error in (line.partition(": ") for line in lines)}
    for folder in sorted(path.parent for path in root.rglob(CONFIG)):
        state = read_state(folder)
        lost = f"{SUMMARY} is damaged; run it again" if (folder / SUMMARY).exists() else "did not finish"
        reasons.setdefault(folder, state.get("error", "is running, or was killed") if state else lost)
    return [Omitted(path.name, why) for path, why in reasons.items() if read_summary(path) is None]


def print_omitted(omitted: Iterable[Omitted]) -> None:
    """Prints the omitted runs and the reasons to stderr."""
    if text := omitted_text(omitted):
        print(text, file=sys.stderr)


def omitted_text(omitted: Iterable[Omitted]) -> str:
    """Returns a line for each reason, followed by the names of the runs; empty if no run is omitted."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in omitted:
        by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in by_reason.items():
        lines += [f"{count_text(len(names), 'run')} not shown: {reason}", *(f"  {name}" for name in names if name)]
    return "\n".join(lines)


def run_table(
    runs: pd.DataFrame, omitted: Iterable[Omitted] = (), columns: Sequence[str] = COLUMNS, tablefmt: str = "simple"
) -> str:
    """Returns a table of runs, followed by the omitted runs and the origin of the times.

    Runs with the same label, such as runs with several seeds, share a row with means and their 95% intervals. In plain text, shares and counts
    of events that are 0 in all of several rows stand below the table, which is wide. In Markdown, and in a terminal, the runs are columns if that is narrower. Runs with transfers show the longest gap between tokens.

    Args:
        runs: a frame of `read_runs`.
        columns: figures by key or pattern; figures that no run has are left out.
    """
    if "transfers.number" in runs and "longest_gap_seconds.p99" not in columns:
        columns = (*columns, "longest_gap_seconds.p99")  # a wait at a decoder is neither in TTFT nor in a P99 of TBT
    shown = matching(columns, runs, MOST_OF_A_PATTERN)
    groups = [(str(label), rows) for label, rows in runs.groupby("label", sort=False)]
    is_wide = tablefmt == "simple" and len(groups) > 1
    zeros = [key for key in shown if is_wide and key.endswith(_RARE) and not runs[key].any()]
    shown = [key for key in shown if key not in zeros]
    headings, rows, scarce = [heading_of(key) for key in shown], [], list[str]()
    for label, group in groups:
        figures = group[shown].astype(float) * [heading.factor for heading in headings]
        means = [mean_of([*values]) for _, values in figures.items()]
        rows.append([label, *(format_mean(mean, of.kind == "share") for mean, of in zip(means, headings, strict=True))])
        lacking = [(mean, of) for mean, of in zip(means, headings, strict=True) if 0 < mean.number < len(group)]
        fewer = [f"{of.text} {mean.number}" for mean, of in lacking]
        scarce += [f"{label}: {', '.join(fewer)}"] * bool(fewer)
    equal = _equal_texts(groups, [cells for _, *cells in rows])
    heads = ["run", *(heading.text for heading in headings)]
    for head, holds in (("overload [runs]", is_stated_overload), ("extrapolated [runs]", is_extrapolated)):
        counts = [sum(holds(summary["about"]) for summary in group["summary"]) for _, group in groups]
        if 0 < sum(counts) < len(runs):  # of all runs, the notes say it
            heads.append(head)
            for row, number, (_, group) in zip(rows, counts, groups, strict=True):
                row.append(f"{number} of {len(group)}")
    layouts: list[list[Sequence[str]]] = [[heads, *rows]]
    if tablefmt != "simple" or sys.stdout.isatty():
        first, *others = zip(heads, *rows, strict=True)
        parts = [head.replace(", ", ",\n") if tablefmt == "simple" else head for head in first]
        layouts.append([parts, *others])
    table = min((_lay_out(layout, tablefmt) for layout in layouts), key=lambda text: max(map(len, text.splitlines())))
    end = "" if tablefmt == "simple" else "\n"  # Markdown ends a table with an empty line
    tail = tail_text(group["run.counted_requests"].tolist() for _, group in groups)
    origins = notes_of(summary["about"] for summary in runs["summary"])
    replications = _replications_text(dict(groups), any("[" in cell for _, *cells in rows for cell in cells))
    nothing = f"0 in all rows: {', '.join(heading_of(key).text for key in zeros)}" if zeros else ""
    partly = f"runs that have the figure, where some lack it: {'; '.join(scarce)}" * bool(scarce)
    texts = [nothing, price_text(runs, shown), replications, partly, *equal, tail, omitted_text(omitted), *origins]
    return "\n".join(filter(None, [table + end, *texts]))


def _lay_out(lines: Sequence[Sequence[str]], tablefmt: str) -> str:
    """Returns lines of cells as a table whose first line is its heading."""
    head, *body = lines
    aligned = ("left", *["right"] * (len(head) - 1))
    return tabulate(body, head, tablefmt=tablefmt, colalign=aligned, disable_numparse=True)


def price_text(runs: pd.DataFrame, keys: Iterable[str]) -> str:
    """Returns the price that figures of cost rest on; empty if there are none among the keys."""
    if not any(key.startswith("cost.") for key in keys):
        return ""
    least, most = (format_number(price) for price in runs["cost.dollars_per_hour"].agg(["min", "max"]))
    return f"at ${least}{f' to ${most}' if most != least else ''}/h for all GPUs"


def matching(patterns: Iterable[str], runs: pd.DataFrame, most: float = inf) -> list[str]:
    """Returns the columns of the frame that match any pattern and have a value, in the order of the patterns. most: of a pattern, or it is left out."""
    known = [str(column) for column, has_values in runs.notna().any().items() if has_values]
    matches = ([key for key in known if fnmatchcase(key, pattern)] for pattern in patterns)
    return [key for keys in matches if len(keys) <= most for key in keys]


def _equal_texts(groups: Iterable[tuple[str, pd.DataFrame]], cells: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields a line with the rows that are equal in every figure, such as those of a setting without effect, and one with those equal in all shown.

    cells: of each group's row.
    """
    every: dict[tuple[str, ...], list[str]] = {}
    shown: dict[tuple[str, ...], list[str]] = {}
    for (label, group), row in zip(groups, cells, strict=True):
        alike = every.setdefault(tuple(group["summary"].map(figures_text)), [])
        if not alike:  # the others are named with it
            shown.setdefault(tuple(row), []).append(label)
        alike.append(label)
    for where, labels in (("every figure", every), ("every figure shown", shown)):
        equal = [" = ".join(same) for same in labels.values() if len(same) > 1]
        more = [f"{len(equal) - _MOST_EQUAL} more"] * (len(equal) > _MOST_EQUAL)
        if equal:
            yield f"equal in {where}: {'; '.join([*equal[:_MOST_EQUAL], *more])}"


def _replications_text(groups: Mapping[str, pd.DataFrame], cut: bool) -> str:
    """Explains rows that average several runs, and names rows with fewer runs than other rows; empty without such rows.

    cut: whether intervals of shares are shown by their ends.
    """
    several = [group for group in groups.values() if len(group) > 1]
    sizes = [len(group) for group in several if group["summary"].map(figures_text).nunique() > 1]
    equal = len(several) - len(sizes)
    note = f"{ONE_REPLICATION}; so in {equal} of {len(several)} rows" if equal and sizes else ONE_REPLICATION
    if not sizes:
        return note if equal else ""
    fewer = "; ".join(f"{label}: {len(group)}" for label, group in groups.items() if len(group) < max(sizes))
    number = f"{max(sizes)} runs" + (f" (fewer: {fewer})" if fewer else "")
    ends = " (of shares near 0 or 100%: [its ends, cut there])" * cut
    text = f"mean ± half of the 95% interval{ends} over {number}; percentiles are computed per run, then averaged"
    return "\n".join(filter(None, [text, few_text(sizes), note if equal else ""]))
