"""Labels of the runs of a sweep that a plot shows, and averages over repeated ones."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pandas as pd

from cbatch import ConfigError
from experiments.plots.style import MOST_SERIES
from experiments.store.intervals import Mean, linear_ends, mean_of
from experiments.store.runs import Run, label_runs, seed_keys
from experiments.store.selection import Omitted, say, select_runs
from experiments.store.tables import as_frame, load_requests
from experiments.store.text import figures_text

RATE = "workload.arrivals.rate"
SPEEDS = ("workload.speed", "workload.rate_scale")  # of a trace: the rate itself is that of its requests


_MOST_RUNS = 8


def load_runs(folder: Path, text: str = "", most: int = _MOST_RUNS) -> pd.DataFrame:
    """The finished runs in a folder that `text` chooses, each with a label of its own. Says which it leaves out, and why.

    Raises:
        ConfigError: there are none, or more than `most`.
    """
    runs, omitted = select_runs(folder, text)
    if len(runs) > most:
        limit = "one run" if most == 1 else f"at most {most} runs"
        choice = "give the folder of one, or choose with runs=TEXT, a part of folder names"
        raise ConfigError(f"this plot shows {limit}, the folder holds {len(runs)}; {choice}")
    say(omitted)
    return _with_about(as_frame(runs).assign(label=label_runs(runs)), runs)


def load_series(
    folder: Path, text: str, without: Iterable[str], varying: Sequence[str] = (), example: str = ""
) -> pd.DataFrame:
    """Like `load_runs`, but runs that differ only in a seed or in the settings `without` have the same label.

    Args:
        varying: settings of which one must have several values; example: such values.

    Raises:
        ConfigError: there are none, or more than `MOST_SERIES` labels, or none of the settings varies.
    """
    runs, omitted = select_runs(folder, text)
    frame = as_frame(runs).assign(label=label_runs(runs, {*without, *seed_keys(runs)}, apart=False))
    if varying:
        swept(frame, varying, folder, example)
    if (count := frame["label"].nunique()) > MOST_SERIES:
        most = f"this plot shows at most {MOST_SERIES} series, the folder holds {count}"
        raise ConfigError(f"{most}; choose with runs=TEXT, a part of folder names")
    say(omitted)
    return _with_about(frame, runs)


def _with_about(frame: pd.DataFrame, runs: Sequence[Run]) -> pd.DataFrame:
    """With a column for the notes below a plot, and one of all figures as text."""
    about = pd.Series([run.about for run in runs], frame.index, dtype=object)
    return frame.assign(about=about, figures=[figures_text(run.summary) for run in runs])


def load_rates(folder: Path, text: str) -> pd.DataFrame:
    """The runs of a sweep of request rates, as `load_series` labels them; the workload is not part of the label.

    Columns of their own: `rate`, requests per second, and `of`, the name of the workload without its arguments.

    Raises:
        ConfigError: as `load_series`, or there is one rate only.
    """
    keys = (RATE, *SPEEDS)
    frame = load_series(folder, text, (*keys, "workload"), keys, "1,2,4,8")
    frame = frame.assign(of=frame["workload"].str.partition("(")[0])
    rates = pd.concat([_rates(runs) for _, runs in frame.groupby("of")])
    return leave_out(frame.assign(rate=rates), ("rate",))


def _rates(frame: pd.DataFrame) -> "pd.Series[float]":
    """Requests per second of one workload's runs: as set, or the mean of those that arrived at the same speed."""
    for key in (key for key in (RATE, *SPEEDS) if key in frame and frame[key].nunique() > 1):
        if key == RATE:
            return frame[key]
        arrivals = frame["folder"].map(lambda folder: load_requests(folder)["arrival"])
        rates = arrivals.map(lambda times: (len(times) - 1) / (times.max() - times.min()))
        return rates.groupby(frame[key]).transform("mean")
    return pd.Series(float("nan"), frame.index)


def swept(frame: pd.DataFrame, keys: Sequence[str], folder: Path, example: str) -> str:
    """The first of the settings that has several values.

    Raises:
        ConfigError: none has; example: values to give it.
    """
    for key in keys:
        if key in frame and frame[key].nunique() > 1:
            return key
    raise ConfigError(f"{folder}: needs runs with several values of {keys[0]}; sweep it with -m {keys[0]}={example}")


def leave_out(frame: pd.DataFrame, columns: Iterable[str]) -> pd.DataFrame:
    """The rows that have a value in each column. Says which others are left out."""
    for column in columns:
        missing = frame[column].isna()
        say([Omitted(Path(path).name, f"has no {column}") for path in frame.loc[missing, "folder"]])
        frame = frame[~missing]
    return frame


Ends = Callable[[Mean], tuple[float, float]]


def summarize_series(frame: pd.DataFrame, x: str, y: str, ends: Ends = linear_ends) -> pd.DataFrame:
    """Mean of column y over the repeated runs at each x, and its 95% interval, by label and ascending x: columns x, mean, low, high.

    ends: of the interval, by the scale on which it is one.
    """
    rows = []
    for (label, place), values in frame.groupby(["label", x], sort=True)[y]:
        found = mean_of(values.tolist())
        low, high = ends(found) if found.number > 1 else (found.mean, found.mean)
        rows.append({"label": label, x: place, "mean": found.mean, "low": low, "high": high})
    return pd.DataFrame(rows).set_index("label")


def describe_points(frame: pd.DataFrame, x: str) -> str:
    """What a point represents, for a heading; empty if one run."""
    points = frame.groupby(["label", x])
    sizes = points.size()
    number = f"{sizes.min()}" if sizes.min() == sizes.max() else f"up to {sizes.max()}"
    if sizes.max() > 1 and "figures" in frame and points["figures"].nunique().max() == 1:
        return f"{number} equal runs per point: the seed changes nothing"
    return f"mean and 95% interval of {number} runs per point" if sizes.max() > 1 else ""


def coincide_text(frame: pd.DataFrame, columns: Iterable[str]) -> str:
    """Which labels have the same lines: equal values of these columns in their runs, in the same order; empty if none do."""
    shown = frame[list(columns)]
    same: dict[str, list[str]] = {}
    for label, rows in shown.groupby(frame["label"], sort=False):
        same.setdefault(rows.to_json(orient="values", double_precision=15), []).append(str(label))
    return "; ".join(f"{' and '.join(labels)} coincide" for labels in same.values() if len(labels) > 1)
