"""`python -m experiments.compare A B ... [key=value ...]`: ratios and differences with 95% intervals, on the same replications.

A, B, ...: folders of runs or of capacity searches, or one folder of a sweep over both. Or policies, with arguments in
parentheses as in a sweep, which are run first, with 20 seeds unless seeds=N is given: other keys go to `experiments.run`.

    python -m experiments.compare multirun/noise metric=ttft_seconds.p99
    python -m experiments.compare multirun/rates baseline=sarathi_serve runs=rate=8
    python -m experiments.compare orca 'sarathi_serve(chunking=fixed)' workload=open_loop workload.arrivals.rate=25 batch=64 seeds=10

  metric=KEY         a figure of summary.json instead of those of tables; may be given several times
  baseline=POLICY    what others are compared with, at equal chunks, and its own other chunks with its first; or one thing's
                     printed label; without it, what is given first
  runs=TEXT          only runs whose folder names or command lines contain this

Runs that differ only in the seed are replications of one thing. Things are compared with the baseline that has the same settings
apart from the policy's: in a sweep of request rates, at each rate. Two things served the same requests if their workloads
differ in nothing else: then replications are compared in pairs, by seed, which takes out most of the noise. Whether two things can
be told apart is decided by the interval of the difference; that of the ratio is of its logarithm, and may disagree with few seeds.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments import run as run_command
from experiments.capacity.folder import RESULT, read_searches
from experiments.objective import known_figures, may_exist, no_such_figure
from experiments.settings.choices import option_names
from experiments.settings.command_line import run
from experiments.store.differences import difference_text, disagree, not_apart, ratio_text, signed, times
from experiments.store.intervals import compare
from experiments.store.notes import notes_of, tail_text
from experiments.store.runs import Run, label_runs, label_seeds, seed_keys
from experiments.store.selection import choose_runs, say, select_runs
from experiments.store.text import COLUMNS, ONE_REPLICATION, all_equal, family, flat, is_named, policy_name
from experiments.sweep import sweep_folder

_OPTIONS = ("metric", "baseline", "runs")
_CAPACITY = {"capacity [requests/s]": ("capacity.requests_per_second", 1.0)}
_WHICH_DECIDES = "the interval of the difference decides; that of the ratio, of its logarithm, disagrees in a row above"


class Thing(NamedTuple):
    """What is compared.

    figures: values by replication, by key. served: equal for things that served the same requests. settings: those that are not
    the policy's. runs: for notes. once: its runs are equal, so that they are one replication. base: others of this chunk are
    compared with it.
    """

    label: str
    figures: Mapping[str, Mapping[Any, float]]
    served: str
    settings: str = ""
    runs: Sequence[Run] = ()
    once: bool = False
    chunk: Any = None
    base: bool = False


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_compare, arguments, lambda: str(__doc__))


def _compare(*arguments: str) -> int | None:
    names = [given for given in arguments if "=" not in given.partition("(")[0] or Path(given).exists()]
    options = [given for given in arguments if given not in names]
    own = {key: [text for name, _, text in map(_parts, options) if name == key] for key in _OPTIONS}
    others = [option for option in options if _parts(option)[0] not in _OPTIONS]
    if not names:
        raise ConfigError("compare: give folders of runs, or at least two policies, as in compare orca sarathi_serve")
    folders, first = [Path(name) for name in names if Path(name).is_dir()], own["baseline"]
    for key in ("baseline", "runs"):
        if len(own[key]) > 1:
            raise ConfigError(f"compare: {key} is given twice, as {own[key][0]} and as {own[key][1]}; give it once")
    if len(folders) < len(names):
        missing = next(name for name in names if not Path(name).is_dir())
        policies = [] if folders or "/" in missing.partition("(")[0] else option_names("policy", ",".join(names))
        if len(set(policies)) < 2:
            raise ConfigError(f"compare {missing}: no such folder; give folders of runs, or at least two policies")
        _check_baseline(first, policies)
        for key in own["metric"]:
            if not may_exist(key) or key.startswith("about."):
                raise ConfigError(no_such_figure(f"metric={key}", known_figures()))
        sweep = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_compare"
        if status := _run_policies(names, others, sweep):
            return status
        folders, first = [sweep_folder(sweep)], [*first, *policies]
    elif others:
        raise ConfigError(f"compare: {others[0]} is for policies; folders take metric=, baseline= and runs=")
    print(report(things_of(folders, "".join(own["runs"]), first), own["metric"]))
    return None


def _parts(option: str) -> tuple[str, str, str]:
    return option.partition("=")


def _run_policies(policies: Sequence[str], options: Sequence[str], sweep: str) -> int:
    """Runs each policy with several seeds."""
    seeds = [] if any(option.startswith("seeds=") for option in options) else ["seeds=20"]
    sys.argv[1:] = ["-m", f"policy={','.join(policies)}", *seeds, *options, f"sweep={sweep}"]
    return run_command.main()


def things_of(folders: Sequence[Path], text: str = "", first: Sequence[str] = ()) -> list[Thing]:
    """What the folders hold, in their order: a capacity search each, or the runs that differ only in a seed.

    Args:
        text: only runs whose folder names or command lines contain this.
        first: policies that come before the others.

    Raises:
        ConfigError: folders of both kinds, no such run, or none of the policy `first[0]`.
    """
    searches = [found for folder in folders for found in read_searches(folder)]
    runs = {folder: _select(folder, text) for folder in folders if not list(folder.rglob(RESULT))}
    if searches and runs:
        one = next(iter(runs.values()))[0]
        raise ConfigError(f"compare: {one.folder} holds runs, {searches[0].folder} a capacity; give one kind")
    if searches:
        searches = choose_runs(searches, text)
        groups = {label: [found] for found, label in zip(searches, label_runs(searches), strict=True)}
        things = [_search(label, found) for label, [found] in _in_order(groups, first)]
    else:
        things = [_group(label, group) for label, group in _in_order(_pool_seeds(runs), first)]
    base = first[0] if first else family(things[0].runs[0].about["policy"], things[0].runs[0].settings.get("chunk"))
    return [
        thing._replace(chunk=found.settings.get("chunk"), base=is_named(base, thing.label, found.about))
        for thing in things
        for found in thing.runs[:1]
    ]


def _select(folder: Path, text: str) -> list[Run]:
    runs, omitted = select_runs(folder, text)
    say(omitted)
    return runs


def _pool_seeds(runs: Mapping[Path, Sequence[Run]]) -> dict[str, list[Run]]:
    """The runs by label, where those of several seeds share one; a label that is in several folders names the folder too."""
    placed = [(folder, found) for folder, own in runs.items() for found in own]
    labels = label_seeds([found for _, found in placed])
    places: dict[str, set[Path]] = {}
    for (folder, _), label in zip(placed, labels, strict=True):
        places.setdefault(label, set()).add(folder)
    groups: dict[str, list[Run]] = {}
    for (folder, found), label in zip(placed, labels, strict=True):
        groups.setdefault(label if len(places[label]) == 1 else f"{label} in {folder}", []).append(found)
    return groups


def _in_order(groups: Mapping[str, list[Run]], first: Sequence[str]) -> list[tuple[str, list[Run]]]:
    """The groups, those of the policies `first` before the others."""
    abouts = {label: group[0].about for label, group in groups.items()}
    if first and not any(is_named(first[0], *each) for each in abouts.items()):
        _check_baseline(first, [*(about["policy"] for about in abouts.values())])

    def rank(group: tuple[str, list[Run]]) -> int:
        found = (place for place, given in enumerate(first) if is_named(given, group[0], abouts[group[0]]))
        return next(found, len(first))

    return sorted(groups.items(), key=rank)


def _check_baseline(first: Sequence[str], policies: Iterable[str]) -> None:
    """Raises ConfigError if the first of these is none of the policies."""
    known = {policy_name(policy) for policy in policies}
    if first and not {policy_name(first[0]), policy_name(first[0].partition(" ")[0].rstrip(","))} & known:
        raise ConfigError(f"baseline={first[0]}: no run of this policy; {nearest(first[0], known)}")


def _search(label: str, found: Run) -> Thing:
    values = dict(enumerate(found.summary["by_replication"]))
    served = _workload(found, [found.summary["capacity"]["requests"]])
    return Thing(label, {key: values for key, _ in _CAPACITY.values()}, served, _settings(found), [found])


def _group(label: str, runs: Sequence[Run]) -> Thing:
    figures: dict[str, dict[Any, float]] = {}
    for index, found in enumerate(runs):
        seed = found.settings.get("workload.seed", 0)
        again = sum(other.settings.get("workload.seed", 0) == seed for other in runs[:index])  # measured several times
        for key, value in flat({key: part for key, part in found.summary.items() if key != "about"}):
            if isinstance(value, int | float) and math.isfinite(value):
                figures.setdefault(key, {})[seed, again] = float(value)
    once = all_equal([found.summary for found in runs])
    return Thing(label, figures, _workload(runs[0], []), _settings(runs[0]), runs, once)


def _workload(found: Run, others: Sequence[Any]) -> str:
    """The workload without its seed."""
    keys = {
        key: value for key, value in found.settings.items() if key.startswith("workload.") and key != "workload.seed"
    }
    return json.dumps([keys, others], sort_keys=True, default=str)


def _settings(found: Run) -> str:
    """All settings but the policy's and seeds."""
    seeds = {"code", *seed_keys([found])}
    keys = {key: value for key, value in found.effective.items() if not key.startswith("policy.") and key not in seeds}
    return json.dumps(keys, sort_keys=True, default=str)


def report(things: Sequence[Thing], metrics: Sequence[str]) -> str:
    """Compares each thing with the first one of the same settings.

    If all settings differ, with the first one that served the same requests; if there is none, with the first of all.

    Raises:
        ConfigError: only one thing, an unknown figure, or one replication.
    """
    if len(things) < 2:
        raise ConfigError(f"compare: found only {things[0].label}; give the folder of another one too")
    shown = _CAPACITY if "capacity.requests_per_second" in things[0].figures else COLUMNS
    if metrics:
        for key in metrics:
            if key not in things[0].figures:
                raise ConfigError(no_such_figure(f"metric={key}", list(things[0].figures)))
        shown = {key: (key, 1.0) for key in metrics}
    for part in (lambda thing: thing.settings, lambda thing: thing.served, lambda thing: ""):
        groups: dict[str, list[Thing]] = {}
        for thing in things:
            groups.setdefault(part(thing), []).append(thing)
        if len(groups) < len(things):
            break
    pairs = [_pair(_base(group, other), other, shown) for group in groups.values() for other in group[1:]]
    single = [only[0].label for only in groups.values() if not only[1:]]
    alone = [f"not compared: nothing else has the settings of {label}" for label in single]
    counted = ([found.summary["run"]["counted_requests"] for found in thing.runs] for thing in things)
    tail = tail_text(counted) if any("p99" in key for key, _ in shown.values()) else ""
    notes = [tail, *notes_of(found.about for thing in things for found in thing.runs)]
    return "\n\n".join(filter(None, [*pairs, "\n".join(alone), "\n".join(filter(None, notes))]))


def _base(group: Sequence[Thing], other: Thing) -> Thing:
    """What one is compared with: the baseline of its chunk, or else the first of its group."""
    same = next((thing for thing in group if thing.base and thing.chunk == other.chunk), other)
    return group[0] if same is other else same


def _pair(first: Thing, second: Thing, shown: Mapping[str, tuple[str, float]]) -> str:
    same = first.served == second.served
    found = {
        head: compare(_scale(first.figures[key], factor), _scale(second.figures[key], factor), same)
        for head, (key, factor) in shown.items()
        if key in first.figures and key in second.figures
    }
    if not found:
        raise ConfigError(f"compare: {first.label} and {second.label} have no figure in common; give runs of one kind")
    if first.once and second.once:
        values = [[head, times(one.ratio[0]), signed(one.difference[0])] for head, one in found.items()]
        where = "the same requests" if same else "different requests"
        title = f"{second.label} over {first.label}: 1 replication, on {where}"
        return f"{title}\n{tabulate(values, ['', 'ratio', 'difference'], disable_numparse=True)}\n{ONE_REPLICATION}"
    rows = [
        [head, ratio_text(one), difference_text(one), "" if one.apart else not_apart(one)]
        for head, one in found.items()
    ]
    some = next(iter(found.values()))
    how = "in pairs, on the same requests" if some.paired else "NOT in pairs: they served different requests"
    title = f"{second.label} over {first.label}: {some.number} replications, {how}"
    table = f"{title}\n{tabulate(rows, ['', 'ratio', 'difference', ''], disable_numparse=True)}"
    return f"{table}\n{_WHICH_DECIDES}" if any(map(disagree, found.values())) else table


def _scale(values: Mapping[Any, float], factor: float) -> dict[Any, float]:
    return {number: factor * value for number, value in values.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
