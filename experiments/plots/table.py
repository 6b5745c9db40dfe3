"""The runs of a sweep side by side, as a table in Markdown."""

import sys
from math import isnan
from numbers import Real
from pathlib import Path

from tabulate import tabulate

from experiments.plots.series import load_runs
from experiments.store.text import format_number, origin_of_row

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
    """One line per run, and below them where the times come from.

    Args:
        runs: only runs whose folder names contain this.

    Raises:
        ConfigError: no finished runs.
    """
    frame = load_runs(folder, runs, most=sys.maxsize).to_dict("records")
    rows = [[run["label"], *(_cell(run.get(key), factor) for key, factor in _COLUMNS.values())] for run in frame]
    aligned = ("left", *["right"] * len(_COLUMNS))
    table = tabulate(rows, ["run", *_COLUMNS], tablefmt="github", colalign=aligned, disable_numparse=True)
    origins = {origin_of_row({str(key): value for key, value in run.items()}) for run in frame}
    return "\n".join([table, "", *sorted(origins)])


def _cell(value: object, factor: float) -> str:
    number = float(value) if isinstance(value, Real) else float("nan")
    return "-" if isnan(number) else format_number(number * factor)
