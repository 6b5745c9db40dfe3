"""ServeGen client statistics: arrivals of each client in windows of 600 s, lengths in windows of 6 h.

Source: Xiang et al., "ServeGen: Workload Characterization and Generation of Large Language Model Serving in
Production", arXiv:2505.09999; repository alibaba/ServeGen, with two files for each client. Here they are joined into

    trace.csv      client, window_start_s, rate_req_per_s, iat_cv, arrival_family (Gamma | Weibull | empty), arg1, arg2
    dataset.jsonl  {"client": 0, "dataset": {"21600": {"input_tokens": "{45: 0.01, ...}", "output_tokens": ...}}}

a row for each client and window, a line for each client. arg1 is the fitted shape. `iat_cv` and arg2, the fitted scale,
are not read: the rate sets the scale. Nor is `reason_ratio`: reasoning tokens are part of the output.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from cbatch import WorkloadError
from experiments.workloads.readers.source import at_line, read_text
from experiments.workloads.seeds import Histogram
from experiments.workloads.trace import Floats, Ints, Strings

WINDOW_SECONDS = 600
LENGTH_WINDOW_SECONDS = 21_600
_LEAST_SHAPE = 0.01  # published fits have at least 0.012; far below, intervals leave the range of a float


@dataclass(frozen=True, eq=False)
class ServeGenClients:
    """The contents of two files.

    client, start, rate, family, shape: one entry per client and window, [windows]. start: seconds, a multiple of 600.
        rate: requests per second. family: "Gamma", "Weibull" or "" if the rate is 0.
    """

    trace_path: str
    dataset_path: str
    client: Ints
    start: Ints
    rate: Floats
    family: Strings
    shape: Floats
    _datasets: dict[int, tuple[int, dict[str, dict[str, str]]]]  # client -> line, its length windows

    def lengths(self, client: int, start: int) -> tuple[Histogram, Histogram]:
        """Returns input and output lengths in tokens of a client in the 600 s window `start`.

        Raises:
            WorkloadError: there are none, or they are malformed.
        """
        if client not in self._datasets:
            problem = f"no line for client {client} of {self.trace_path}; give the two files of one data set"
            raise WorkloadError(f"{self.dataset_path}: {problem}")
        key = str(start // LENGTH_WINDOW_SECONDS * LENGTH_WINDOW_SECONDS)
        line, windows = self._datasets[client]
        read = partial(self._histogram, line, key, windows.get(key))
        return read("input_tokens"), read("output_tokens")

    def _histogram(self, line: int, key: str, window: object, name: str) -> Histogram:
        text = window.get(name) if isinstance(window, dict) else None
        if not isinstance(text, str) or text == "{}":
            problem = f"window {key} has no {name}, but the client sends requests in it"
            raise at_line(self.dataset_path, line, f"{problem}; choose other clients or another time")
        try:
            return _parse_histogram(text)
        except ValueError:
            problem = f"window {key}, {name}: must map whole numbers of tokens to probabilities that sum to 1"
            raise at_line(self.dataset_path, line, f"{problem}; correct or remove the line") from None


def read_servegen(trace_path: str, dataset_path: str) -> ServeGenClients:
    """Reads the two files, plain or compressed. Raises WorkloadError with file and line number."""
    from experiments.workloads.readers.table import parse_table  # loads pandas

    windows = parse_table(trace_path, read_text(trace_path))
    datasets = parse_table(dataset_path, read_text(dataset_path, "workload.dataset"))
    numbers, lengths = datasets.whole_numbers("client").tolist(), datasets.column("dataset").tolist()
    datasets.refuse([not isinstance(value, dict) for value in lengths], "dataset", "must be an object of windows")
    datasets.refuse(datasets.frame.duplicated("client"), "client", "this client has a line already")
    clients = ServeGenClients(
        trace_path,
        dataset_path,
        client=windows.whole_numbers("client", 0),
        start=windows.whole_numbers("window_start_s", 0),
        rate=windows.amounts("rate_req_per_s"),
        family=windows.column("arrival_family").to_numpy(np.str_),
        shape=windows.amounts("arg1"),
        _datasets=dict(zip(numbers, zip(datasets.frame.index.tolist(), lengths, strict=True), strict=True)),
    )
    active, refuse = clients.rate > 0, windows.refuse
    refuse(clients.rate < 0, "rate_req_per_s", "must not be negative")
    refuse(clients.start % WINDOW_SECONDS != 0, "window_start_s", f"must be a multiple of {WINDOW_SECONDS}")
    refuse(active & ~np.isin(clients.family, ["Gamma", "Weibull"]), "arrival_family", "must be Gamma or Weibull")
    refuse(active & (clients.shape < _LEAST_SHAPE), "arg1", f"must be at least {_LEAST_SHAPE}, as it is the shape")
    repeated = windows.frame.duplicated(["client", "window_start_s"])
    refuse(repeated, "window_start_s", "this client's window is there already")
    return clients


@lru_cache(10_000)
def _parse_histogram(text: str) -> Histogram:
    """Parses "{bin: probability, ...}"; a bin of 0 tokens, which one client's output has, counts as 1 token."""
    numbers = np.array(text.strip("{}").replace(":", ",").split(","), np.float64)
    bins, weights = numbers[0::2], numbers[1::2]
    whole = np.isfinite(bins) & (bins >= 0) & (bins == np.floor(bins))
    if not whole.all() or len(bins) != len(weights) or (weights < 0).any() or not abs(weights.sum() - 1) < 1e-3:
        raise ValueError(text)
    return Histogram(np.maximum(bins, 1).astype(np.int64), weights)
