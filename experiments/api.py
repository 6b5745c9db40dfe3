"""Runs policies from Python: the functions give the results of the commands `run`, `compare`, `capacity` and `plot`."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from numbers import Integral
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from cbatch import ConfigError, Policy
from experiments.serve import Result
from experiments.serve import serve as serve_settings
from experiments.settings.hardware import count_gpus
from experiments.settings.keywords import OF_FILES, check_read, settings_of
from experiments.setup.measured import check_measured
from experiments.setup.pools import check_policies, check_profiles
from experiments.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Folder = str | PathLike[str]


@dataclass(frozen=True, eq=False, repr=False)
class _Printed:
    """A result that `print` and notebooks show as `text`."""

    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"


@dataclass(frozen=True, eq=False, repr=False)
class Replications(_Printed):
    """A run with several seeds; `print` shows the means with 95% intervals that the table of a sweep has.

    results: of each seed. runs: a row for each run: settings by key, figures by name, `label`.
    """

    results: Sequence[Result]
    runs: "pd.DataFrame"

    def __repr__(self) -> str:
        return f"<{len(self.results)} Replications of {self.runs['label'].iloc[0]}>"


@overload
def simulate(
    policy: Policy | str, workload: Workload | str = ..., *, output: Folder | None = ..., seeds: None = ..., **keys: Any
) -> Result: ...


@overload
def simulate(
    policy: Policy | str, workload: Workload | str = ..., *, output: Folder | None = ..., seeds: int, **keys: Any
) -> Replications: ...


def simulate(
    policy: Policy | str,
    workload: Workload | str = "closed",
    *,
    output: Folder | None = None,
    seeds: int | None = None,
    **keys: Any,
) -> Result | Replications:
    """Serves a workload in simulation: times are predicted for the GPUs of a hardware profile.

        from policies.chunking import TileAligned
        from policies.sarathi_serve import SarathiServe

        simulate(SarathiServe(TileAligned(512)), "open_loop", rate=20, requests=1000, batch=64, seed=1).requests

    Equal arguments give an equal result. Each run has a copy of the policy, so that an object can be used again.

    Args:
        policy: an object with a method `plan(view)`, or a name: `"orca"`, `"vllm_v1(order=lcf)"`.
        workload: an object, or the name of a file in conf/workload: `"open_loop"`, `"azure_conv"`.
        output: folder for the results, as `python -m experiments.run output=...` writes them; None: nothing is written.
        seeds: number of seeds, from `seed=` (0) on, each served once; returns `Replications`, and writes OUTPUT/seed=N.
        keys: any key of conf/config.yaml (`batch`, `hardware`, `model`, `seed`, `metrics={"warmup_requests": 100}`), and of the
            workload, policy (by name), backend, runtime and model the last part of a key: `rate` for
            `workload.arrivals.rate`, `replicas` for `backend.replicas`. `requests` is `workload.num_requests`. If several groups
            have the key, the workload's counts, and `**{"model.path": "..."}` gives the other one.

    Returns:
        `summary`, the figures by group and name; `requests` and `steps`, frames; `record`, the tokens. `print` shows the figures.

    Raises CbatchError: one line that names the keyword, or the policy and what it did.
    """
    if keys.get("backend", "sim") != "sim":
        raise ConfigError(f"backend={keys['backend']}: simulate predicts times; serve gives real tokens")
    if seeds is None:
        return _serve(simulate, policy, workload, output, {"backend": "sim", **keys})
    from experiments.store.runs import run_table  # loads pandas

    results = [*_replicate(simulate, policy, workload, seeds, output, keys)]
    runs = _frame(results)
    return Replications(run_table(runs), results, runs)


def serve(
    policy: Policy | str, workload: Workload | str = "closed", *, output: Folder | None = None, **keys: Any
) -> Result:
    """Serves a workload with real tokens: `backend="cuda"`, by default where there is a GPU, or `"cpu"`.

    Arguments, result and errors are as for `simulate`. Times are measured, and differ from run to run.
    """
    if (backend := keys.get("backend")) in ("sim", "auto"):
        raise ConfigError(f"backend={backend}: simulate predicts times; serve gives real tokens, with cuda or cpu")
    return _serve(serve, policy, workload, output, {"backend": "cuda" if count_gpus() else "cpu", **keys})


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(_Printed):
    """Policies, each compared with the first one over the same replications; `print` shows what the command prints.

    runs: a row for each run: settings by key, figures by name, `label`.
    table: a row for each other policy and figure: `ratio` and `difference` to the first, each with the ends of its 95% interval,
        in the units of `summary`; `apart`: whether the interval of the difference excludes 0; `p_holm`: the p value, corrected for
        the number of tests.
    """

    runs: "pd.DataFrame"
    table: "pd.DataFrame"

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.runs['label'].unique())}>"


def compare(
    policies: Sequence[Policy | str],
    workload: Workload | str = "closed",
    *,
    seeds: int = 10,
    metric: str | Sequence[str] = (),
    **keys: Any,
) -> Comparison:
    """Compares policies with the first one, by the statistics of `python -m experiments.compare`.

        print(compare(["sarathi_serve", Mine()], "open_loop", rate=25, batch=64, metric="ttft_seconds.p99"))

    Each policy serves the same requests as the others, once for each seed from `seed=` (0) on: differences are in pairs.

    Args:
        policies: at least two, as for `simulate`. An object keeps its own seeds, such as a random predictor's.
        seeds: the number of replications.
        metric: figures of the summary, such as "ttft_seconds.p99"; by default the figures of tables.
        keys: as for `simulate`; `backend="cpu"` or `"cuda"` compares real tokens.

    Raises CbatchError: as `simulate`; fewer than two policies, or two with the same label; no such figure.
    """
    from experiments import compare as command  # loads pandas
    from experiments.report.replications import with_replications
    from experiments.report.text import figures_text

    if isinstance(policies, str) or not isinstance(policies, Collection) or len(policies) < 2:
        raise ConfigError("compare: give a list of at least two policies")
    metrics = metric if isinstance(metric, Collection) and not isinstance(metric, str) else [metric]
    if seeds == 1:
        raise ConfigError(f"{seeds=}: one seed gives no interval; give more, as in seeds=3")
    of_each = [settings_of(policy, workload, {"backend": "sim", **keys}, caller=compare) for policy in policies]
    for check in (partial(check_measured, metrics), check_policies, check_read):
        check(of_each)
    runs = _frame(result for policy in policies for result in _replicate(compare, policy, workload, seeds, None, keys))
    if (number := runs["label"].nunique()) < len(policies):
        problem = f"{len(policies)} policies have {number} labels ({', '.join(runs['label'].unique())})"
        raise ConfigError(f"compare: {problem}; keep their arguments as attributes, or write __repr__")
    rows = with_replications(runs.assign(figures=runs["summary"].map(figures_text), source=""))
    baseline = rows["label"].iloc[0]
    table = command.table_of(command.pairs_of(rows, metrics, baseline))
    return Comparison(command.report(rows, metrics, baseline), runs, table)


@dataclass(frozen=True, eq=False, repr=False)
class Capacity(_Printed):
    """A capacity with the ends of its 95% interval, in requests per second or in sessions; `print` shows what the command prints.

    summary: the content of capacity.json, with the attainment at each rate.
    """

    summary: Mapping[str, Any]
    value: float
    low: float
    high: float

    def __repr__(self) -> str:
        return f"<Capacity {self.value:.4g} [{self.low:.4g}, {self.high:.4g}]>"


def capacity(
    policy: Policy | str, workload: Workload | str = "open_loop", *, output: Folder | None = None, **keys: Any
) -> Capacity:
    """Searches the highest rate at which objectives are met, as `python -m experiments.capacity` does, on all cores.

        capacity("sarathi_serve", slo={"ttft": 1.0, "tbt": 0.1}, batch=64, accuracy=0.1).value

    Args:
        policy, workload: as for `simulate`. With an object whose class other processes cannot import, give `cores=1`.
        output: folder of the search, from which the same call resumes after an interruption; None: nothing is kept.
        keys: as for `simulate`, and those of conf/capacity.yaml: `slo` (a name or a mapping), `attainment`, `requests` (per
            replication), `replications`, `accuracy`, `cores`.

    Raises CbatchError: as `simulate`; no objective, or a capacity that cannot be found.
    """
    from experiments.capacity.command import SearchKeys, SearchSettings, measure
    from experiments.capacity.report import capacity_of, capacity_text
    from experiments.settings.settings import read_as

    read: Any = partial(read_as, SearchSettings, SearchKeys)
    check_read([settings := settings_of(policy, workload, keys, "capacity", read, capacity)])
    searched: Any = replace(settings, progress=settings.progress if "progress" in keys else "off")
    with TemporaryDirectory() as kept:
        summary = measure(searched, Path(kept) if output is None else _path(output), log=lambda line: None)
    figures = summary["capacity"]
    return Capacity(capacity_text(summary), summary, capacity_of(figures)[0], figures["low"], figures["high"])


def plot(name: str, folder: Folder, **keys: Any) -> "Figure":
    """Draws a plot of a finished run or sweep, as `python -m experiments.plot` does; returns the matplotlib figure.

        simulate("orca", "open_loop", rate=20, seeds=5, output="runs/orca")
        plot("latency_cdf", "runs/orca", size=(3.5, 2.5), labels={"orca": "Orca"})

    Args:
        name: of the plot, or the import path of your function.
        keys: as for the command; a sequence or a mapping where the command takes several values.

    Raises CbatchError: no such plot, folder or key; the plot cannot be made of these runs.
    """
    from matplotlib import pyplot  # slow to import

    from experiments.plot import make_plot

    options = (f"{key}={_option(key, value)}" for key, value in keys.items())
    made, *_ = make_plot(str(name), str(_path(folder, "folder")), *options)
    if isinstance(made, tuple):
        raise ConfigError(f"plot {name}: is a text; print the result of compare, or of simulate with seeds=")
    pyplot.close(made)  # a notebook shows the returned figure alone
    return made


def _path(folder: Folder, key: str = "output") -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise ConfigError(f"{key}={folder!r}: give the path of a folder") from None


def _option(key: str, value: object) -> str:
    """Returns a value as text for the command `plot`."""
    match value:
        case bool():
            return str(value).lower()
        case Mapping():
            return ";".join(f"{name}={text}" for name, text in value.items())
        case Sequence() if not isinstance(value, str):
            return (";" if key == "order" else ",").join(map(str, value))
    return str(value)


def _replicate(
    caller: Any, policy: Policy | str, workload: Workload | str, seeds: int, output: Folder | None, keys: dict[str, Any]
) -> Iterator[Result]:
    """Serves a simulation once for each seed."""
    first = keys.get("seed", 0)
    for key, value, least in (("seeds", seeds, 1), ("seed", first, 0)):
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{key}={value!r}: give a whole number, at least {least}")
    for seed in range(first, first + seeds):
        folder = None if output is None else _path(output) / f"seed={seed}"
        yield _serve(caller, policy, workload, folder, {"backend": "sim", **keys, "seed": seed})


def _frame(results: Iterable[Result]) -> "pd.DataFrame":
    from experiments.store.runs import frame_of  # loads pandas

    summaries = enumerate(result.summary for result in results)
    return frame_of((Path(f"run {at}"), {**each, "about": {**each["about"], "number": at}}) for at, each in summaries)


def _serve(
    caller: Any, policy: Policy | str, workload: Workload | str, output: Folder | None, keys: dict[str, Any]
) -> Result:
    if output is None and (key := next((key for key in OF_FILES if key in keys), None)):
        raise ConfigError(f"{key}={keys[key]}: applies to files only; give output=FOLDER")
    check_profiles(settings := settings_of(policy, workload, keys, caller=caller))
    if caller is not compare:  # where another policy may read what this one does not
        check_read([settings])
    path = None if output is None else _path(output)
    return serve_settings(settings, path, log=lambda line: None, bar="progress" in keys)
