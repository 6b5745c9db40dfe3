"""Attainment of the requests' objectives against the request rate: how much load a policy carries within its SLOs."""

import re
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cbatch import ConfigError
from experiments.plots.parts import draw_rates
from experiments.plots.series import coincide_text, describe_points, leave_out, load_rates
from experiments.plots.style import add_title, new_figure, print_style
from experiments.store.intervals import share_ends

_SHARES = {"joint": "share", "ttft": "ttft_share", "tbt": "tbt_share", "total": "total_share"}
_DECLARED = re.compile(r"workload\.tiers\.(.+)\.share$")
Panel = tuple[str, str, str]
"""Workload, column and title of a panel."""

_MOST_ACROSS = 4  # panels of a page's width


@print_style()
def draw(folder: Path, objective: str = "joint", goal: float = 0.9, runs: str = "") -> Figure:
    """A panel for all requests and one for each tier, a line for each policy and whatever else varies.
    A tier whose requests attain the same in all runs is named below instead.

    Of several seeds, the line is the mean, and a band its 95% interval. Several workloads
    are rows, or side by side without tiers. Without objectives of the requests, `metrics.objectives` count.

    Args:
        objective: joint, all that a request has together; or one of them: ttft, tbt, total.
        goal: the share that a thin line marks, named in the legend.
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, fewer than two rates, too many series, or no run has objectives.
    """
    if objective not in _SHARES:
        raise ConfigError(f"objective={objective}: choose among {', '.join(_SHARES)}")
    if not 0 < goal <= 1:
        raise ConfigError(f"goal={goal:g}: give a share above 0, at most 1")
    frame = load_rates(folder, runs)
    titles = _titles(frame, _SHARES[objective], folder)
    frame = leave_out(frame, [next(iter(titles))])
    workloads, labels = list(dict.fromkeys(frame["of"])), list(dict.fromkeys(frame["label"]))
    prefix = "" if len(workloads) == 1 else "{}: " if len(titles) == 1 else "{}:\n"  # panels of tiers are narrow
    blocks = [[(of, column, prefix.format(of) + title) for column, title in titles.items()] for of in workloads]
    blocks, flat = _without_flat(frame, blocks)
    if len(titles) == 1:
        blocks = [[panel for block in blocks for panel in block]]  # workloads side by side
    widest = max(map(len, blocks))
    across = min(widest, _MOST_ACROSS)
    down = -(-widest // across)
    figure, axes = new_figure(down * len(blocks), across, 1.0 + 2.0 * down * len(blocks))
    for place, block in enumerate(blocks):
        panels = [panel for row in axes[down * place : down * (place + 1)] for panel in row]
        for panel, (of, column, title) in zip(panels, block, strict=False):
            draw_rates(panel, frame[frame["of"] == of], column, labels, ends=share_ends)
            panel.set(title=title, xlabel="request rate [requests/s]")
        for panel in panels[len(block) :]:
            panel.set_axis_off()
    for panels in axes:
        _finish(panels, goal)
    heading = "" if objective == "joint" else f"Objective {objective}"
    handles = axes[0][0].get_legend_handles_labels()[0]
    notes = [*flat, coincide_text(frame, ["of", "rate", *titles])]
    add_title(
        figure, frame, heading, handles, note=describe_points(frame, "rate"), below="\n".join(filter(None, notes))
    )
    return figure


def _without_flat(frame: pd.DataFrame, blocks: list[list[Panel]]) -> tuple[list[list[Panel]], list[str]]:
    """Leaves out the panels of tiers in which all points are equal, or without points; returns a line that names the former, too."""
    kept, equal = [], []
    for every, *tiers in blocks:
        kept.append([every])
        for of, column, title in tiers:
            shares = frame.loc[frame["of"] == of, column].drop_duplicates()
            if len(shares) > 1:
                kept[-1].append((of, column, title))
            elif shares.notna().all():
                equal.append(f"{' '.join(title.split())}: {100 * shares.iloc[0]:g}% in each run")
    return kept, ["; ".join(equal)] if equal else []


def _finish(panels: list[Axes], goal: float) -> None:
    """The axes of a row, whose shares are labelled at the left alone."""
    panels[0].set_ylabel("attainment")
    for panel in filter(lambda panel: panel.axison, panels):
        panel.axhline(goal, color="#555555", linewidth=0.5, zorder=1, label=f"goal: {goal:.0%}")
        panel.set_ylim(-0.06, 1.06)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.tick_params(labelleft=panel is panels[0])


def _titles(frame: pd.DataFrame, share: str, folder: Path) -> dict[str, str]:
    """Title by column: all requests, and each tier that has this objective, as they are declared."""
    found = {str(column): re.fullmatch(rf"attainment\.tiers\.(.+)\.{share}", str(column)) for column in frame}
    declared = list(dict.fromkeys(key[1] for key in map(_DECLARED.match, map(str, frame)) if key))
    order = {name: place for place, name in enumerate(declared)}
    tiers = {column: tier[1] for column, tier in found.items() if tier}
    tiers = dict(sorted(tiers.items(), key=lambda item: order.get(item[1], len(order))))
    every = f"attainment.{share}"
    if every in frame:
        return {every: "all requests", **(tiers if len(tiers) > 1 else {})}
    if share == "share" and "goodput.attained_share" in frame:
        return {"goodput.attained_share": "all requests"}
    asked = "workload.slo or workload.tiers" + (", or metrics.objectives" if share == "share" else "")
    raise ConfigError(f"{folder}: no run has this objective; give the requests objectives with {asked}")
