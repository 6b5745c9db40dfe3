"""QoServe's ablation, SLAI's trade and budgets, FastServe's, TRAIL's and vLLM's victims: simulated on an H200, ratios beside the papers'.

The papers' GPUs and models differ from ours (Llama-3.1-8B), so loads are shares of what this machine serves, and only ratios are
compared. QoServe's objectives of 600 and 1,800 s are a tenth here, so that runs of minutes instead of hours can miss them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from cbatch.sim import ProfileCost, load_profile
from experiments.plots.parts import label_log
from experiments.plots.style import line_style, new_figure
from experiments.setup.presets import load_spec
from reproduction.papers.claims import Claim
from reproduction.papers.frames import select
from reproduction.papers.jobs import Figures, crossing, run_jobs, summary_of
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import value

BUDGETS = "SLAI's budget"


class Study(NamedTuple):
    """Runs to compare.

    lengths: the trace. capacity: requests per second that the first run serves with all requests queued. loads: shares of it.
    runs: overrides by name. common: overrides of all.
    """

    lengths: str
    capacity: float
    loads: tuple[float, ...]
    runs: Mapping[str, str]
    common: str


STUDIES = {
    name: Study(**{**study, "loads": tuple(study["loads"])})
    for name, study in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items()
}
KEYS = {
    "ttft_p50": ("ttft_seconds", "p50"),
    "ttft_mean": ("ttft_seconds", "mean"),
    "ttft_p99": ("ttft_seconds", "p99"),
    "latency": ("end_to_end_seconds", "mean"),
    "per_token": ("normalized_latency_seconds_per_token", "mean"),
    "gap_p99": ("longest_gap_seconds", "p99"),
    "kv_peak": ("iterations", "kv_use_peak"),
    "recomputed": ("run", "recomputed_tokens"),
    "preemptions": ("run", "preemptions"),
    "attained": ("attainment", "share"),
}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: study, load (share of the capacity), series, and the figures of `KEYS`."""
    if machines.traces is None:
        say("left out: give traces=FOLDER, the published traces")
        return pd.DataFrame()
    jobs: list[Mapping[str, Any]] = [
        {"study": name, "load": load, "series": series, "traces": machines.traces}
        for name, study in STUDIES.items()
        for load, series in product(study.loads, study.runs)
    ]
    data = run_jobs(run, jobs).drop(columns="traces")
    cost = ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b"))  # the defaults of `experiments.run`
    machines.note("h200", {"model": cost.spec.name, **cost.provenance()})
    return data


def run(study: str, load: float, series: str, traces: str) -> Figures:
    """One run."""
    summary = summary_of(*overrides(study, load, series, traces))
    return {name: float(summary[group].get(key, float("nan"))) for name, (group, key) in KEYS.items()}


def overrides(study: str, load: float, series: str, traces: str) -> list[str]:
    """The settings of one run, as on the command line of `experiments.run`."""
    chosen = STUDIES[study]
    lengths, rate = "lengths" if "sharegpt" in chosen.lengths else "azure", load * chosen.capacity
    path = f"workload.lengths.path={traces}/{chosen.lengths}"
    workload = ["workload=arxiv", path, f"workload.lengths.format={lengths}", "workload.max_new_tokens=1024"]
    fitted = ["workload.lengths.too_long=drop", "workload.lengths.max_length=8192", f"workload.arrivals.rate={rate}"]
    own = [*chosen.common.split(), *chosen.runs[series].split()]
    return [*workload, *fitted, *([] if "batch=" in chosen.common else ["batch=128"]), *own]


def capacity(data: pd.DataFrame, study: str, series: str) -> float:
    """The load at which violations pass 1% (QoServe) or the median TTFT 0.5 s (SLAI)."""
    shown = select(data, study=study, series=series)
    values, most = (1 - shown["attained"], 0.01) if study == "QoServe" else (shown["ttft_p50"], 0.5)
    return crossing(shown["load"].tolist(), values.tolist(), most)


def violated(data: pd.DataFrame, series: str, load: float = 2.2) -> float:
    """Percent of requests that miss their objectives under a variant of QoServe."""
    return 100 * (1 - value(data, "attained", study="QoServe", series=series, load=load))


PANELS = (
    ("QoServe", "QoServe", "attained", "objectives attained [%]"),
    ("SLAI", "SLAI", "ttft_p50", "median TTFT [s]"),
    (BUDGETS, BUDGETS, "ttft_p50", "median TTFT [s]"),
    ("FastServe", "FastServe", "per_token", "latency per token / FCFS's"),
    ("vLLM: which request is preempted", "vLLM", "recomputed", "recomputed tokens"),
    ("TRAIL: limit of preemption", "TRAIL", "latency", "mean latency / FCFS's"),
    ("TRAIL: predictions", "TRAIL", "latency", "mean latency / FCFS's"),
)
"""Title, study, figure and its label; predictions are those of SJF, the other panel of TRAIL has the other runs.

Latencies that differ little beside what the load does to them are drawn as ratios to first come, first served.
"""


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> Figure:
    """A panel for each study, a line for each run."""
    figure, axes = new_figure(4, 2, 8.4)
    grid: Any = axes[0][0].get_gridspec()
    for half in axes[0]:
        half.remove()
    panels = [figure.add_subplot(grid[0, :]), *(panel for row in axes[1:] for panel in row)]
    for panel, (title, study, what, label) in zip(panels, PANELS, strict=True):
        shown, lines, along = select(data, study=study), "series", "load"
        if study == BUDGETS:
            lines, along, shown = (
                "load",
                "series",
                shown.assign(series=shown["series"].str.removesuffix(" tokens").astype(int)),
            )
            panel.set_xscale("log")
        if what == "attained":
            shown = shown.assign(attained=100 * shown["attained"])
            panel.set_ylim(0, 105)
        if label.endswith("FCFS's"):
            first = shown[shown["series"] == "FCFS"].set_index("load")[what]
            shown = shown.assign(**{what: shown[what] / shown["load"].map(first)})[shown["series"] != "FCFS"]
            panel.axhline(1, color="#555555", linewidth=0.6, zorder=1)
        if study == "TRAIL" and (ordered := shown["series"].str.startswith("SJF")).any():
            shown = shown[ordered] if "predictions" in title else shown[~ordered]
        for index, (name, line) in enumerate(shown.groupby(lines, sort=False)):
            panel.plot(line[along], line[what], label=f"load {name}" if study == BUDGETS else name, **line_style(index))
        panel.set(title=title, ylabel=label, xlabel="load: share of capacity" if along == "load" else "tokens")
        if study == BUDGETS:
            label_log(panel.xaxis, [64, 128, 256, 512, 1024])
        if what == "ttft_p50":
            panel.set_yscale("log")
            label_log(panel.yaxis)
        else:
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        panel.legend(fontsize=6, handlelength=3)
    figure.supxlabel("one seed; capacity: of each study's first run", fontsize=6)
    return figure
