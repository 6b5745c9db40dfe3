"""Draws distributions of the latencies that clients observe: time to first token, time between tokens, end to end."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from cbatch.results.metrics import Floats
from experiments.plots.parts import label_log
from experiments.plots.series import check_few, load_series
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style
from experiments.report.labels import merge_equal
from experiments.report.text import count_text
from experiments.store.runs import Omitted, print_omitted
from experiments.store.tables import read_requests, time_between_tokens

_MOST_POINTS = 1000  # per curve; with a million gaps, no viewer would open the PDF
_NAMES = ("time to first token [s]", "time between tokens [ms]", "end-to-end latency [s]")
_OBJECTIVES = (("slo_ttft_seconds", 1.0), ("slo_tbt_seconds", 1e3), ("slo_total_seconds", 1.0))  # column and factor
_FIGURES = ("ttft_seconds.", "tbt_seconds.", "end_to_end_seconds.")


@print_style()
def draw(folder: Path, look: Look = PLAIN, tiers: bool = False) -> Figure:
    """Draws a line for each policy and each other setting that varies. With several seeds, a line shows all requests, and a band the single runs.

    Raises ConfigError for no finished runs or too many runs, if no request was served, and with `tiers` if no request has a tier.

    Args:
        tiers: a row of panels for each tier; a dotted line marks an objective that all its requests share.
    """
    shown = load_series(folder, look)
    frame = merge_equal(shown, [column for column in map(str, shown) if column.startswith(_FIGURES)])
    check_few(frame)
    requests = {run: read_requests(run) for run in frame["folder"]}
    if all(of_run["ttft_seconds"].isna().all() for of_run in requests.values()):
        raise ConfigError(f"{folder}: no request was served, so there is no latency to draw; choose another run")
    rows = sorted({str(tier) for of_run in requests.values() for tier in of_run["tier"].dropna()}) if tiers else [""]
    if not rows:
        raise ConfigError(f"{folder}: no request has a tier; give them with workload.tiers, or leave out tiers=true")
    groups = list(frame.groupby("label", sort=False))
    figure, axes = new_figure(len(rows), 3, 0.8 + 1.9 * len(rows), sharex="col", sharey=True)
    for tier, panels in zip(rows, axes, strict=True):
        for index, (label, group) in enumerate(groups):
            latencies = [_latencies(run, requests[run], tier) for run in group["folder"]]
            for panel, name, values in zip(panels, _NAMES, zip(*latencies, strict=True), strict=True):
                if not any(map(len, values)):
                    print_omitted([Omitted(f"{label} {tier}".strip(), f"has no {name.partition(' [')[0]}")])
                _draw_distribution(panel, values, str(label), index, (index + 0.5) / len(groups))
    marked = [_finish(panels, tier, pd.concat(requests.values())) for tier, panels in zip(rows, axes, strict=True)]
    figure.supylabel("cumulative share", fontsize="medium")
    sizes = frame.groupby("label").size()
    note = "" if sizes.max() == 1 else f"{'' if sizes.min() == sizes.max() else 'up to '}{sizes.max()} runs per line"
    heading, handles = frame["heading"].iloc[0], axes[0][0].get_legend_handles_labels()[0]
    served = sum(of_run["ttft_seconds"].count() for of_run in requests.values())
    left = int(served - frame["run.counted_requests"].sum())
    others = f"with {count_text(left, 'request')} before or after the measured part, which tables leave out"
    below = "\n".join(["dotted: the objective of the tier"] * any(marked) + [others] * (left > 0))
    add_title(figure, shown, heading, handles, note, below, look)
    return figure


def _latencies(run: str, requests: pd.DataFrame, tier: str) -> list[Floats]:
    """Returns time to first token, time between tokens and end-to-end latency for a tier's requests; empty `tier`: for all."""
    rows = requests[requests["tier"] == tier] if tier else requests
    gaps = time_between_tokens(run)
    latencies = rows["ttft_seconds"], gaps[gaps.index.isin(rows["id"])] * 1e3, rows["end_to_end_seconds"]
    return [np.asarray(values.dropna(), np.float64) for values in latencies]


def _finish(panels: list[Axes], tier: str, requests: pd.DataFrame) -> bool:
    """Scales and labels the axes of a row, and marks the objectives of a tier. Returns whether it has any."""
    marked = False
    for panel, name, (objective, factor) in zip(panels, _NAMES, _OBJECTIVES, strict=True):
        panel.set(xlabel=name, ylim=(0, 1.01), xscale="log")
        limits = requests.loc[requests["tier"] == tier, objective].unique()
        if len(limits) == 1 and limits[0] > 0:
            panel.axvline(limits[0] * factor, color="#555555", linewidth=0.8, linestyle=":", zorder=1)
            marked = True
        label_log(panel.xaxis)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.label_outer()
    panels[0].set_title(tier and f"tier {tier}")
    return marked


def _draw_distribution(axes: Axes, runs: tuple[Floats, ...], label: str, index: int, first: float = 0.5) -> None:
    """Draws the cumulative distribution of all values, as quantiles if there are many, with a band of the single runs' distributions.

    first: place of the first of four markers, 0 to 1, so that the markers of equal lines lie side by side.
    """
    values = np.concatenate(runs)
    shares = np.linspace(0, 1, min(len(values), _MOST_POINTS) + 1) if len(values) else values  # without second tokens
    style = {**line_style(index), "linewidth": 1.0, "markersize": 4}
    style |= {"markevery": (int(first * len(shares) / 4), max(len(shares) // 4, 1))}
    quantiles = np.quantile(values, shares, method="inverted_cdf") if len(values) else values
    axes.plot(quantiles, shares, label=label, drawstyle="steps-post", **style)
    if len(single := [np.quantile(run, shares, method="inverted_cdf") for run in runs if len(run)]) > 1:
        low, high = np.min(single, axis=0), np.max(single, axis=0)
        axes.fill_betweenx(shares, low, high, color=style["color"], alpha=0.1, linewidth=0)
