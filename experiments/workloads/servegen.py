"""Requests drawn from the per-client statistics of ServeGen (arXiv:2505.09999): realistic bursts and length mixes.

In each window of 600 s a client sends rate * 600 requests. The intervals before, between and after them are drawn from
the window's Gamma or Weibull family and stretched to fill the window: with shape 1 that is exactly a Poisson process of
known count. ServeGen's own generator (`construct.py`) omits the interval after the last request, which thereby falls on
the window's end and is lost. Input and output lengths are drawn independently, as their joint distribution is not
published; ServeGen's generator takes both at the same quantile.

Every client and window has its own random stream: another range or other clients do not change a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from cbatch import Request, WorkloadError
from cbatch.validation import Give, not_negative, positive
from experiments.workloads.base import MOST_REQUESTS, Vocabulary
from experiments.workloads.readers.servegen import WINDOW_SECONDS, ServeGenClients, read_servegen
from experiments.workloads.recorded import Replay
from experiments.workloads.seeds import Stream, generator
from experiments.workloads.trace import Floats, Ints, Strings, Trace, join_clients


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeGen(Replay):
    """Requests of some ServeGen clients in a range of time, with their client.

    path, dataset: the two files, see `experiments.workloads.readers.servegen`.
    start: seconds into the data; the first request arrives at time 0 of the run. duration: seconds.
    clients: their numbers; None takes all.
    rate: requests per second of all chosen clients, averaged over the range, each client's share as recorded; None: as
        recorded.
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
        data = read_servegen(self.path, self.dataset)
        windows = self._windows(data)
        data = replace(data, rate=data.rate * self._scale(data, windows))
        if (expected := float(data.rate[windows].sum()) * WINDOW_SECONDS) > MOST_REQUESTS:
            problem = f"about {expected:.3g} requests from {self.start:g} s on, more than {MOST_REQUESTS}"
            raise WorkloadError(f"{self.path}: {problem}; choose fewer clients, or lower duration or rate_scale")
        parts = [self._draw(data, window) for window in windows.tolist()]
        if not any(len(part[1]) for part in parts):
            problem = f"no requests from {self.start:g} s to {self.start + self.duration:g} s"
            remedy = "choose another workload.start, or raise duration or rate_scale"
            raise WorkloadError(f"{self.path}: {problem}; {remedy}")
        return join_clients(self.path, parts).select(slice(None))  # times from the first one

    def _scale(self, data: ServeGenClients, windows: Ints) -> float:
        """Returns the factor from recorded to wanted rates."""
        if self.rate is None:
            return self.rate_scale
        first, end = self.start, self.start + self.duration
        seconds = np.minimum(data.start[windows] + WINDOW_SECONDS, end) - np.maximum(data.start[windows], first)
        recorded = float((data.rate[windows] * seconds).sum()) / self.duration
        return self.rate_scale * self.rate / recorded if recorded else 0.0

    def _windows(self, data: ServeGenClients) -> Ints:
        """Returns the windows, as rows of the data, that can hold requests of the range."""
        wanted = (data.rate > 0) & (data.start < self.start + self.duration)
        wanted &= data.start + WINDOW_SECONDS > self.start
        if self.clients is not None:
            known = np.unique(data.client).tolist()
            if unknown := sorted(set(self.clients) - set(known)):
                remedy = f"{self.path} has no client {unknown[0]}; choose from {', '.join(map(str, known))}"
                raise WorkloadError(f"workload.clients={list(self.clients)}: {remedy}")
            wanted &= np.isin(data.client, list(self.clients))
        return np.flatnonzero(wanted)

    def _draw(self, data: ServeGenClients, window: int) -> tuple[Strings, Floats, Ints, Ints]:
        """Draws client, time, prompt and output tokens of one window's requests that fall into the range."""
        client, start = int(data.client[window]), int(data.start[window])
        random = generator(self.seed, Stream.SERVEGEN, client, start // WINDOW_SECONDS)
        expected = float(data.rate[window]) * WINDOW_SECONDS
        num = int(expected + random.random())  # a fraction is a chance of one more
        draw = random.standard_gamma if data.family[window] == "Gamma" else random.weibull
        intervals = draw(float(data.shape[window]), num + 1)
        times = start + WINDOW_SECONDS * np.cumsum(intervals)[:-1] / (intervals.sum() or 1.0)
        input_lengths, output_lengths = data.lengths(client, start)
        prompt_tokens, output_tokens = input_lengths.draw(random, num), output_lengths.draw(random, num)
        inside = (times >= self.start) & (times < self.start + self.duration)
        return np.full(int(inside.sum()), str(client)), times[inside], prompt_tokens[inside], output_tokens[inside]
