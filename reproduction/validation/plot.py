"""Simulated against measured metrics of the `fidelity` benchmark: the values above, their relative errors below."""

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from experiments.plots.style import PAGE, add_heading, line_style, print_style
from reproduction.validation.compare import CLOSED, RANKS, card_of

PANELS = (
    ("total time [s]", ["total time"], 1.0),
    ("time to first token [s]", [f"TTFT {rank}" for rank in RANKS], 1.0),
    ("time between tokens [ms]", [f"TBT {rank}" for rank in RANKS], 1e3),
)
"""Title, metrics, and factor of their unit."""

LAYOUT = "AABBCC;DEEEEE;FFFFFF"
"""The panels' values, A to C, and their errors, D to F."""

_SHAPES = (*"os^DvPX*<>phd",)
"""Of workloads."""


@print_style()
def draw(result: Mapping[str, Any]) -> Figure:
    """Draws a point for each run and metric of a comparison: colour by policy, shape by workload, hollow for P90 and P99."""
    points, targets = _points(result), result["targets"]
    figure, axes = plt.subplot_mosaic(LAYOUT, figsize=(PAGE, 7.2), layout="constrained")
    for values, errors, (label, metrics, factor) in zip("ABC", "DEF", PANELS, strict=True):
        shown = points[points["metric"].isin(metrics)]
        if len(shown):
            _draw_values(axes[values], shown, label, factor)
            _draw_errors(axes[errors], shown, targets)
    axes["A"].set_ylabel("simulated")
    for first in "DF":
        axes[first].set_ylabel("error of simulation")
    cards = result["measured"] if isinstance(result["measured"], list) else [result["measured"]]
    named = [name for _, metrics, _ in PANELS for name in metrics if name in targets]
    where = f"{len(cards)} x {cards[0]['hardware']}" if len(cards) > 1 else cards[0]["hardware"]
    by_rank = {name.removeprefix("TTFT ").removeprefix("TBT "): targets[name] for name in named}
    bands = ", ".join(f"{name} {target:.0%}" for name, target in by_rank.items())
    dates = " and ".join(sorted({card["date"] for card in cards}))
    origin = f"measured on {where}, {dates}; grey: target errors: {bands}"
    lines = "lines: range of the error when all iteration times change by up to 1%; hollow: P90 and P99"
    heading = f"Simulated (profile {result['profile']}) against measured"
    add_heading(figure, heading, f"{origin}\n{lines}", _handles(points))
    return figure


def _points(result: Mapping[str, Any]) -> pd.DataFrame:
    """Returns a row for each run and metric that the run is judged by, with the colour of its policy and the shape of its workload."""
    columns = ["policy", "workload", "metric", "measured", "simulated", "error", "error_range"]
    rows = [
        (policy, _workload(case, found), name, *(found[key][name] for key in columns[3:]))
        for case, runs in result["cases"].items()
        for policy, found in runs.items()
        for name in result["targets"]
        if name not in CLOSED or found.get("load") is None
    ]
    points = pd.DataFrame(rows, columns=columns)
    colours, shapes = (pd.factorize(points[name])[0].tolist() for name in ("policy", "workload"))
    return points.assign(
        color=[line_style(index)["color"] for index in colours], marker=[_SHAPES[i % len(_SHAPES)] for i in shapes]
    )


def _workload(case: str, run: Mapping[str, Any]) -> str:
    """Returns the name of a case without its card; all at a share of the policy's own capacity are one."""
    name = card_of(case)[0].removeprefix("held out, ").replace("poisson", "Poisson")
    return f"Poisson at {run['load']:.0%} of own capacity" if name.startswith("capacity, ") else name


def _mark(axes: Axes, x: float, y: float, point: Mapping[Any, Any]) -> None:
    hollow = {"markerfacecolor": "none"} if point["metric"].endswith(("P90", "P99")) else {}
    style: dict[str, Any] = {"markersize": 3.5, "linestyle": "none", "markeredgewidth": 0.8, **hollow}
    axes.plot(x, y, color=point["color"], marker=point["marker"], **style)


def _draw_values(axes: Axes, points: pd.DataFrame, label: str, factor: float) -> None:
    for point in points.to_dict("records"):
        _mark(axes, point["measured"] * factor, point["simulated"] * factor, point)
    values = factor * points[["measured", "simulated"]].to_numpy()
    ends = (values.min() / 1.3, values.max() * 1.3)
    axes.plot(ends, ends, color="#555555", linewidth=0.5, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured", title=label)
    for axis in (axes.xaxis, axes.yaxis):
        if ends[1] < 4 * ends[0]:
            axis.set_major_locator(MaxNLocator(4))
        else:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] < 100 * ends[0] else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_errors(axes: Axes, points: pd.DataFrame, targets: Mapping[str, float]) -> None:
    """Draws the errors of each metric side by side, in the order of the runs, and the band of the target error.

    A line shows the range of each error when iteration times are perturbed.
    """
    names = list(points["metric"].unique())
    for place, name in enumerate(names):
        row = points[points["metric"] == name]
        band = [place - 0.45, place + 0.45]
        axes.fill_between(band, -targets[name], targets[name], color="#EEEEEE", linewidth=0, zorder=0)
        for index, point in enumerate(row.to_dict("records")):
            x = place - 0.38 + 0.76 * index / max(len(row) - 1, 1)
            axes.plot([x, x], point["error_range"], color=point["color"], linewidth=0.6, marker="none")
            _mark(axes, x, point["error"], point)
    axes.axhline(0, color="#555555", linewidth=0.5, zorder=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    widest, farthest, lowest = max(targets[name] for name in names), points["error"].abs().max(), points["error"].min()
    if farthest > 5 * widest:  # a linear axis would squeeze the others together
        axes.set_yscale("symlog", linthresh=2 * widest, linscale=2)
        axes.set_yticks([-1.0, -2 * widest, -widest, 0, widest, 2 * widest, 1.0])
        axes.set_ylim(min(2 * lowest, -2.5 * widest), 2 * farthest)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.grid(visible=False)


def _handles(points: pd.DataFrame) -> list[Line2D]:
    """Returns handles of policies by colour, then of workloads by shape."""
    small: dict[str, Any] = {"color": "#555555", "markersize": 4, "linestyle": "none"}
    colours, shapes = (
        points.groupby(by, sort=False)[what].first() for by, what in (("policy", "color"), ("workload", "marker"))
    )
    handles = [Line2D([], [], color=colour, linewidth=3, label=name) for name, colour in colours.items()]
    return [*handles, *(Line2D([], [], marker=shape, label=name, **small) for name, shape in shapes.items())]
