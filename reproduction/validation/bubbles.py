"""Idle time of pipeline stages by cause: SARATHI's three kinds of bubbles (arXiv 2308.16369, section 3.3), and the rest."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import PAGE, Look, add_heading, add_title, print_style
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
HEADING, NOTE = "Idle time of pipeline stages", "PB: all three kinds of bubbles"

Bars = Mapping[str, Mapping[str, Mapping[str, float]]]
"""The idle shares of the stages' time, by group of bars, name of the bar, and part."""


@print_style()
def draw(folder: Path, runs: str = "") -> Figure:
    """Draws bars for each stage of finished runs; or, of a folder with results of `bench pipeline`, measured beside simulated ones.

    Args:
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, too many, or none with several pipeline stages.
    """
    pairs = list(_pairs(folder))
    if not pairs:
        frame = load_runs(folder, Look(runs=runs))
        figure, handles = _draw({"": _of_runs(frame)})
        add_title(figure, frame, HEADING, handles, below=NOTE)
        return figure
    figure, handles = _draw(dict(_compare(*pair) for pair in pairs))
    measured = f"measured on {pairs[0][0]['hardware']}, {', '.join(sorted({real['date'] for real, _ in pairs}))}"
    add_heading(
        figure, HEADING, f"{measured}; simulated with the profile of one GPU; means over the stages; {NOTE}", handles
    )
    return figure


def _pairs(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yields each measured result that was simulated too, and its simulation."""
    for path in sorted(folder.glob(f"pipeline*{SIMULATED}.json"), reverse=True):
        real = path.with_name(path.name.replace(SIMULATED, ""))
        if real.is_file():
            yield json.loads(real.read_text()), json.loads(path.read_text())


def _compare(real: Any, simulated: Any) -> tuple[str, Bars]:
    """Returns the title of a panel, and its bars: those policies on several stages that are in both results."""
    measured, predicted = dict(_staged(real["figures"])), dict(_staged(simulated["figures"]))
    bars = {
        policy: {"measured": _idle(stages), "simulated": _idle(predicted[policy])}
        for policy, stages in measured.items()
        if policy in predicted
    }
    number = len(next(iter(measured.values())))
    return f"{real['model']}, {number} stages, batches of {real['batch']}", bars


def _staged(figures: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields policies and their stages; some files have a level above them, the number of stages."""
    for name, found in figures.items():
        if "stages" not in found:
            yield from _staged(found)
        elif found["stages"]:
            yield name, found["stages"]


def _of_runs(frame: pd.DataFrame) -> Bars:
    bars = {
        str(run["label"]): {f"stage {number}": _idle([stage]) for number, stage in enumerate(run["execution.stages"])}
        for _, run in frame.iterrows()
        if isinstance(run.get("execution.stages"), list) and len(run["execution.stages"]) > 1
    }
    if not bars:
        raise ConfigError("bubbles: no run has several pipeline stages; give backend.pipeline_stages=2")
    return bars


def _idle(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the share of all stages' time by part. stages: seconds, or shares of equal spans, by field."""
    whole = sum(sum(stage.values()) for stage in stages)
    return {part: sum(stage[field] for stage in stages for field in fields) / whole for part, fields in PARTS.items()}


def _draw(panels: Mapping[str, Bars]) -> tuple[Figure, list[Any]]:
    """Returns the figure, a panel for each title, and the handles of its legend."""
    widths = [len(bars) for bars in panels.values()]
    options: dict[str, Any] = {"squeeze": False, "sharey": True, "layout": "constrained", "width_ratios": widths}
    figure, axes = plt.subplots(1, len(panels), figsize=(PAGE, 3.1), **options)
    for place, (title, bars) in zip(axes[0], panels.items(), strict=True):
        _draw_panel(place, bars)
        place.set_title(title)
    axes[0, 0].set_ylabel("idle share of the stages' time")
    axes[0, 0].margins(y=0.08)
    axes[0, 0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return figure, axes[0, 0].get_legend_handles_labels()[0]


def _draw_panel(axes: Axes, bars: Bars) -> None:
    """Draws groups side by side, the bars of a group in turn; above each its bubbles, below its name."""
    width = 0.84 / len(next(iter(bars.values())))
    table = pd.DataFrame({(group, name): shares for group, of in bars.items() for name, shares in of.items()}).T
    offsets = table.groupby(level=0, sort=False).cumcount()
    number = table.groupby(level=0, sort=False).ngroup()
    places = number + width * offsets - 0.42 + width / 2
    stacked_bars(axes, places, table, 0.9 * width)
    for place, total, bubbles in zip(places, table.sum(axis=1), table.iloc[:, :3].sum(axis=1), strict=True):
        axes.text(place, total, f"PB {bubbles:.1%}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(places, table.index.get_level_values(1), fontsize=7)
    for group, name in enumerate(bars):
        below = axes.get_xaxis_transform()
        axes.text(group, -0.11, name.replace(", ", "\n"), ha="center", va="top", transform=below)
    axes.tick_params(axis="x", length=0)
