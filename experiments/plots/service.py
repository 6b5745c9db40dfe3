"""Draws the service that clients receive over time, and its inequality: the figures of VTC (OSDI 2024)."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cbatch import ConfigError
from cbatch.results.service import WINDOW_SECONDS, Service, measure_windows
from cbatch.validation import positive
from experiments.plots.parts import PlainNumbers
from experiments.plots.series import load_runs
from experiments.plots.style import PLAIN, Look, add_title, line_style, new_figure, print_style, visible
from experiments.store.tables import read_service

Seconds = Annotated[float, positive("seconds")]

_POINTS = 400
_MOST_CLIENTS = 8  # legend entries: clients, or the largest clients and an entry for all others
_OTHERS: dict[str, Any] = {"color": "#AAAAAA", "linewidth": 0.5}


@print_style()
def draw(folder: Path, look: Look = PLAIN, window: Seconds = WINDOW_SECONDS) -> Figure:
    """Draws over time: service received by each client since the start, its rate in a window around each time, and the service difference.

    Service is divided by the client's weight, if it has one. With many clients, the clients that received most have separate
    lines; the others are grey. The service difference is left out if the last arrival comes before the end of a window.

    Raises ConfigError for no finished run or several runs, or if no request has a client.

    Args:
        window: seconds of the windows of rates and of the service difference; if the arrivals span less, a tenth of the run.
    """
    shown = load_runs(folder, look, 1)
    run = shown.iloc[0]
    service = read_service(run["folder"])
    if service is None:
        raise ConfigError(f"{run['folder']}: no request names its client; choose a workload with clients")
    first, last = float(service.arrival.min()), float(service.last_token.max())
    if window > np.ptp(service.arrival):
        window = min(window, float(f"{(last - first) / 10:.2g}"))
    windows = measure_windows(service, window)
    ratios = (3, 3, 2) if len(windows.middle) else (3, 3)
    figure, grid = new_figure(len(ratios), 1, 0.2 + 0.6 * sum(ratios), ratios=ratios, sharex=True)
    total, rate, *others = (panel for [panel] in grid)
    times = np.linspace(first, last, _POINTS)
    begin, end = np.maximum(times - window / 2, first), np.minimum(times + window / 2, last)
    _draw_clients(total, times, service.received(times) / 1e3, service)
    _draw_clients(rate, times, (service.received(end) - service.received(begin)) / (end - begin)[:, None], service)
    for unfair in others:
        unfair.plot(windows.middle, windows.difference, color="black", marker="o", markersize=3, linewidth=1)
        unfair.set_ylabel("service difference\n[per s]")
    what = "service / weight" if np.ptp(service.weight) else "service"
    total.set_ylabel(f"{what} received\n[1,000 weighted tokens]")
    rate.set_ylabel(f"{what} rate\n[weighted tokens/s]")
    for panel in (total, rate, *others):
        panel.set_ylim(0, None if panel.dataLim.y1 > 0 else 1)
        panel.yaxis.set_major_formatter(PlainNumbers())
    grid[-1][0].set(xlabel="time [s]", xlim=(first if first > 0.05 * last else 0, last))
    handles = total.get_legend_handles_labels()[0]
    add_title(figure, shown, str(run["label"]), handles, f"windows of {window:g} s", look=look)
    return figure


def _draw_clients(panel: Any, times: NDArray[np.float64], values: NDArray[np.float64], service: Service) -> None:
    """Draws values divided by the clients' weights. values: [times, clients]."""
    shown = values / service.weight
    most = np.argsort(-service.received(np.array([np.inf]))[0], kind="stable")
    num_named = len(most) if len(most) <= _MOST_CLIENTS else _MOST_CLIENTS - 1
    named, others = most[:num_named], most[num_named:]
    for place, client in enumerate(others):
        label = f"{len(others)} others" if place == 0 else None
        panel.plot(times, shown[:, client], label=label, **_OTHERS)
    for index, client in enumerate(named):
        style = {**line_style(index), "markevery": (index * 7 % 50, 50)}
        panel.plot(times, shown[:, client], label=visible(service.clients[client]), **style)
