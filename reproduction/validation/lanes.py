"""What host and device do during a few iterations, in lanes for each run: where the gaps are, and what fills them."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cbatch import ConfigError
from experiments.plots.parts import draw_spans, lane_axes
from experiments.plots.series import load_runs
from experiments.plots.style import DECODE, HOST, IDLE, PREFILL, Look, add_title, new_figure, print_style
from experiments.settings.command_line import Count, Index
from experiments.store.tables import read_steps

_LANES = ["device", "host"]  # from the lowest one
_LABELLED = 0.03  # an iteration this wide, as a share of the panel, has room for its number


@print_style()
def draw(folder: Path, first: Index = 20, iterations: Count = 8) -> Figure:
    """Lanes of finished runs from the start of an iteration on.

    Args:
        first, iterations: the first iteration that is shown, and how many.

    Raises:
        ConfigError: no finished runs, too many, or a run that ended before `first`.
    """
    frame = load_runs(folder, Look())
    shown = [run for _, run in frame.iterrows()]
    windows = [_window(str(run["folder"]), first, iterations) for run in shown]
    seconds = max(end - begin for _, begin, end in windows)
    figure, axes = new_figure(len(shown), 1, 0.9 + 0.85 * len(shown), sharex=True)
    for [panel], run, (steps, begin, _) in zip(axes, shown, windows, strict=True):
        _draw_lanes(panel, steps, begin, begin + seconds)
        label = str(run["label"])
        panel.set_title(label if "runtime" in label else f"{label}, {run['runtime']}")
        for place, lane in enumerate(_LANES):
            share = f"{run[f'iterations.{lane}_active_share']:.1%}"
            panel.text(1.005, place, share, transform=panel.get_yaxis_transform(), va="center")
    since = f"time since the start of iteration {first} [ms]"
    axes[-1][0].set_xlabel(f"{since}; at the right, the lane's active share of the run")
    handles = [
        Patch(color=PREFILL, label="compute, with prompts"),
        Patch(color=DECODE, label="compute, decodes alone"),
        Patch(color=HOST, label="plan, launch, absorb"),
        Patch(facecolor=IDLE, edgecolor="#999999", label="wait"),
    ]
    add_title(figure, frame, handles=handles)
    return figure


def _window(folder: str, first: int, iterations: int) -> tuple[pd.DataFrame, float, float]:
    """All iterations of a run, and the seconds when the shown ones begin and end on the device."""
    steps = read_steps(folder)
    shown = steps[(steps["iteration"] >= first) & (steps["iteration"] < first + iterations)]
    if shown.empty:
        asked = f"first={first} iterations={iterations}"
        raise ConfigError(f"{asked}: {folder} has iterations 0 to {len(steps) - 1}; choose among them")
    return steps, float(shown["started"].iloc[0]), float(shown["ended"].iloc[-1])


def _draw_lanes(axes: Axes, steps: pd.DataFrame, begin: float, end: float) -> None:
    """The host above, the device below, in milliseconds since `begin`."""
    device, host = range(len(_LANES))
    near = steps[(steps["done_at"] > begin) & (steps["planned_at"] < end)]

    def draw_lane(lane: int, part: pd.DataFrame, started: str, ended: str, colour: str, edge: str = "none") -> None:
        spans = zip(1e3 * (part[started] - begin), 1e3 * (part[ended] - part[started]), strict=True)
        draw_spans(axes, lane, spans, facecolors=colour, edgecolors=edge)

    lane_axes(axes, _LANES, 0, (end - begin) * 1e3)
    draw_lane(host, near, "waited_at", "received_at", IDLE, "#999999")
    draw_lane(host, near, "planned_at", "launched_at", HOST)
    draw_lane(host, near, "received_at", "done_at", HOST)
    mixed = near["num_prefill_tokens"] > 0
    draw_lane(device, near[mixed], "started", "ended", PREFILL, "white")
    draw_lane(device, near[~mixed], "started", "ended", DECODE, "white")
    for number, started, ended in zip(near["iteration"], near["started"], near["ended"], strict=True):
        if ended <= end and ended - started > _LABELLED * (end - begin):
            middle = ((started + ended) / 2 - begin) * 1e3
            axes.text(middle, device, str(number), ha="center", va="center", fontsize=6, color="white", clip_on=True)
