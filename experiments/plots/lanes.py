"""What host and device do during a few iterations, in lanes for each run: where the gaps are, and what fills them.

Copies to and from the device have their own lanes if the run timed them.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch.executor import CopyTimes
from experiments.config.command_line import Count, Index
from experiments.plots.lane_panels import BENCHMARK, Panel, read_benchmark, read_runs
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.series import load_runs
from experiments.plots.style import COPY, DECODE, HOST, IDLE, PREFILL, add_heading, add_title, new_figure, print_style

_COPIES = {"copy in": ("upload_started", "upload_ended"), "copy out": ("download_started", "download_ended")}
_LABELLED = 0.03  # an iteration this wide, as a share of the panel, has room for its number


@print_style()
def draw(folder: Path, first: Index = 20, iterations: Count = 8, runs: str = "") -> Figure:
    """Lanes from the start of an iteration on, of finished runs or of a folder of the `async` benchmark.

    Args:
        first, iterations: the first iteration that is shown, and how many; a benchmark keeps its own window.
        runs: show only runs whose folder names - for a benchmark, the batch whose name - contain this.

    Raises:
        ConfigError: no finished runs, too many, or a run that ended before `first`.
    """
    if (folder / BENCHMARK).is_file():
        panels, measured = read_benchmark(folder, runs)
        figure = _draw_panels(panels, "a decode iteration")
        what = f"{measured['model']}, {measured['batch']} requests of {measured['prompt']} prompt and "
        handles, origin = _handles(prompts=False, copies=False), f"measured on {measured['hardware']}"
        add_heading(figure, f"{what}{measured['batch_name']} tokens", origin, handles)
        return figure
    frame = load_runs(folder, runs)
    panels = read_runs(frame, first, iterations)
    figure = _draw_panels(panels, f"iteration {first}")
    copies = any(len(_names(panel.steps)) > 2 for panel in panels)
    add_title(figure, frame, handles=_handles(prompts=True, copies=copies))
    return figure


def _draw_panels(panels: list[Panel], origin: str) -> Figure:
    seconds = max(panel.end - panel.begin for panel in panels)
    num_lanes = sum(len(_names(panel.steps)) for panel in panels)
    figure, axes = new_figure(len(panels), 1, 0.9 + 0.35 * len(panels) + 0.25 * num_lanes, sharex=True)
    for [place], panel in zip(axes, panels, strict=True):
        _draw_lanes(place, panel.steps, panel.begin, panel.begin + seconds)
        place.set_title(panel.name)
        names = _names(panel.steps)
        for share, lane in ((panel.host_share, names.index("host")), (panel.device_share, names.index("device"))):
            place.text(1.005, lane, _percent(share), transform=place.get_yaxis_transform(), va="center")
    axes[-1][0].set_xlabel(f"time since the start of {origin} [ms]; at the right, the lane's active share of the run")
    return figure


def _percent(share: float) -> str:
    """Formats a share with one decimal, or two where one would round to 100%."""
    return f"{share:.2%}" if 0.9995 <= share < 1 else f"{share:.1%}"


def _names(steps: pd.DataFrame) -> list[str]:
    """Names of the lanes, from the lowest one."""
    return ["copy out", "device", "copy in", "host"] if set(CopyTimes._fields) <= set(steps) else ["device", "host"]


def _handles(prompts: bool, copies: bool) -> list[Patch]:
    """Handles of the legend; prompts, copies: whether any are shown."""
    handles = [Patch(color=PREFILL, label="compute, with prompts")] if prompts else []
    handles += [Patch(color=COPY, label="copy")] if copies else []
    return [
        *handles,
        Patch(color=DECODE, label="compute, decodes alone"),
        Patch(color=HOST, label="plan, launch, absorb"),
        Patch(facecolor=IDLE, edgecolor="#999999", label="wait"),
    ]


def _draw_lanes(axes: Axes, steps: pd.DataFrame, begin: float, end: float) -> None:
    """The host above, the device below, copies beside it, in milliseconds since `begin`."""
    names = _names(steps)
    host, device = names.index("host"), names.index("device")
    near = steps[(steps["done_at"] > begin) & (steps["planned_at"] < end)]

    def draw_lane(lane: int, part: pd.DataFrame, started: str, ended: str, colour: str, edge: str = "none") -> None:
        spans = zip(1e3 * (part[started] - begin), 1e3 * (part[ended] - part[started]), strict=True)
        draw_spans(axes, lane, spans, facecolors=colour, edgecolors=edge)

    lane_axes(axes, names, 0, (end - begin) * 1e3)
    draw_lane(host, near, "waited_at", "received_at", IDLE, "#999999")
    draw_lane(host, near, "planned_at", "launched_at", HOST)
    draw_lane(host, near, "received_at", "done_at", HOST)
    for name, (started, ended) in _COPIES.items():
        if name in names:
            draw_lane(names.index(name), near, started, ended, COPY, COPY)
    mixed = near["num_prefill_tokens"] > 0
    draw_lane(device, near[mixed], "started", "ended", PREFILL, "white")
    draw_lane(device, near[~mixed], "started", "ended", DECODE, "white")
    for number, started, ended in zip(near["iteration"], near["started"], near["ended"], strict=True):
        if ended <= end and ended - started > _LABELLED * (end - begin):
            middle = ((started + ended) / 2 - begin) * 1e3
            axes.text(middle, device, str(number), ha="center", va="center", fontsize=6, color="white", clip_on=True)
