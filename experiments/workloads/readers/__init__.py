"""Readers of request traces. The repository contains no trace files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from cbatch import WorkloadError
from experiments.workloads.readers import formats
from experiments.workloads.readers.own_columns import read_own_columns
from experiments.workloads.readers.source import TextFile, read_lines
from experiments.workloads.trace import Trace

__all__ = ["Format", "read_trace"]

NO_COLUMNS: Mapping[str, str] = {}

Format = Literal["auto", "azure", "mooncake", "lengths", "vtc", "decisions"]

_READERS: dict[str, tuple[Callable[[TextFile], Trace], tuple[str, ...]]] = {
    "azure": (formats.read_azure, formats.AZURE),
    "mooncake": (formats.read_mooncake, formats.MOONCAKE),
    "lengths": (formats.read_lengths, formats.LENGTHS),
    "vtc": (formats.read_vtc, formats.VTC[:1]),
    "decisions": (formats.read_decisions, ('{"run":',)),
}
"""By format: the reader, and the words of which the first line of a file has one."""

_OTHER_WORKLOADS = {"window_start_s": "servegen", '"prompt"': "prompts", '"token_ids"': "prompts"}


def read_trace(
    path: str, format: Format = "auto", section: str = "workload", columns: Mapping[str, str] = NO_COLUMNS
) -> Trace:
    """Reads a trace file, plain or .gz. section: the one whose keys are `path` and `format`, for messages.

    format: "azure", "mooncake", "lengths", "vtc" or "decisions" (see `formats`); "auto" tells them apart by the first line.
    columns: further columns by the attribute that they fill; see `own_columns`.

    Raises:
        WorkloadError: in one line, with file and line number: a file that cannot be read, is empty or of no known
            format, a malformed line, a missing column, a length below 1, a time that is negative or goes backwards.
    """
    if format not in ("auto", *_READERS):
        raise WorkloadError(f"{section}.format={format}: give one of {', '.join(('auto', *_READERS))}")
    file = read_lines(path, f"{section}.path")
    read, _ = _READERS[_detect(file) if format == "auto" else format]
    trace = read(file)
    if columns:
        trace = replace(trace, fields={**trace.fields, **read_own_columns(file, columns)})
    _check_order(trace)
    return trace


def _detect(file: TextFile) -> str:
    """The format that the first line shows."""
    first = file.lines[0]
    for word, workload in _OTHER_WORKLOADS.items():
        if word in first:
            raise file.fail(1, f"this file is not a trace of single requests; use workload={workload}")
    for name, (_, words) in _READERS.items():
        if any(word in first for word in words):
            return name
    columns = f"name its columns {', '.join(formats.LENGTHS)} and, for arrival times in seconds, {formats.ARRIVED_AT}"
    raise file.fail(1, f"unknown format ({first[:60]!r}); {columns}, or as another format does (docs/adding.md)")


def _check_order(trace: Trace) -> None:
    if trace.arrival_time is None or not (backwards := np.diff(trace.arrival_time) < 0).any():
        return
    row = int(np.argmax(backwards)) + 1
    before, time = trace.arrival_time[row - 1 : row + 1]
    problem = f"the time goes backwards, from {before:g} s to {time:g} s after the first row"
    raise WorkloadError(f"{trace.where(row)}: {problem}; sort the rows by time")
