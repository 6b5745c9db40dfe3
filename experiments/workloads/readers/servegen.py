"""ServeGen client statistics: arrivals of each client in windows of 600 s, lengths in windows of 6 h.

Source: Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model Serving in
Production", arXiv:2505.09999; repository alibaba/ServeGen, with two files for each client. Here they are joined into

    trace.csv      client, window_start_s, rate_req_per_s, iat_cv, arrival_family (Gamma | Weibull | empty), arg1, arg2
    dataset.jsonl  {"client": 0, "dataset": {"21600": {"input_tokens": "{45: 0.01, ...}", "output_tokens": ...}}}

a row for each client and window, a line for each client. arg1 is the fitted shape. `iat_cv` and arg2, the fitted scale,
are not read: the rate sets the scale. Nor is `reason_ratio`: reasoning tokens are part of the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cbatch.errors import WorkloadError
from experiments.workloads.histogram import Histogram
from experiments.workloads.readers import fields
from experiments.workloads.readers.source import TextFile, read_lines
from experiments.workloads.readers.table import column, convert, csv_columns, json_objects
from experiments.workloads.trace import Floats, Ints, Strings

WINDOW_SECONDS = 600
LENGTH_WINDOW_SECONDS = 21_600
_COLUMNS = ("client", "window_start_s", "rate_req_per_s", "arrival_family", "arg1")
_LEAST_SHAPE = 0.01  # published fits have at least 0.012; far below, intervals leave the range of a float


@dataclass(frozen=True, eq=False)
class ServeGenClients:
    """What the two files say.

    Attributes:
        client, start, rate, family, shape: one entry for each client and window, [windows]. start: seconds, a multiple
            of 600; rate: requests per second; family: "Gamma", "Weibull" or "" where the rate is 0.
    """

    trace_file: TextFile
    dataset_file: TextFile
    client: Ints
    start: Ints
    rate: Floats
    family: Strings
    shape: Floats
    _datasets: dict[int, tuple[int, dict[str, dict[str, str]]]]  # client -> line, its length windows
    _histograms: dict[tuple[int, str], tuple[Histogram, Histogram]] = field(default_factory=dict)  # those parsed so far

    def lengths(self, client: int, start: int) -> tuple[Histogram, Histogram]:
        """Input and output lengths in tokens of a client, in the length window that holds the 600 s window `start`.

        Parsed when asked for: a file holds hundreds, a run needs a few.

        Raises:
            WorkloadError: there is none, or it is malformed.
        """
        if client not in self._datasets:
            raise WorkloadError(
                f"{self.dataset_file.name}: no line for client {client} of {self.trace_file.name}: "
                "give the two files of one data set"
            )
        key = str(start // LENGTH_WINDOW_SECONDS * LENGTH_WINDOW_SECONDS)
        if (client, key) not in self._histograms:
            line, windows = self._datasets[client]
            self._histograms[client, key] = (
                self._histogram(line, key, windows.get(key), "input_tokens"),
                self._histogram(line, key, windows.get(key), "output_tokens"),
            )
        return self._histograms[client, key]

    def _histogram(self, line: int, key: str, window: object, name: str) -> Histogram:
        text = window.get(name) if isinstance(window, dict) else None
        if not isinstance(text, str) or text == "{}":
            raise self.dataset_file.fail(
                line,
                f"window {key} has no {name}, but the client sends requests in it: "
                "choose other clients or another time",
            )
        try:
            return _parse_histogram(text)
        except ValueError:
            problem = f"window {key}, {name}: must map whole numbers of tokens to probabilities that sum to 1"
            raise self.dataset_file.fail(line, f"{problem}; correct or remove the line") from None


def read_servegen(trace_path: str, dataset_path: str) -> ServeGenClients:
    """Read the two files, plain or .gz.

    Raises:
        WorkloadError: in one line, with file and line number: what is missing or malformed.
    """
    file = read_lines(trace_path)
    text = csv_columns(file, _COLUMNS)
    client, start = (np.array(column(file, name, text[name], fields.whole_number, 2)) for name in _COLUMNS[:2])
    rate, shape = (
        np.array(column(file, name, text[name], fields.not_negative, 2)) for name in ("rate_req_per_s", "arg1")
    )
    dataset_file = read_lines(dataset_path)
    clients = ServeGenClients(
        file, dataset_file, client, start, rate, np.array(text["arrival_family"]), shape, _read_datasets(dataset_file)
    )
    _check_windows(clients)
    return clients


def _check_windows(clients: ServeGenClients) -> None:
    """Raise WorkloadError for the first window that cannot be used."""
    file, start = clients.trace_file, clients.start
    active = clients.rate > 0
    _refuse(file, clients.client < 0, "client must not be negative")
    _refuse(file, (start < 0) | (start % WINDOW_SECONDS != 0), f"window_start_s must be a multiple of {WINDOW_SECONDS}")
    _refuse(file, ~np.isin(clients.family, ["Gamma", "Weibull", ""]), "arrival_family must be Gamma, Weibull or empty")
    _refuse(file, active & (clients.family == ""), "a window with requests needs an arrival_family")
    _refuse(file, active & (clients.shape < _LEAST_SHAPE), f"arg1, the shape, must be at least {_LEAST_SHAPE}")
    order = np.lexsort((start, clients.client))
    again = np.zeros(len(start), np.bool_)
    again[order[1:]] = (np.diff(start[order]) == 0) & (np.diff(clients.client[order]) == 0)
    _refuse(file, again, "this client's window is there already")


def _refuse(file: TextFile, bad: np.ndarray[Any, np.dtype[np.bool_]], problem: str) -> None:
    if bad.any():
        line = int(np.argmax(bad)) + 2
        raise file.fail(line, f"{file.lines[line - 1][:60]!r}: {problem}; correct or remove the line")


def _read_datasets(file: TextFile) -> dict[int, tuple[int, dict[str, dict[str, str]]]]:
    datasets: dict[int, tuple[int, dict[str, dict[str, str]]]] = {}
    for line, record in enumerate(json_objects(file), start=1):
        client = convert(file, line, "client", record.get("client"), fields.whole_number)
        windows = record.get("dataset")
        if not isinstance(windows, dict):
            raise file.fail(line, "dataset must be an object of windows; correct or remove the line")
        if client in datasets:
            raise file.fail(line, f"client {client} is in line {datasets[client][0]} already; remove one of the two")
        datasets[client] = (line, windows)
    return datasets


def _parse_histogram(text: str) -> Histogram:
    """From "{bin: probability, ...}"; a bin of 0 tokens, which one client's output has, counts as 1 token."""
    numbers = np.array(text.strip("{}").replace(":", ",").split(","), np.float64)
    bins, weights = numbers[0::2], numbers[1::2]
    whole = np.isfinite(bins) & (bins >= 0) & (bins == np.floor(bins))
    if not whole.all() or len(bins) != len(weights) or (weights < 0).any() or not abs(weights.sum() - 1) < 1e-3:
        raise ValueError(text)
    return Histogram(np.maximum(bins, 1).astype(np.int64), weights)
