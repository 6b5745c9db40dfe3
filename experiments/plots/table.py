"""The runs of a sweep side by side, as a table in Markdown."""

from __future__ import annotations

from math import isnan
from numbers import Real
from pathlib import Path

from tabulate import tabulate

from experiments.plots.series import chosen, labelled
from experiments.store.tables import load
from experiments.store.text import number, origin_of_row

_COLUMNS = {
    "tokens/s": ("throughput.total_tokens_per_second", 1.0),
    "requests/s": ("throughput.requests_per_second", 1.0),
    "TTFT p50 [s]": ("ttft_seconds.p50", 1.0),
    "TTFT p99 [s]": ("ttft_seconds.p99", 1.0),
    "TBT p50 [ms]": ("tbt_seconds.p50", 1e3),
    "TBT p99 [ms]": ("tbt_seconds.p99", 1e3),
    "end to end p50 [s]": ("end_to_end_seconds.p50", 1.0),
    "end to end p99 [s]": ("end_to_end_seconds.p99", 1.0),
    "batch [requests]": ("iterations.batch_requests", 1.0),
    "KV cache peak [%]": ("iterations.kv_use_peak", 100.0),
    "preemptions": ("run.preemptions", 1.0),
    "device active [%]": ("iterations.device_active_share", 100.0),
}


def text(folder: Path, runs: str = "") -> str:
    """A line for each run, and below it where the times come from.

    Args:
        runs: only runs whose folder's name holds this.

    Raises:
        ConfigError: no finished runs.
    """
    frame = labelled(chosen(load(folder), runs))
    rows = [
        [run["label"], *(_cell(run.get(column), factor) for column, factor in _COLUMNS.values())]
        for _, run in frame.iterrows()
    ]
    aligned = ("left", *["right"] * len(_COLUMNS))
    table = tabulate(rows, ["run", *_COLUMNS], tablefmt="github", colalign=aligned, disable_numparse=True)
    return "\n".join(
        [table, "", *sorted({origin_of_row(dict(zip(run.index, run, strict=True))) for _, run in frame.iterrows()})]
    )


def _cell(value: object, factor: float) -> str:
    figure = float(value) if isinstance(value, Real) else float("nan")
    return "-" if isnan(figure) else number(figure * factor)
