"""Runs policies from Python: `simulate`, `serve` and `compare` give the results of the commands `run` and `compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch import ConfigError, Policy
from experiments.report.headings import check_figure
from experiments.serve import Result
from experiments.serve import serve as serve_settings
from experiments.settings.hardware import count_gpus
from experiments.settings.keywords import OF_FILES, settings_of
from experiments.workloads import Workload

if TYPE_CHECKING:
    import pandas as pd

Folder = str | PathLike[str]


def simulate(
    policy: Policy | str, workload: Workload | str = "closed", *, output: Folder | None = None, **keys: Any
) -> Result:
    """Serves a workload in simulation: times are predicted for the GPUs of a hardware profile.

        from policies.chunking import TileAligned
        from policies.sarathi_serve import SarathiServe

        simulate(SarathiServe(TileAligned(512)), "open_loop", rate=20, requests=1000, batch=64, seed=1).requests

    Equal arguments give an equal result. Each run has a copy of the policy, so that an object can be used again.

    Args:
        policy: an object with a method `plan(view)`, or a name: `"orca"`, `"vllm_v1(order=lcf)"`.
        workload: an object, or the name of a file in conf/workload: `"open_loop"`, `"azure_conv"`.
        output: folder for the results, as `python -m experiments.run output=...` writes them; None: nothing is written.
        keys: any key of conf/config.yaml (`batch`, `hardware`, `model`, `seed`, `metrics={"warmup_requests": 100}`), and of the
            workload, policy (by name), backend, runtime and model the last part of a key: `rate` for
            `workload.arrivals.rate`, `replicas` for `backend.replicas`. `requests` is `workload.num_requests`. Where two groups
            have a key, the workload's counts, and `**{"model.path": "..."}` gives the other one.

    Returns:
        `summary`, the figures by group and name; `requests` and `steps`, frames; `record`, the tokens. `print` shows the figures.

    Raises:
        CbatchError: one line that names the keyword, or the policy and what it did.
    """
    if keys.get("backend", "sim") != "sim":
        raise ConfigError(f"backend={keys['backend']}: simulate predicts times; serve gives real tokens")
    return _serve(policy, workload, output, {"backend": "sim"}, keys)


def serve(
    policy: Policy | str, workload: Workload | str = "closed", *, output: Folder | None = None, **keys: Any
) -> Result:
    """Serves a workload with real tokens: `backend="cuda"`, by default where there is a GPU, or `"cpu"`.

    Arguments, result and errors are those of `simulate`. Times are measured, and differ from run to run.
    """
    return _serve(policy, workload, output, {"backend": "cuda" if count_gpus() else "cpu"}, keys)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Policies, each compared with the first one over the same replications; `print` shows what the command prints.

    runs: a row for each run: settings by key, figures by name, `label`.
    table: a row for each other policy and figure: `ratio` and `difference` to the first, each with the ends of its 95% interval,
        in the units of `summary`; `apart`: whether the interval of the difference excludes 0; `p_holm`: the p value, corrected for
        the number of rows.
    text: the tables that are printed.
    """

    runs: "pd.DataFrame"
    table: "pd.DataFrame"
    text: str

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"

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
        policies: at least two, as for `simulate`. An object keeps its own seed, as a random predictor has.
        seeds: the number of replications.
        metric: figures of the summary, such as "ttft_seconds.p99"; by default the figures of tables.
        keys: as for `simulate`; `backend="cpu"` or `"cuda"` compares real tokens.

    Raises:
        CbatchError: as `simulate`; fewer than two policies, or two that print alike; no such figure.
    """
    from experiments import compare as command  # loads pandas
    from experiments.report.labels import with_replications
    from experiments.report.text import figures_text
    from experiments.store.runs import frame_of

    if isinstance(policies, str) or len(policies) < 2 or seeds < 1:
        raise ConfigError(f"compare: give a list of at least two policies, and seeds={seeds} above 0")
    metrics, first = [metric] if isinstance(metric, str) else metric, keys.get("seed", 0)
    for key in metrics:
        check_figure(f"metric={key}")
    results: list[tuple[Path, dict[str, Any]]] = []
    for policy in policies:
        for seed in range(first, first + seeds):
            summary = _serve(policy, workload, None, {"backend": "sim"}, {**keys, "seed": seed}).summary
            summary["about"]["number"] = len(results)
            results.append((Path(f"run {len(results)}"), summary))
    runs = frame_of(results)
    if (number := runs["label"].nunique()) < len(policies):
        problem = f"{len(policies)} policies have {number} labels ({', '.join(runs['label'].unique())})"
        raise ConfigError(f"compare: {problem}; keep their arguments as attributes, or write __repr__")
    rows = with_replications(runs.assign(figures=runs["summary"].map(figures_text), source=""))
    baseline = rows["label"].iloc[0]
    table = command.table_of(command.pairs_of(rows, metrics, baseline))
    return Comparison(runs, table, command.report(rows, metrics, baseline))


def _serve(
    policy: Policy | str,
    workload: Workload | str,
    output: Folder | None,
    defaults: dict[str, Any],
    keys: dict[str, Any],
) -> Result:
    if output is None and (key := next((key for key in OF_FILES if key in keys), None)):
        raise ConfigError(f"{key}={keys[key]}: applies to files only; give output=FOLDER")
    settings = settings_of(policy, workload, {**defaults, **keys})
    folder = None if output is None else Path(output)
    return serve_settings(settings, folder, log=lambda line: None, bar="progress" in keys)
