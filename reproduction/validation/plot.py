"""Simulated against measured metrics of the `fidelity` benchmark: the values above, their relative errors below."""

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from experiments.plots.style import PAGE, add_heading, line_style, print_style
from reproduction.validation.compare import CLOSED, RANKS, card_of

PANELS = (
    ("total time [s]", ("total time",), 1.0),
    ("time to first token [s]", tuple(f"TTFT {rank}" for rank in RANKS), 1.0),
    ("time between tokens [ms]", tuple(f"TBT {rank}" for rank in RANKS), 1e3),
)
"""Title, metrics, and factor of their unit."""

LAYOUT = "AABBCC;DEEEEE;FFFFFF"
"""The panels' values, A to C, and their errors, D to F."""

_SHAPES = (*"os^DvPX*<>phd",)
"""Of workloads."""


class Point(NamedTuple):
    """One metric of one run, and the style of its marker."""

    quantity: str
    style: dict[str, Any]
    measured: float
    simulated: float
    error: float
    error_range: list[float]


@print_style()
def draw(result: Mapping[str, Any]) -> Figure:
    """A point for each run and metric of a comparison: colour by policy, shape by workload, hollow for P90 and P99."""
    cases = {case: next(iter(runs.values())) for case, runs in result["cases"].items()}
    workloads = {case: _workload(case, run) for case, run in cases.items()}
    policies = list(dict.fromkeys(policy for runs in result["cases"].values() for policy in runs))
    points = list(_points(result, policies, workloads))
    figure, axes = plt.subplot_mosaic(LAYOUT, figsize=(PAGE, 7.2), layout="constrained")
    for values, errors, (label, quantities, factor) in zip("ABC", "DEF", PANELS, strict=True):
        shown = [point for point in points if point.quantity in quantities]
        if shown:
            _draw_values(axes[values], shown, label, factor)
            _draw_errors(axes[errors], shown, result["targets"])
    axes["A"].set_ylabel("simulated")
    for first in "DF":
        axes[first].set_ylabel("error of simulation")
    measured = result["measured"] if isinstance(result["measured"], list) else [result["measured"]]
    where = f"{len(measured)} x {measured[0]['hardware']}" if len(measured) > 1 else measured[0]["hardware"]
    named = [name for _, quantities, _ in PANELS for name in quantities if name in result["targets"]]
    targets = {name.removeprefix("TTFT ").removeprefix("TBT "): result["targets"][name] for name in named}
    bands = ", ".join(f"{name} {target:.0%}" for name, target in targets.items())
    dates = " and ".join(sorted({card["date"] for card in measured}))
    origin = f"measured on {where}, {dates}; grey: target errors: {bands}"
    lines = "lines: range of the error when all iteration times change by up to 1%; hollow: P90 and P99"
    heading = f"Simulated (profile {result['profile']}) against measured"
    add_heading(figure, heading, f"{origin}\n{lines}", _handles(policies, list(dict.fromkeys(workloads.values()))))
    return figure


def _workload(case: str, run: Mapping[str, Any]) -> str:
    """Returns the name of a case without its card; all at a share of the policy's own capacity are one."""
    name = card_of(case)[0].removeprefix("held out, ").replace("poisson", "Poisson")
    return f"Poisson at {run['load']:.0%} of own capacity" if name.startswith("capacity, ") else name


def _points(result: Mapping[str, Any], policies: list[str], workloads: Mapping[str, str]) -> Iterator[Point]:
    shapes = list(dict.fromkeys(workloads.values()))
    for case, runs in result["cases"].items():
        shape = _SHAPES[shapes.index(workloads[case]) % len(_SHAPES)]
        for policy, found in runs.items():
            for name in (name for name in result["targets"] if name not in CLOSED or found.get("load") is None):
                style = {"color": line_style(policies.index(policy))["color"], "marker": shape}
                style |= {"markersize": 3.5, "linestyle": "none", "markeredgewidth": 0.8}
                hollow = {"markerfacecolor": "none"} if name.endswith(("P90", "P99")) else {}
                values = (found[key][name] for key in ("measured", "simulated", "error", "error_range"))
                yield Point(name, style | hollow, *values)


def _draw_values(axes: Axes, points: list[Point], label: str, factor: float) -> None:
    for point in points:
        axes.plot(point.measured * factor, point.simulated * factor, **point.style)
    values = [factor * value for point in points for value in (point.measured, point.simulated)]
    ends = (min(values) / 1.3, max(values) * 1.3)
    axes.plot(ends, ends, color="#555555", linewidth=0.5, zorder=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured", title=label)
    for axis in (axes.xaxis, axes.yaxis):
        if ends[1] < 4 * ends[0]:
            axis.set_major_locator(MaxNLocator(4))
        else:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] < 100 * ends[0] else (1,)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _draw_errors(axes: Axes, points: list[Point], targets: dict[str, float]) -> None:
    """The errors of each metric side by side, in the order of the runs, and the band of the target error.

    A line shows the range of each error when iteration times are perturbed.
    """
    names = list(dict.fromkeys(point.quantity for point in points))
    for place, name in enumerate(names):
        row = [point for point in points if point.quantity == name]
        band = [place - 0.45, place + 0.45]
        axes.fill_between(band, -targets[name], targets[name], color="#EEEEEE", linewidth=0, zorder=0)
        for index, point in enumerate(row):
            x = place - 0.38 + 0.76 * index / max(len(row) - 1, 1)
            axes.plot([x, x], point.error_range, color=point.style["color"], linewidth=0.6, marker="none")
            axes.plot(x, point.error, **point.style)
    axes.axhline(0, color="#555555", linewidth=0.5, zorder=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    widest, farthest = max(targets[name] for name in names), max(abs(point.error) for point in points)
    if farthest > 5 * widest:  # a linear axis would squeeze the others together
        axes.set_yscale("symlog", linthresh=2 * widest, linscale=2)
        axes.set_yticks([-1.0, -2 * widest, -widest, 0, widest, 2 * widest, 1.0])
        lowest = min(point.error for point in points)
        axes.set_ylim(min(2 * lowest, -2.5 * widest), 2 * farthest)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.grid(visible=False)


def _handles(policies: list[str], cases: list[str]) -> list[Line2D]:
    """Policies by colour, then workloads by shape."""
    colours = [line_style(index)["color"] for index in range(len(policies))]
    small: dict[str, Any] = {"color": "#555555", "markersize": 4, "linestyle": "none"}
    return [
        *(
            Line2D([], [], color=colour, linewidth=3, label=name)
            for colour, name in zip(colours, policies, strict=True)
        ),
        *(
            Line2D([], [], marker=shape, label=name, **small)
            for shape, name in zip(cycle(_SHAPES), cases, strict=False)
        ),
    ]
