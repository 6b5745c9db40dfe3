"""Idle time of pipeline stages by cause: SARATHI's three kinds of bubbles (arXiv 2308.16369, section 3.3), and the rest."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import add_heading, add_title, new_figure, print_style
from reproduction.parts import stacked_bars

SIMULATED = "-simulated"
PARTS = {
    "PB1: prompt lengths differ": ("pb1",),
    "PB2: prompts against decodes alone": ("pb2",),
    "PB3: decodes or contexts differ": ("pb3",),
    "filling and draining": ("no_work",),
    "hand-over, host": ("communication", "host"),
}
"""Fields of `cbatch.sim.stages.StageAccount` by name of the part."""

Shares = Mapping[str, float]


class Panel(NamedTuple):
    """bars: the idle shares of the stages' time by group of bars, and by name of the bar."""

    title: str
    bars: Mapping[str, Mapping[str, Shares]]


@print_style()
def draw(folder: Path, runs: str = "") -> Figure:
    """Bars for each stage of finished runs; or, of a folder with results of `bench pipeline`, measured beside simulated ones.

    Args:
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, too many, or none with several pipeline stages.
    """
    panels = list(_benchmarks(folder))
    frame = None if panels else load_runs(folder, runs)
    if frame is not None:
        panels = [_of_runs(frame)]
    figure, [row] = new_figure(1, len(panels), 3.1)
    grid = row[0].get_gridspec()
    assert grid is not None, "subplots have one"
    grid.set_width_ratios([len(panel.bars) for panel in panels])
    highest = max(_draw_panel(place, panel) for place, panel in zip(row, panels, strict=True))
    for place in row:
        place.set_ylim(top=1.08 * highest)
    row[0].set_ylabel("idle share of the stages' time")
    handles, _ = row[0].get_legend_handles_labels()
    if frame is not None:
        add_title(figure, frame, "Idle time of pipeline stages", handles, below="PB: all three kinds of bubbles")
    else:
        reals = [real for real, _ in _pairs(folder)]
        days = ", ".join(sorted({real["date"] for real in reals}))
        measured = f"measured on {reals[0]['hardware']}, {days}"
        origin = f"{measured}; simulated with the profile of one GPU; means over the stages"
        origin = f"{origin}; PB: all three kinds of bubbles"
        add_heading(figure, "Idle time of pipeline stages", origin, handles)
    return figure


def _benchmarks(folder: Path) -> Iterator[Panel]:
    """A panel for each measured result that was simulated too, of its policies on several stages."""
    for real, simulated in _pairs(folder):
        measured, predicted = dict(_staged(real["figures"])), dict(_staged(simulated["figures"]))
        bars = {
            policy: {"measured": _idle(measured[policy]), "simulated": _idle(predicted[policy])}
            for policy in measured
            if policy in predicted
        }
        if bars:
            number = len(next(iter(measured.values())))
            yield Panel(f"{real['model']}, {number} stages, batches of {real['batch']}", bars)


def _staged(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields policies and their stages; some files have a level above them, the number of stages."""
    for name, found in figures.items():
        if "stages" not in found:
            yield from _staged(found)
        elif found["stages"]:
            yield name, found["stages"]


def _pairs(folder: Path) -> Iterator[tuple[Any, Any]]:
    for path in sorted(folder.glob(f"pipeline*{SIMULATED}.json"), reverse=True):
        real = path.with_name(path.name.replace(SIMULATED, ""))
        if real.is_file():
            yield json.loads(real.read_text()), json.loads(path.read_text())


def _of_runs(frame: pd.DataFrame) -> Panel:
    bars = {
        str(run["label"]): {f"stage {number}": _idle([stage]) for number, stage in enumerate(run["execution.stages"])}
        for _, run in frame.iterrows()
        if isinstance(run.get("execution.stages"), list) and len(run["execution.stages"]) > 1
    }
    if not bars:
        raise ConfigError("bubbles: no run has several pipeline stages; give backend.pipeline_stages=2")
    return Panel("", bars)


def _idle(stages: Sequence[Mapping[str, float]]) -> Shares:
    """The share of all stages' time by part. stages: seconds, or shares of equal spans, by field."""
    whole = sum(sum(stage.values()) for stage in stages)
    return {part: sum(stage[field] for stage in stages for field in fields) / whole for part, fields in PARTS.items()}


def _draw_panel(axes: Axes, panel: Panel) -> float:
    """Groups side by side, the bars of a group in turn; above each its bubbles, below its name. Returns the highest."""
    kinds = list(next(iter(panel.bars.values())))
    width = 0.84 / len(kinds)
    places, names, rows = [], [], []
    for group, bars in enumerate(panel.bars.values()):
        for number, (kind, shares) in enumerate(bars.items()):
            places.append(group + width * (number - (len(kinds) - 1) / 2))
            names.append(kind)
            rows.append(shares)
    table = pd.DataFrame(rows)
    stacked_bars(axes, places, table, 0.9 * width)
    for place, total, bubbles in zip(places, table.sum(axis=1), table.iloc[:, :3].sum(axis=1), strict=True):
        axes.text(place, total, f"PB {bubbles:.1%}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(places, names, fontsize=7)
    for group, name in enumerate(panel.bars):
        text = name.replace(", ", "\n")
        axes.text(group, -0.11, text, ha="center", va="top", transform=axes.get_xaxis_transform())
    axes.tick_params(axis="x", length=0)
    axes.set_title(panel.title)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return float(table.sum(axis=1).max())
