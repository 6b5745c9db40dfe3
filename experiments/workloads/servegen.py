"""Requests drawn from the per-client statistics of ServeGen (arXiv:2505.09999): realistic bursts and length mixes.

The repository alibaba/ServeGen has two files for each client. Here they are joined into

    trace.csv      client, window_start_s, rate_req_per_s, iat_cv, arrival_family (Gamma | Weibull | empty), arg1, arg2
    dataset.jsonl  {"client": 0, "dataset": {"21600": {"input_tokens": "{45: 0.01, ...}", "output_tokens": ...}}}

a row for each client and window of 600 s, a line for each client with windows of 6 h. arg1 is the fitted shape. `iat_cv` and
arg2, the fitted scale, are not read: the rate sets the scale. Nor is `reason_ratio`: reasoning tokens are part of the output.

In each window a client sends rate * 600 requests. The intervals before, between and after them are drawn from the window's Gamma or
Weibull family and stretched to fill the window: with shape 1 that is exactly a Poisson process of known count. ServeGen's own generator
(`construct.py`) omits the interval after the last request. The last request then falls on the window's end and is lost. Input and output
lengths are drawn independently, as their joint distribution is not published; ServeGen's generator takes both at the same quantile.

Every client and window has its own random stream: another range or other clients do not change a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from cbatch import Request, WorkloadError
from cbatch.validation import Give, not_negative, positive
from experiments.workloads.base import MOST_REQUESTS, Vocabulary
from experiments.workloads.readers.table import at_line, parse_table, read_text
from experiments.workloads.recorded import Replay
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import Floats, Ints, Strings, Trace, join_clients

WINDOW_SECONDS, LENGTHS_SECONDS = 600, 21_600
"""Durations of a window with one rate, and of one with one distribution of lengths."""

_LEAST_SHAPE = 0.005  # published fits have at least 0.0067; far below, intervals leave the range of a float


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeGen(Replay):
    """Requests of some ServeGen clients in a range of time, with their client.

    path, dataset: the two files, plain or compressed.
    start: seconds into the data; the first request arrives at time 0 of the run. duration: seconds.
    clients: their numbers; None takes all.
    rate: requests per second of all chosen clients, averaged over the range, each client's share as recorded; None: as recorded.
    rate_scale: multiplies every client's number of requests; the shape of the bursts stays.
    num_requests: the first N; None takes all of the range.
    """

    path: str
    dataset: str
    start: Annotated[float, not_negative("seconds into the data")] = 0.0
    duration: Annotated[float, positive("seconds")] = 600.0
    clients: Annotated[Sequence[int] | None, Give("a list of client numbers, or null for all")] = None
    rate: Annotated[float, positive("requests per second, or null for the recorded ones")] | None = None
    rate_scale: Annotated[float, positive("1 keeps the rates")] = 1.0

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        return self._replay(self.trace(), vocabulary)

    def trace(self) -> Trace:
        """Draws the requests of the range, in order of arrival, before lengths are fitted to a model."""
        windows, lengths = self._windows(), _Lengths(self.dataset)
        windows["rate"] *= self._scale(windows)
        if (expected := float(windows["rate"].sum()) * WINDOW_SECONDS) > MOST_REQUESTS:
            problem = f"about {expected:.3g} requests from {self.start:g} s on, more than {MOST_REQUESTS}"
            raise WorkloadError(f"{self.path}: {problem}; choose fewer clients, or lower duration or rate_scale")
        parts = [self._draw(window, lengths) for window in windows.itertuples()]
        if not any(len(times) for _, times, *_ in parts):
            problem = f"no requests from {self.start:g} s to {self.start + self.duration:g} s"
            remedy = "choose another workload.start, or raise duration or rate_scale"
            raise WorkloadError(f"{self.path}: {problem}; {remedy}")
        return join_clients(self.path, parts).select(slice(None))  # times from the first one

    def _scale(self, windows: Any) -> float:
        """Returns the factor from recorded to wanted rates."""
        if self.rate is None:
            return self.rate_scale
        end = self.start + self.duration
        seconds = (windows["start"] + WINDOW_SECONDS).clip(upper=end) - windows["start"].clip(lower=self.start)
        recorded = float((windows["rate"] * seconds).sum()) / self.duration
        return self.rate_scale * self.rate / recorded if recorded else 0.0

    def _windows(self) -> Any:
        """Returns the windows that can hold requests of the range: client, start in seconds, rate per second, family and shape."""
        import pandas as pd  # slow to load

        table = parse_table(self.path, read_text(self.path))
        client, start = table.whole_numbers("client", 0), table.whole_numbers("window_start_s", 0)
        rate, family, shape = table.amounts("rate_req_per_s"), table.column("arrival_family"), table.amounts("arg1")
        active, refuse = rate > 0, table.refuse
        refuse(rate < 0, "rate_req_per_s", "must not be negative")
        refuse(start % WINDOW_SECONDS != 0, "window_start_s", f"must be a multiple of {WINDOW_SECONDS}")
        windows = pd.DataFrame({"client": client, "start": start, "rate": rate, "family": family, "shape": shape})
        refuse(windows.duplicated(["client", "start"]), "window_start_s", "this client's window is there already")
        if self.clients is not None:
            known = np.unique(windows["client"]).tolist()
            if unknown := sorted(set(self.clients) - set(known)):
                remedy = f"{self.path} has no client {unknown[0]}; choose from {', '.join(map(str, known))}"
                raise WorkloadError(f"workload.clients={list(self.clients)}: {remedy}")
            active &= np.isin(client, [*self.clients])
        active &= (start > self.start - WINDOW_SECONDS) & (start < self.start + self.duration)
        refuse(active & ~np.isin(family, ["Gamma", "Weibull"]), "arrival_family", "must be Gamma or Weibull")
        refuse(active & ~(shape >= _LEAST_SHAPE), "arg1", f"must be at least {_LEAST_SHAPE}, as it is the shape")
        return windows[active].copy()

    def _draw(self, window: Any, lengths: "_Lengths") -> tuple[Strings, Floats, Ints, Ints]:
        """Draws client, time, prompt and output tokens of one window's requests that fall into the range."""
        random = generator(self.seed, Purpose.SERVEGEN, window.client, window.start // WINDOW_SECONDS)
        num = int(window.rate * WINDOW_SECONDS + random.random())  # a fraction is a chance of one more
        draw = random.standard_gamma if window.family == "Gamma" else random.weibull
        intervals = draw(window.shape, num + 1)
        times = window.start + WINDOW_SECONDS * np.cumsum(intervals)[:-1] / (intervals.sum() or 1.0)
        before_end = np.nextafter(window.start + WINDOW_SECONDS, 0)
        times = np.minimum(times, before_end)  # the last interval may be lost in rounding
        known = lengths.at(window.client, window.start)
        prompt_tokens, output_tokens = (random.choice(values, num, p=shares) for values, shares in known)
        inside = (times >= self.start) & (times < self.start + self.duration)
        names = np.full(int(inside.sum()), str(window.client))
        return names, times[inside], prompt_tokens[inside], output_tokens[inside]


class _Lengths:
    """Lengths of clients, read from a file. clients: the line of each client, and its length windows."""

    def __init__(self, path: str) -> None:
        table = parse_table(path, read_text(path, "workload.dataset"))
        clients, windows = table.whole_numbers("client"), table.column("dataset")
        table.refuse([not isinstance(value, dict) for value in windows], "dataset", "must be an object of windows")
        is_first = np.isin(np.arange(len(clients)), np.unique(clients, return_index=True)[1])
        table.refuse(~is_first, "client", "this client has a line already")
        self.path, of_clients = path, zip(table.lines, windows, strict=True)
        self.clients: dict[int, tuple[int, Any]] = dict(zip(clients.tolist(), of_clients, strict=True))

    def at(self, client: int, start: int) -> list[tuple[Ints, Floats]]:
        """Returns input and output lengths of a client at this time, in tokens, each with its probability. Raises WorkloadError."""
        if client not in self.clients:
            problem = f"no line for client {client}, which sends requests; give the two files of one data set"
            raise WorkloadError(f"{self.path}: {problem}")
        (line, windows), key = self.clients[client], str(start // LENGTHS_SECONDS * LENGTHS_SECONDS)
        histograms, window = [], windows.get(key)
        for name in ("input_tokens", "output_tokens"):
            text = window.get(name) if isinstance(window, dict) else None
            if not isinstance(text, str) or text == "{}":
                problem = f"window {key} has no {name}, but the client sends requests in it"
                raise at_line(self.path, line, f"{problem}; choose other clients or another time")
            try:
                histograms.append(_parse_histogram(text))
            except ValueError:
                problem = f"window {key}, {name}: must map whole numbers of tokens to probabilities that sum to 1"
                raise at_line(self.path, line, f"{problem}; correct or remove the line") from None
        return histograms


@lru_cache(10_000)
def _parse_histogram(text: str) -> tuple[Ints, Floats]:
    """Parses "{bin: probability, ...}"; a bin of 0 tokens, which one client's output has, counts as 1 token."""
    numbers = np.array(text.strip("{}").replace(":", ",").split(","), np.float64)
    bins, weights = numbers[0::2], numbers[1::2]
    whole = np.isfinite(bins) & (bins >= 0) & (bins == np.floor(bins))
    if not whole.all() or len(bins) != len(weights) or (weights < 0).any() or not abs(weights.sum() - 1) < 1e-3:
        raise ValueError(text)
    return np.maximum(bins, 1).astype(np.int64), weights / weights.sum()
