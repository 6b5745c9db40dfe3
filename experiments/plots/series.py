"""Selects, labels and places the runs that a plot shows, and computes means and ratios over repeated runs."""

import math
import re
from collections.abc import Collection, Hashable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from cbatch import ConfigError
from cbatch.described import without_shared
from cbatch.results.attainment import OBJECTIVES
from cbatch.validation import check_known
from experiments.plots.axes import FUTURE, Axis
from experiments.plots.style import MOST_SERIES, PLAIN, Look, visible
from experiments.report.headings import OFFERED, heading_of
from experiments.report.intervals import compare, mean_of
from experiments.report.labels import is_argument, label_runs, whole_key
from experiments.report.replications import with_replications
from experiments.report.text import count_text, figures_text
from experiments.store.runs import Omitted, print_omitted, select_runs

_MOST_NAMES = 8  # of omitted runs that have no value
_POINT = ["label", "x", "mean", "low", "high"]


def load_runs(folder: Path, look: Look = PLAIN, most: int = 8) -> pd.DataFrame:
    """Reads the finished runs in a folder that `look.runs` chooses, each with a unique label. Prints the omitted runs.

    Raises ConfigError if there are no such runs, or more than `most`.
    """
    runs, omitted = select_runs(folder, look.runs)
    if len(runs) > most:
        shown = f"this plot shows at most {count_text(most, 'run')}, the folder holds {len(runs)}"
        raise ConfigError(f"{shown}; give the folder of one run, or choose with runs=TEXT, a part of folder names")
    print_omitted(omitted)
    return _arrange(runs.assign(label=label_runs(runs, apart=True)), look)


def load_series(folder: Path, look: Look = PLAIN, shown: Collection[str] = ()) -> pd.DataFrame:
    """Reads the finished runs that `look.runs` chooses. Prints the omitted runs.

    Runs that differ only in seeds, or in the settings `shown`, share a label. If all labels would begin with the same policy, the
    policy moves to the column `heading`; arguments that all lines of a policy share are left out. shown: keys, or last parts of keys, which become columns.
    Raises ConfigError if there are no such runs.
    """
    runs, omitted = select_runs(folder, look.runs)
    whole = {key: whole_key(key, runs) for key in shown}
    runs = runs.assign(**{key: runs[name] for key, name in whole.items() if name in runs})
    runs = runs.assign(written=runs["policy"], policy=runs["policy"].map(without_shared(runs["policy"].unique())))
    if any(map(is_argument, whole.values())):
        runs = runs.assign(policy=runs["policy"].str.partition("(")[0])  # as in labels; other arguments follow it there
    labels = label_runs(runs, [*whole.values()])
    policy = str(runs["policy"].iloc[0])
    shared = labels.nunique() > 1 and (labels + ", ").str.startswith(f"{policy}, ").all()
    shared = shared or labels.str.startswith(f"{policy}, ").all()
    labels = _named(labels.str.removeprefix(policy).str.removeprefix(", ")) if shared else labels
    print_omitted(omitted)
    names = {str(value) for key in shown if key in runs for value in runs[key].unique()}
    return _arrange(runs.assign(label=labels, heading=policy if shared else ""), look, names)


def without_policies(runs: pd.DataFrame, look: Look) -> pd.DataFrame:
    """Returns the runs with labels that do not begin with the policy."""
    names = [look.labels.get(policy, policy) for policy in runs["policy"]]
    labels = [label.removeprefix(name).removeprefix(", ") for label, name in zip(runs["label"], names, strict=True)]
    return runs.assign(label=_named(pd.Series(labels, runs.index)))


def _named(labels: "pd.Series[str]") -> "pd.Series[str]":
    """Names runs with an empty label by the settings that the others have and they lack: `without p.replicas`."""
    keys = dict.fromkeys(re.findall(r"(?:^|, )([\w.]+)=", "\n".join(labels), re.MULTILINE))
    return labels.replace("", f"without {', '.join(keys)}") if keys else labels


def check_few(runs: pd.DataFrame) -> None:
    """Raises ConfigError for more than `MOST_SERIES` labels."""
    if (count := runs["label"].nunique()) > MOST_SERIES:
        most = f"this plot shows at most {MOST_SERIES} series, the folder holds {count}"
        raise ConfigError(f"{most}; choose with runs=TEXT, a part of folder names")


def _arrange(runs: pd.DataFrame, look: Look, names: Collection[str] = ()) -> pd.DataFrame:
    """Returns the runs with the user's labels, in the user's order. names: texts on axes, which the user may also rename."""
    known, labels = list(dict.fromkeys(runs["label"])), runs["label"].replace(dict(look.labels))
    for part, text in look.labels.items():
        pattern = rf"(?<![\w.]){re.escape(part)}(?![\w.])"  # a whole part of labels: chunk=2 does not match chunk=256
        if part not in (*known, *names) and not any(re.search(pattern, label) for label in known):
            check_known([part], known, "labels: ")
        if part not in known:
            labels = labels.str.replace(pattern, text.replace("\\", r"\\"), regex=True)
    check_known(look.order, [*known, *look.labels.values()], "order: ")
    first = [look.labels.get(label, label) for label in look.order]
    ranks = labels.map(lambda label: first.index(label) if label in first else len(first))
    return runs.assign(label=labels.map(visible)).loc[ranks.sort_values(kind="stable").index]


def leave_out(runs: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """Returns the rows that have a value in each column. Prints the number of omitted runs, and their names if they are few."""
    for column in columns:
        missing = runs[column].isna()
        is_named = int(missing.sum() <= _MOST_NAMES)
        print_omitted(Omitted(Path(path).name * is_named, f"has no {column}") for path in runs.loc[missing, "folder"])
        runs = runs[~missing]
    return runs


def points_of(runs: pd.DataFrame, x: str, key: str) -> pd.DataFrame:
    """Returns the mean of a figure over the repeated runs at each x, and its 95% interval, in the unit of its heading, cut at 0 and 100% of a share.

    Returns:
        Columns label, x, mean, low, high; rows by label in order of appearance, then by ascending x. For a single run, low and
        high are NaN.
    """
    heading, rows = heading_of(key), []
    for (label, place), repeated in _repeated(runs, x, key).items():
        mean = mean_of(repeated[key].astype(float).tolist())
        values = mean.mean, mean.mean - mean.half, mean.mean + mean.half
        rows.append((label, place, *np.clip([heading.factor * value for value in values], *heading.limits)))
    return pd.DataFrame(rows, columns=_POINT)


def _lacking(runs: pd.DataFrame, x: str) -> "pd.Series[bool]":
    """Returns which runs have no setting x, so that they are level lines. Settings of the workload change the requests: False."""
    if x not in runs or x.startswith("workload."):
        return pd.Series(False, runs.index)
    names = [summary["about"]["identity"] for summary in runs["summary"]]
    absent = [not any(f".{key}".endswith(f".{x}") for key in identity) for identity in names]
    return runs[x].isna() & (is_argument(x) | pd.Series(absent, runs.index))


def place(runs: pd.DataFrame, x: str, axis: Axis) -> pd.DataFrame:
    """Returns the runs at their x, those that do not read it at each x of the others.

    Adds the columns of (the workload), level (whether x is not read), served, replication and requests.
    """
    reads = (runs.get("eviction", pd.Series("", runs.index)) == "belady") & (x != "eviction")
    labels = runs["label"].where(~reads, runs["label"] + FUTURE)
    level = _lacking(runs, x)
    if not is_argument(x):
        of_run = x.rpartition(".")[2] in ("replicas", "role")  # as in `4 both`, where pools have the setting
        without = runs.get("backend.pools", f"without {x}") if of_run else f"without {x}"
        labels = labels.where(~level, labels + ", " + without)
    runs = runs.assign(of=runs["workload"].str.partition("(")[0], label=labels, level=level)
    runs[["served", "replication"]] = with_replications(runs.assign(source=""))[["served", "replication"]]
    runs["requests"] = list(zip(runs["served"], runs["replication"], strict=True))
    own = _places(runs, x, axis)
    everywhere = own.dropna().unique()
    places = [everywhere if level else [place] for level, place in zip(runs["level"], own, strict=True)]
    spread = runs.loc[runs.index.repeat([*map(len, places)])]
    return spread.assign(**{x: np.concatenate(places)}).reset_index(drop=True)


def _places(runs: pd.DataFrame, x: str, axis: Axis) -> "pd.Series[float]":
    """Returns the x of each run: the first of the axis's settings that varies between the runs of its workload.

    Rates are measured: means over runs with equal settings of the workload. Raises ConfigError if no run has a rate.
    """
    places = pd.Series(float("nan"), runs.index)
    if x == "rate" and OFFERED in runs:
        places = runs.groupby(["of", "served"])[OFFERED].transform("mean")
    for _, rows in runs.groupby("of") if x != "rate" else ():
        if key := next((key for key in axis.keys if key in rows and rows[key].nunique() > 1), None):
            numbers = pd.to_numeric(rows[key], errors="coerce")
            if axis.categories:
                numbers = rows[key].map([*axis.categories].index, na_action="ignore")
            places[rows.index] = numbers
    if places.isna().all() and x == "rate":
        problem = "requests arrive together, without a rate, or an earlier version served them"
        raise ConfigError(f"x={x}: {problem}; give a setting that has, or draw `table`")
    return places


def describe_objectives(runs: pd.DataFrame) -> str:
    """Returns the objectives that all runs share, as in `TTFT 0.5 s, every gap 0.05 s`; of tiers after their names."""
    texts: dict[str, str] = {}
    for pattern in (r"workload\.(?:tiers\.(.+)\.)?slo\.(\w+)", r"metrics\.()objectives\.(\w+)"):
        for key, values in runs.items():
            found = re.fullmatch(pattern, str(key))
            if found and found[2] in OBJECTIVES and values.notna().all() and values.nunique() == 1:
                before = texts.get(tier := found[1] or "", f"{tier} " * bool(tier))
                text = f"{OBJECTIVES[found[2]]} {values.iloc[0]:g} s"
                texts[tier] = f"{before}, {text}" if tier in texts else f"{before}{text}"
        if texts:  # those of metrics stand only if requests have none
            break
    return "; ".join(texts.values())


def ratios_of(runs: pd.DataFrame, x: str, key: str, over: str) -> pd.DataFrame:
    """Returns the ratio of a figure to the same figure of label `over` at each x, and the 95% interval of `experiments.compare`.

    Returns:
        Columns of `points_of`, if the mean of `over` is not 0. With fewer than two pairs of runs with equal requests, low and high are NaN.

    Args:
        runs: with a column `requests`, equal in runs that served the same requests.
    """
    repeated, rows = _repeated(runs, x, key), []
    for (label, place), second in repeated.items():
        if (first := repeated.get((over, place))) is not None:
            rows.append((label, place, *_ratio(first, second, key)))
    return pd.DataFrame(rows, columns=_POINT).dropna(subset="mean")


def _repeated(runs: pd.DataFrame, x: str, key: str) -> dict[tuple[Hashable, ...], pd.DataFrame]:
    """Groups the runs that have a figure by (label, x): labels in order of appearance, x ascending."""
    in_order = runs["label"].astype(pd.CategoricalDtype(runs["label"].unique().tolist()))
    return dict(iter(runs.dropna(subset=key).groupby([in_order, x], observed=True)))


def _ratio(first: pd.DataFrame, second: pd.DataFrame, key: str) -> tuple[float, float, float]:
    """Returns the ratio of the means, second over first, and the ends of its interval; NaN if undefined."""
    before, after = (dict(zip(runs["requests"], runs[key].astype(float), strict=True)) for runs in (first, second))
    if min(len(before), len(after)) > 1 and (compared := compare(before, after, paired=True)).paired:
        return compared.ratio
    base = float(first[key].mean())
    return float(second[key].mean()) / base if base else math.nan, math.nan, math.nan


def describe_points(runs: pd.DataFrame, x: str, shown: str = "mean and 95% interval") -> str:
    """Describes the runs behind each point and what is shown of them, for a heading; empty if each point is a single run."""
    points = runs.assign(figures=runs["summary"].map(figures_text)).groupby(["label", x])
    sizes = points.size()
    if sizes.max() == 1:
        return ""
    number = f"{sizes.min()}" if sizes.min() == sizes.max() else f"up to {sizes.max()}"
    if points["figures"].nunique().max() == 1:
        return f"{number} equal runs per point: the seed changes nothing"
    return f"{shown} of {number} runs per point"
