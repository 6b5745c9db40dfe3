"""Draws one figure of runs against another, a point for each label with the 95% intervals of both means, cut at 0 and 100%."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from cbatch import ConfigError
from experiments.plots.series import check_few, describe_points, leave_out, load_series, points_of
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style
from experiments.report.headings import check_figure, heading_of
from experiments.report.notes import tail_text


@print_style()
def draw(folder: Path, look: Look = PLAIN, x: str = "replicas.seconds", y: str = "goodput.attained_share") -> Figure:
    """Draws a point for each label, such as the SLO share that an autoscaler attains against the replica-seconds that it pays.

    Raises ConfigError if there are no runs that have both figures, or too many labels.

    Args:
        x, y: figures of summary.json.
    """
    check_figure(f"x={x}")
    check_figure(f"y={y}")
    runs = load_series(folder, look)
    if absent := next((key for key in (x, y) if key not in runs), None):
        raise ConfigError(f"{absent}: no run in {folder} has this figure; give x= and y= that they have")
    runs = leave_out(runs, [x, y])
    check_few(runs)
    runs = runs.assign(all=0)  # one place for all runs of a label
    figure, [[panel]] = new_figure(1, 1, 3.4)
    across, up = (points_of(runs, "all", key).set_index("label") for key in (x, y))
    most = [100 if heading_of(key).kind == "share" else np.inf for key in (x, y)]
    for place, label in enumerate(across.index):
        points = zip((across.loc[label], up.loc[label]), most, strict=True)
        xerr, yerr = ([[at["mean"] - max(at["low"], 0)], [min(at["high"], top) - at["mean"]]] for at, top in points)
        style = {**line_style(place), "linestyle": "", "label": label, "capsize": 2, "clip_on": False}
        panel.errorbar([across.loc[label, "mean"]], [up.loc[label, "mean"]], xerr=xerr, yerr=yerr, **style)
    panel.set(xlabel=heading_of(x).text, ylabel=heading_of(y).text)
    panel.set_xlim(0, 1.08 * float(np.nanmax(across[["mean", "high"]].to_numpy(float))))
    panel.set_ylim(*(0, 100) if most[1] == 100 else (max(panel.get_ylim()[0], 0), None))
    handles, note = panel.get_legend_handles_labels()[0], describe_points(runs, "all")
    tail = tail_text(runs["run.counted_requests"].groupby(runs["label"]).agg(list)) if "p99" in x + y else ""
    add_title(figure, runs, runs["heading"].iloc[0], handles, note, tail, look)
    return figure
