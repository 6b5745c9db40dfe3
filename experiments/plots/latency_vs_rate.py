"""Time to first token and between tokens against the request rate: the figure of serving papers (vLLM, Sarathi-Serve)."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from cbatch import ConfigError
from cbatch.results.metrics import PERCENTILES
from experiments.plots.parts import draw_series, label_log
from experiments.plots.series import describe_points, leave_out, load_series, summarize_series, swept
from experiments.plots.style import add_title, new_figure, print_style
from experiments.store.tables import load_requests

RATE = "workload.arrivals.rate"
SPEEDS = ("workload.speed", "workload.rate_scale")  # of a trace: the rate itself is that of its requests

_PANELS = (("TTFT", "s", "ttft_seconds", 1.0), ("TBT", "ms", "tbt_seconds", 1e3))


@print_style()
def draw(folder: Path, percentiles: tuple[int, ...] = (50, 99), runs: str = "") -> Figure:
    """A row of panels for each percentile, a line for each policy and whatever else varies.

    Of several seeds, the line is the mean, and a band reaches from the least to the greatest.

    Args:
        percentiles: of 50, 90, 95 and 99.
        runs: show only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs, fewer than two rates, too many series, or another percentile.
    """
    for rank in percentiles:
        if rank not in PERCENTILES:
            raise ConfigError(f"percentiles={rank}: choose among {', '.join(map(str, PERCENTILES))}")
    frame = load_series(folder, runs, (RATE, *SPEEDS))
    key = swept(frame, (RATE, *SPEEDS), folder, "1,2,4,8")
    frame = leave_out(frame, (key, *(f"{metric}.p{rank}" for _, _, metric, _ in _PANELS for rank in percentiles)))
    frame = frame.assign(rate=frame[key] if key == RATE else _mean_rates(frame, key))
    figure, axes = new_figure(len(percentiles), 2, 0.9 + 1.8 * len(percentiles), sharex=True)
    for row, rank in zip(axes, percentiles, strict=True):
        for panel, (name, unit, metric, factor) in zip(row, _PANELS, strict=True):
            points = summarize_series(frame.assign(shown=frame[f"{metric}.p{rank}"] * factor), "rate", "shown")
            for index, label in enumerate(dict.fromkeys(frame["label"])):
                draw_series(panel, points.loc[[label]], "rate", label, index)
            panel.set(yscale="log", ylabel=f"{name} P{rank} [{unit}]", xlim=(0, None))
            label_log(panel.yaxis)
    for panel in axes[-1]:
        panel.set_xlabel("request rate [requests/s]")
    note = describe_points(frame, "rate")
    add_title(figure, frame, handles=axes[0][0].get_legend_handles_labels()[0], note=note)
    return figure


def _mean_rates(frame: pd.DataFrame, key: str) -> "pd.Series[float]":
    """Requests per second that arrived, over all runs of the same value of `key`."""
    arrivals = frame["folder"].map(lambda folder: load_requests(folder)["arrival"])
    rates = arrivals.map(lambda times: (len(times) - 1) / (times.max() - times.min()))
    return rates.groupby(frame[key]).transform("mean")
