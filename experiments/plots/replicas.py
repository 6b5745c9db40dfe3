"""Draws the replicas of an autoscaled run over time."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style
from experiments.store.run_folder import REPLICAS
from experiments.store.tables import read_replicas, read_requests

_BINS = 60
"""Intervals of time in which arrivals are counted."""


@print_style()
def draw(folder: Path, look: Look = PLAIN) -> Figure:
    """Draws the replicas that are paid and those that are ready, by pool, and the requests that arrive per second.

    Raises ConfigError if there is no finished run, several, or one without an autoscaler.
    """
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    is_scaled = "autoscale" in run and (Path(run["folder"]) / REPLICAS).is_file()
    if not is_scaled or run["summary"]["replicas"].get("lives") is None:
        raise ConfigError(f"{run['folder']}: its number of replicas never changes; choose a run with autoscale=")
    lives, arrivals = read_replicas(run["folder"]), read_requests(run["folder"])["arrival"]
    end = float(read_requests(run["folder"])["last_token"].max())
    figure, [[above], [below]] = new_figure(2, 1, 3.4, ratios=(2, 1), sharex=True)
    for place, (pool, own) in enumerate(lives.groupby("pool", dropna=False)):
        style, name = line_style(place), f"{pool!s}: " if pool else ""
        style |= {"marker": ""}
        _draw_steps(above, own["asked"], own["closed"], end, label=f"{name}paid", **style | {"linestyle": ":"})
        until = own["draining"].fillna(own["closed"])
        _draw_steps(above, own["ready"], until, end, label=f"{name}ready", **style | {"linestyle": "-"})
    counts, edges = np.histogram(arrivals, _BINS, (0.0, end))
    below.stairs(counts / np.diff(edges), edges, color="black")
    above.set(ylabel="replicas")
    above.yaxis.set_major_locator(MaxNLocator(integer=True))
    below.set(ylabel="arrivals\n[requests/s]", xlabel="time [s]", xlim=(0.0, end))
    for panel in (above, below):
        panel.set_ylim(0, 1.05 * panel.dataLim.y1)
    add_title(figure, shown, str(run["label"]), above.get_legend_handles_labels()[0], look=look)
    return figure


def _draw_steps(panel: Axes, begins: "pd.Series[float]", ends: "pd.Series[float]", end: float, **style: object) -> None:
    """Draws how many intervals hold each time; an interval without an end lasts to `end`."""
    begins = begins.dropna()
    changes = pd.concat([pd.Series(1, begins), pd.Series(-1, ends[begins.index].fillna(end))]).groupby(level=0).sum()
    counts = changes.cumsum()[changes.index < end]
    times = [*counts.index, end]
    panel.plot(times, [*counts, counts.iloc[-1]], drawstyle="steps-post", **style)  # type: ignore[arg-type]
