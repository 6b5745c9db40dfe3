"""Readers of request traces, one file a format. A trace file is the user's: none is in this repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from cbatch.errors import WorkloadError
from experiments.workloads.checks import check_choice
from experiments.workloads.readers.azure import COLUMNS as AZURE_COLUMNS
from experiments.workloads.readers.azure import read_azure
from experiments.workloads.readers.length_table import COLUMNS as LENGTH_COLUMNS
from experiments.workloads.readers.length_table import read_length_table
from experiments.workloads.readers.mooncake import KEYS as MOONCAKE_KEYS
from experiments.workloads.readers.mooncake import read_mooncake
from experiments.workloads.readers.source import TextFile, read_lines
from experiments.workloads.trace import Trace

__all__ = ["Format", "read_trace"]

Format = Literal["auto", "azure", "mooncake", "lengths"]

_READERS: dict[str, Callable[[TextFile], Trace]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "lengths": read_length_table,
}
_SIGNS = {"azure": AZURE_COLUMNS, "mooncake": MOONCAKE_KEYS, "lengths": LENGTH_COLUMNS}
_OTHER_WORKLOADS = {"window_start_s": "servegen", '"prompt"': "prompts", '"token_ids"': "prompts"}


def read_trace(path: str, format: Format = "auto") -> Trace:
    """Read a trace file, plain or .gz.

    Args:
        format: "azure", "mooncake" or "lengths" (see the module of each); "auto" tells them apart by the first line.

    Raises:
        WorkloadError: in one line, with file and line number: a file that cannot be read, is empty or of no known
            format, a malformed line, a missing column, a length below 1, a time that is negative or goes backwards.
    """
    check_choice("format", format, ("auto", *_READERS))
    file = read_lines(path)
    trace = _READERS[_detect(file) if format == "auto" else format](file)
    _check_order(trace)
    return trace


def _detect(file: TextFile) -> str:
    """The format that the first line shows."""
    first = file.lines[0]
    for word, workload in _OTHER_WORKLOADS.items():
        if word in first:
            raise file.fail(1, f"this file is not a trace of single requests: use workload={workload}")
    for name, words in _SIGNS.items():
        if any(word in first for word in words):
            return name
    raise file.fail(1, f"unknown format ({first[:60]!r}): set workload.format to one of {', '.join(_READERS)}")


def _check_order(trace: Trace) -> None:
    if trace.arrival_time is None:
        return
    backwards = np.flatnonzero(np.diff(trace.arrival_time) < 0)
    if len(backwards):
        row = int(backwards[0]) + 1
        time, before = trace.arrival_time[row], trace.arrival_time[row - 1]
        raise WorkloadError(
            f"{trace.where(row)}: the time goes backwards, from {before:g} s to {time:g} s after the "
            "first row: sort the rows by time"
        )
