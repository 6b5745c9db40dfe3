"""What host and device do during a few iterations, lanes for each run: where the gaps are, and what fills them.

Copies to and from the device have lanes of their own where the run has timed them.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch.executor import CopyTimes
from experiments.plots.lane_panels import BENCHMARK, Panel, of_benchmark, of_runs
from experiments.plots.series import chosen, few, labelled
from experiments.plots.style import COPY, DECODE, HOST, IDLE, PREFILL, headed, new_figure, printed, title
from experiments.store.tables import load

_HEIGHT = 0.8  # of a lane
_COPIES = {"copy in": ("upload_started", "upload_ended"), "copy out": ("download_started", "download_ended")}
_LABELLED = 0.03  # share of the width from which on an iteration has room for its number


def draw(folder: Path, first: int = 20, iterations: int = 8, runs: str = "") -> Figure:
    """Lanes from the start of an iteration on: of finished runs, or of a folder that the `async` benchmark has written to.

    Args:
        first, iterations: the first iteration that is shown, and how many; a benchmark has kept a window of its own.
        runs: show only runs whose folder's name - of a benchmark, the batch whose name - holds this.

    Raises:
        ConfigError: no finished runs, too many, or a run that ended before `first`.
    """
    if (folder / BENCHMARK).is_file():
        panels, measured = of_benchmark(folder, runs)
        with printed():
            figure, handles = _figure(panels, "a decode iteration"), _legend(prompts=False, copies=False)
            what = f"{measured['model']}, {measured['batch']} requests of {measured['prompt']} prompt and "
            headed(figure, f"{what}{measured['batch_name']} tokens", f"measured on {measured['hardware']}", handles)
        return figure
    frame = few(labelled(chosen(load(folder), runs)))
    with printed():
        panels = of_runs(frame, first, iterations)
        figure = _figure(panels, f"iteration {first}")
        copies = any(len(_names(panel.steps)) > 2 for panel in panels)
        title(figure, frame, handles=_legend(prompts=True, copies=copies))
    return figure


def _figure(panels: list[Panel], origin: str) -> Figure:
    seconds = max(panel.end - panel.begin for panel in panels)
    num_lanes = sum(len(_names(panel.steps)) for panel in panels)
    figure, axes = new_figure(len(panels), 1, 0.9 + 0.35 * len(panels) + 0.25 * num_lanes, sharex=True)
    for [place], panel in zip(axes, panels, strict=True):
        _lanes(place, panel.steps, panel.begin, panel.begin + seconds)
        place.set_title(panel.name, loc="left")
        names = _names(panel.steps)
        for share, lane in ((panel.host_share, names.index("host")), (panel.device_share, names.index("device"))):
            place.text(1.005, lane, _percent(share), transform=place.get_yaxis_transform(), va="center")
    axes[-1][0].set_xlabel(f"time since the start of {origin} [ms]; at the right, the lane's active share of the run")
    return figure


def _percent(share: float) -> str:
    """With a second digit where one would round to the whole."""
    return f"{share:.2%}" if 0.9995 <= share < 1 else f"{share:.1%}"


def _names(steps: pd.DataFrame) -> list[str]:
    """Of the lanes, from the lowest one."""
    return ["copy out", "device", "copy in", "host"] if set(CopyTimes._fields) <= set(steps) else ["device", "host"]


def _legend(prompts: bool, copies: bool) -> list[Patch]:
    """Handles; prompts, copies: whether any are shown."""
    handles = [Patch(color=PREFILL, label="compute, with prompts")] if prompts else []
    handles += [Patch(color=COPY, label="copy")] if copies else []
    return [
        *handles,
        Patch(color=DECODE, label="compute, decodes alone"),
        Patch(color=HOST, label="plan, launch, absorb"),
        Patch(facecolor=IDLE, edgecolor="#999999", label="wait"),
    ]


def _lanes(axes: Axes, steps: pd.DataFrame, begin: float, end: float) -> None:
    """The host above, the device below, copies beside it, in milliseconds from `begin` on."""
    names = _names(steps)
    host, device = names.index("host"), names.index("device")
    near = steps[(steps["done_at"] > begin) & (steps["planned_at"] < end)]
    _bars(axes, host, near["waited_at"], near["received_at"], begin, IDLE, edge="#999999")
    _bars(axes, host, near["planned_at"], near["launched_at"], begin, HOST)
    _bars(axes, host, near["received_at"], near["done_at"], begin, HOST)
    for lane, name in enumerate(names):
        if name in _COPIES:
            started, ended = _COPIES[name]
            _bars(axes, lane, near[started], near[ended], begin, COPY, edge=COPY)
    mixed = near["num_prefill_tokens"] > 0
    for part, colour in ((near[mixed], PREFILL), (near[~mixed], DECODE)):
        _bars(axes, device, part["started"], part["ended"], begin, colour, edge="white")
    for number, started, ended in zip(near["iteration"], near["started"], near["ended"], strict=True):
        if ended <= end and ended - started > _LABELLED * (end - begin):
            middle = ((started + ended) / 2 - begin) * 1e3
            axes.text(middle, device, str(number), ha="center", va="center", fontsize=6, color="white", clip_on=True)
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_ylim(-0.6, host + 0.6)
    axes.set_yticks(range(host, -1, -1), names[::-1])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _bars(
    axes: Axes, lane: int, begin: pd.Series, end: pd.Series, origin: float, colour: str, edge: str = "none"
) -> None:
    spans = [((a - origin) * 1e3, (b - a) * 1e3) for a, b in zip(begin, end, strict=True)]
    axes.broken_barh(spans, (lane - _HEIGHT / 2, _HEIGHT), facecolors=colour, edgecolors=edge, linewidth=0.4)
