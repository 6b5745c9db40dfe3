"""`python -m experiments.compare A B ... [metric=KEY]`: ratios and differences with 95% intervals, on the same replications.

A, B, ...: folders of runs or of capacity searches, or one folder of a sweep over both; the first is what others are compared with. Or
policies, which are run first, with 20 seeds unless seeds=N is given: every other key=value goes to `experiments.run`.

    python -m experiments.compare multirun/noise metric=ttft_seconds.p99
    python -m experiments.compare multirun/caps
    python -m experiments.compare orca sarathi_serve workload=open_loop workload.num_requests=2000 seeds=20

Runs that differ only in the seed are replications of one thing. Two things served the same requests if their workloads differ in
nothing else: then replications are compared in pairs, by seed, which takes out most of the noise. metric: a figure of summary.json.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments import run as run_command
from experiments.capacity.folder import CAPACITY, as_run, capacity_folders
from experiments.config.command_line import run
from experiments.store.intervals import t_quantile
from experiments.store.runs import Run, label_runs, label_seeds, read_runs
from experiments.store.text import COLUMNS, flat, format_number
from experiments.sweep import sweep_folder

_CAPACITY = {"capacity [requests/s]": ("capacity.requests_per_second", 1.0)}
_POWER = 0.84  # standard errors for a chance of 80% that the difference is seen
_MOST = 1_000_000  # replications


class Thing(NamedTuple):
    """What is compared. figures: values by replication, by key. served: equal for things that served the same requests."""

    label: str
    figures: Mapping[str, Mapping[int, float]]
    served: str


class Compared(NamedTuple):
    """ratio, difference: of the second thing to the first: the value and the ends of its interval. needed: replications that would show it."""

    ratio: tuple[float, float, float]
    difference: tuple[float, float, float]
    number: int
    paired: bool
    needed: float

    @property
    def apart(self) -> bool:
        return not self.difference[1] <= 0 <= self.difference[2]


def compare(first: Mapping[int, float], second: Mapping[int, float], paired: bool) -> Compared:
    """Compares means over replications. paired: those with the same number served the same requests.

    The ratio's interval is that of its logarithm, to first order (the delta method).

    Raises:
        ConfigError: fewer than two replications.
    """
    common = sorted(first.keys() & second.keys())
    a, b = np.array(list(first.values())), np.array(list(second.values()))
    if paired := paired and len(common) > 1:
        a, b = np.array([first[key] for key in common]), np.array([second[key] for key in common])
    number = min(len(a), len(b))
    if number < 2:
        raise ConfigError("one replication has no interval; run both with seeds=20, or give folders with several seeds")
    difference, error = float(b.mean() - a.mean()), _error(a, b, paired)
    t = t_quantile(number)
    ends = difference - t * error, difference + t * error
    ratio = float(b.mean() / a.mean()) if a.mean() else math.nan
    relative = t * _error(a / a.mean(), b / b.mean(), paired) if ratio > 0 else math.nan
    needed = number * ((t + _POWER) * error / difference) ** 2 if difference else math.inf
    bounds = (ratio * math.exp(-relative), ratio * math.exp(relative))
    return Compared((ratio, *bounds), (difference, *ends), number, paired, needed if error else number)


def _error(a: Any, b: Any, paired: bool) -> float:
    """The standard error of the difference of two means."""
    if paired:
        return float((b - a).std(ddof=1)) / math.sqrt(len(a))
    return math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_compare, arguments, lambda: str(__doc__))


def _compare(*arguments: str) -> int | None:
    names = [argument for argument in arguments if "=" not in argument or Path(argument).exists()]
    options = [argument for argument in arguments if argument not in names]
    metrics = [option.removeprefix("metric=") for option in options if option.startswith("metric=")]
    others = [option for option in options if not option.startswith("metric=")]
    folders = [Path(name) for name in names if Path(name).is_dir()]
    if len(folders) < len(names):
        if folders or len(names) < 2:
            missing = next((name for name in names if not Path(name).is_dir()), "")
            raise ConfigError(f"compare {missing}: no such folder; give folders of runs, or at least two policies")
        sweep = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_compare"
        if status := _run_policies(names, others, sweep):
            return status
        folders = [sweep_folder(sweep)]
    elif others:
        raise ConfigError(
            f"compare: {others[0]} is for policies that are run first; for folders give metric=KEY or nothing"
        )
    print(report(things_of(folders), metrics))
    return None


def _run_policies(policies: Sequence[str], options: Sequence[str], sweep: str) -> int:
    """Runs each policy with several seeds."""
    seeds = [] if any(option.startswith("seeds=") for option in options) else ["seeds=20"]
    sys.argv[1:] = ["-m", f"policy={','.join(policies)}", *seeds, *options, f"sweep={sweep}"]
    return run_command.main()


def things_of(folders: Iterable[Path]) -> list[Thing]:
    """What the folders hold, in their order: a capacity search each, or the runs that differ only in a seed."""
    searches = [as_run(found) for folder in folders for found in capacity_folders(folder)]
    runs = [found for folder in folders if not list(folder.rglob(CAPACITY)) for found in read_runs(folder)]
    if searches and runs:
        raise ConfigError(
            f"compare: {runs[0].folder} holds runs and {searches[0].folder} a capacity; give folders of one kind"
        )
    if searches:
        return [_search(found, label) for found, label in zip(searches, label_runs(searches), strict=True)]
    groups: dict[str, list[Run]] = {}
    for found, label in zip(runs, label_seeds(runs), strict=True):
        groups.setdefault(label, []).append(found)
    return [_group(label, group) for label, group in groups.items()]


def _search(found: Run, label: str) -> Thing:
    values = dict(enumerate(found.summary["by_replication"]))
    served = _workload(found, [found.summary["capacity"]["requests"]])
    return Thing(label, {key: values for key, _ in _CAPACITY.values()}, served)


def _group(label: str, runs: Sequence[Run]) -> Thing:
    figures: dict[str, dict[int, float]] = {}
    for index, found in enumerate(runs):
        seed = found.settings.get("workload.seed", index)
        for key, value in flat({key: part for key, part in found.summary.items() if key != "about"}):
            if isinstance(value, int | float) and math.isfinite(value):
                figures.setdefault(key, {})[seed] = float(value)
    return Thing(label, figures, _workload(runs[0], []))


def _workload(found: Run, others: Sequence[Any]) -> str:
    """The workload without its seed."""
    keys = {
        key: value for key, value in found.settings.items() if key.startswith("workload.") and key != "workload.seed"
    }
    return json.dumps([keys, others], sort_keys=True, default=str)


def report(things: Sequence[Thing], metrics: Sequence[str]) -> str:
    """Compares all things with the first.

    Raises:
        ConfigError: only one thing, an unknown figure, or one replication.
    """
    if len(things) < 2:
        raise ConfigError(f"compare: only {things[0].label} is there; give the folder of another one too")
    shown = _CAPACITY if "capacity.requests_per_second" in things[0].figures else COLUMNS
    if metrics:
        for key in metrics:
            if key not in things[0].figures:
                raise ConfigError(f"metric={key}: no such figure; {nearest(key, things[0].figures.keys())}")
        shown = {key: (key, 1.0) for key in metrics}
    return "\n\n".join(_pair(things[0], other, shown) for other in things[1:])


def _pair(first: Thing, second: Thing, shown: Mapping[str, tuple[str, float]]) -> str:
    same = first.served == second.served
    found = {
        head: compare(_scale(first.figures[key], factor), _scale(second.figures[key], factor), same)
        for head, (key, factor) in shown.items()
        if key in first.figures and key in second.figures
    }
    if not found:
        raise ConfigError(f"compare: {first.label} and {second.label} have no figure in common; give runs of one kind")
    rows = [[head, _ratio(one), _difference(one), "" if one.apart else _not_apart(one)] for head, one in found.items()]
    some = next(iter(found.values()))
    how = "in pairs, on the same requests" if some.paired else "NOT in pairs: they served different requests"
    title = f"{second.label} over {first.label}: {some.number} replications, {how}"
    return f"{title}\n{tabulate(rows, ['', 'ratio', 'difference', ''], disable_numparse=True)}"


def _scale(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {number: factor * value for number, value in values.items()}


def _ratio(found: Compared) -> str:
    value, low, high = found.ratio
    return "-" if math.isnan(value) else f"{value:.4g}x [{low:.4g}, {high:.4g}]"


def _difference(found: Compared) -> str:
    value, low, high = found.difference
    return f"{'+' if value > 0 else ''}{format_number(value)} [{format_number(low)}, {format_number(high)}]"


def _not_apart(found: Compared) -> str:
    """Says that the two cannot be told apart, and how many replications would show a difference as large as this one."""
    if found.difference == (0, 0, 0):
        return "equal in every replication"
    number = f"about {math.ceil(found.needed):,}" if found.needed < _MOST else f"more than {_MOST:,}"
    return f"cannot be told apart; {number} replications would tell (80% chance, if it is this large)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
