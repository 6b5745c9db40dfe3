"""Time to first token and between tokens against the request rate: the figure of serving papers (vLLM, Sarathi-Serve)."""

from pathlib import Path

from matplotlib.figure import Figure

from cbatch import ConfigError
from cbatch.results.metrics import PERCENTILES
from experiments.plots.parts import draw_rates, label_log
from experiments.plots.series import coincide_text, describe_points, leave_out, load_rates
from experiments.plots.style import add_title, new_figure, print_style
from experiments.store.intervals import log_ends
from experiments.store.notes import tail_text

_PANELS = (("TTFT", "s", "ttft_seconds", 1.0), ("TBT", "ms", "tbt_seconds", 1e3))


@print_style()
def draw(folder: Path, percentiles: tuple[int, ...] = (50, 99), runs: str = "") -> Figure:
    """A row of panels for each workload and percentile, a line for each policy and whatever else varies.

    Of several seeds, the line is the mean, and a band its 95% interval, that of the logarithm.

    Args:
        percentiles: of 50, 90, 95 and 99.
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, fewer than two rates, too many series, or another percentile.
    """
    for rank in percentiles:
        if rank not in PERCENTILES:
            raise ConfigError(f"percentiles={rank}: choose among {', '.join(map(str, PERCENTILES))}")
    metrics = [f"{metric}.p{rank}" for _, _, metric, _ in _PANELS for rank in percentiles]
    frame = leave_out(load_rates(folder, runs), metrics)
    rows = [(workload, rank) for workload in dict.fromkeys(frame["of"]) for rank in percentiles]
    figure, axes = new_figure(len(rows), 2, 0.9 + 1.8 * len(rows), sharex=frame["of"].nunique() == 1)
    for (workload, rank), panels in zip(rows, axes, strict=True):
        own = frame[frame["of"] == workload]
        for panel, (name, unit, metric, factor) in zip(panels, _PANELS, strict=True):
            draw_rates(panel, own, f"{metric}.p{rank}", dict.fromkeys(frame["label"]), factor, log_ends)
            panel.set(yscale="log", ylabel=f"{name} P{rank} [{unit}]")
            label_log(panel.yaxis)
        if len(rows) > len(percentiles):
            panels[0].set_title(workload)
    for panel in axes[-1]:
        panel.set_xlabel("request rate [requests/s]")
    note = describe_points(frame, "rate")
    counted = [list(group) for _, group in frame.groupby(["label", "rate", "of"])["run.counted_requests"]]
    notes = [coincide_text(frame, ["of", "rate", *metrics]), tail_text(counted) if 99 in percentiles else ""]
    below = "\n".join(filter(None, notes))
    add_title(figure, frame, handles=axes[0][0].get_legend_handles_labels()[0], note=note, below=below)
    return figure
