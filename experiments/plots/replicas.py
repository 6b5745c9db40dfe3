"""Draws the replicas of an autoscaled run over time."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cbatch import ConfigError
from experiments.plots.series import load_runs
from experiments.plots.style import PLAIN, PREFILL, Look, add_title, new_figure, print_style
from experiments.store.run_folder import REPLICAS
from experiments.store.tables import read_replicas, read_requests

_BINS = 60  # intervals of time in which arrivals are counted


@print_style()
def draw(folder: Path, look: Look = PLAIN) -> Figure:
    """Draws the replicas that are ready and, over them, those that are paid, in a panel for each pool, and the requests that arrive per second.

    Raises ConfigError if there is no finished run, several, or one without an autoscaler.
    """
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    is_scaled = "autoscale" in run and (Path(run["folder"]) / REPLICAS).is_file()
    if not is_scaled or run["summary"]["replicas"].get("lives") is None:
        raise ConfigError(f"{run['folder']}: its number of replicas never changes; choose a run with autoscale=")
    lives, arrivals = read_replicas(run["folder"]), read_requests(run["folder"])["arrival"]
    end = float(read_requests(run["folder"])["last_token"].max())
    pools = dict(iter(lives.groupby("pool", dropna=False)))
    height, ratios = 1.7 + 1.7 * len(pools), [*[2] * len(pools), 1]
    figure, rows = new_figure(len(pools) + 1, 1, height, ratios=ratios, sharex=True)
    panels = [panel for row in rows for panel in row]
    for panel, (pool, own) in zip(panels, pools.items(), strict=False):
        until = own["draining"].fillna(own["closed"])
        _draw_steps(panel, own["ready"], until, end, label="ready", color=PREFILL, linewidth=2)
        _draw_steps(panel, own["asked"], own["closed"], end, label="paid", color="black", linestyle=":")
        panel.set(ylabel=f"{pool!s}: replicas" if pool else "replicas")
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    counts, edges = np.histogram(arrivals, _BINS, (0.0, end))
    panels[-1].stairs(counts / np.diff(edges), edges, color="black")
    panels[-1].set(ylabel="arrivals\n[requests/s]", xlabel="time [s]", xlim=(0.0, end))
    for panel in panels:
        panel.set_ylim(0, 1.05 * panel.dataLim.y1)
    add_title(figure, shown, str(run["label"]), panels[0].get_legend_handles_labels()[0], look=look)
    return figure


def _draw_steps(panel: Axes, begins: "pd.Series[float]", ends: "pd.Series[float]", end: float, **style: object) -> None:
    """Draws how many intervals hold each time; an interval without an end lasts to `end`."""
    begins = begins.dropna()
    changes = pd.concat([pd.Series(1, begins), pd.Series(-1, ends[begins.index].fillna(end))]).groupby(level=0).sum()
    counts = changes.cumsum()[changes.index < end]
    times = [*counts.index, end]
    panel.plot(times, [*counts, counts.iloc[-1]], drawstyle="steps-post", **style)  # type: ignore[arg-type]
