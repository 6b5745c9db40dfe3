"""Several clients, each with its own arrivals and lengths: the synthetic workloads of fair scheduling (VTC, OSDI 2024).

The key of an entry seeds its random stream: other entries do not change its requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any
from zlib import crc32

import numpy as np
from pydantic import Field, WrapValidator

from cbatch import Described, Request, WorkloadError
from cbatch.validation import Give, not_negative, positive
from experiments.workloads.base import MOST_REQUESTS, Vocabulary, Workload, as_range
from experiments.workloads.seeds import Purpose, generator
from experiments.workloads.trace import MOST_TOKENS, Floats, Ints, join_clients

_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS, strict=True)]

_LENGTH = Give("a whole number of tokens, at least 1, or the least and the most: [16, 512]")
Length = Annotated[tuple[_Tokens, _Tokens], WrapValidator(as_range), _LENGTH]


@dataclass(frozen=True, kw_only=True, repr=False)
class Client(Described):
    """Draws the requests of a client, or of one of its phases: entries may share a `client`.

    rate: requests per second at `begin`. end_rate: at `end`, changing linearly; None keeps the rate.
    prompt_tokens, output_tokens: one length for all, or a range [least, most], both included, drawn uniformly.
    client: name; None is the entry's key.
    cv: coefficient of variation of the intervals: 0 is evenly spaced from a random offset, 1 Poisson, above 1 bursty. The process is
        stationary: `begin` is a random time of it.
    begin, end: seconds; None ends with the workload.
    on_off: seconds of sending and of silence in turn, from time 0; None never pauses.
    """

    rate: Annotated[float, not_negative("requests per second")]
    prompt_tokens: Length
    output_tokens: Length
    client: str | None = None
    cv: Annotated[float, Field(ge=0, le=1e3), Give("a number from 0 (evenly spaced) over 1 (Poisson) to 1000")] = 1.0
    end_rate: Annotated[float, not_negative("requests per second")] | None = None
    begin: Annotated[float, not_negative("seconds")] = 0.0
    end: Annotated[float, positive("seconds")] | None = None
    on_off: Annotated[float, positive("seconds")] | None = None

    def __post_init__(self) -> None:
        if self.end is not None and self.end < self.begin:
            raise ValueError(f"end={self.end:g} lies before begin={self.begin:g}; give a later end")

    def scale(self, factor: float) -> "Client":
        """Returns the same client with other rates."""
        last = None if self.end_rate is None else self.end_rate * factor
        return replace(self, rate=self.rate * factor, end_rate=last)

    def expected(self, duration: float) -> float:
        """Returns the mean number of requests without pauses."""
        last = self.rate if self.end_rate is None else self.end_rate
        return max(self._end(duration) - self.begin, 0.0) * (self.rate + last) / 2

    def times(self, random: np.random.Generator, duration: float) -> Floats:
        """Draws arrival times in seconds: a process of rate 1, on a clock that runs at the client's rate."""
        span = self._end(duration) - self.begin
        counts = self._unit_times(random, self.expected(duration))
        slope = 0.0 if self.end_rate is None or span <= 0 else (self.end_rate - self.rate) / span
        # rate * t + slope * t^2 / 2 = count, solved without cancellation for slopes near 0
        elapsed = 2 * counts / (self.rate + np.sqrt(np.maximum(self.rate**2 + 2 * slope * counts, 0.0)))
        times = self.begin + elapsed
        return times if self.on_off is None else times[times // self.on_off % 2 == 0]

    def _end(self, duration: float) -> float:
        return duration if self.end is None else min(self.end, duration)

    def _unit_times(self, random: np.random.Generator, total: float) -> Floats:
        """Draws times up to `total` of a stationary process of rate 1.

        Time 0 lies in an interval drawn by its length, from a gamma distribution whose shape is larger by 1, at a uniform place.
        """
        if self.cv == 0:
            return np.arange(random.random(), total)
        shape = self.cv**-2
        is_poisson = self.cv == 1  # from any time on, the next interval is like all others
        times = np.zeros(1) if is_poisson else random.random(1) * random.standard_gamma(shape + 1) / shape
        while times[-1] < total:
            intervals = random.standard_gamma(shape, int(total) + 64) / shape
            times = np.concatenate([times, times[-1] + np.cumsum(intervals)])
        return times[is_poisson : np.searchsorted(times, total)]


_BY_NAME = Give("the fields of each client by name, as in {ann: {rate: 1, ...}, ...}")


@dataclass(frozen=True, kw_only=True, repr=False)
class Clients(Workload):
    """The requests of all clients within `duration` seconds, in order of arrival.

    clients: fields of `Client` by key.
    rate_scale: multiplies every client's rate, for hardware that the published rates do not overload.
    num_requests: the first N; None takes all.
    """

    duration: Annotated[float, positive("seconds")]
    rate_scale: Annotated[float, positive("1 keeps the rates")] = 1.0
    clients: Annotated[Mapping[str, Client], _BY_NAME]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clients:
            raise WorkloadError("workload.clients={}: give at least one client")
        expected = self.rate_scale * sum(client.expected(self.duration) for client in self.clients.values())
        if expected > MOST_REQUESTS:
            problem = f"workload.clients: about {expected:.3g} requests, more than {MOST_REQUESTS}"
            raise WorkloadError(f"{problem}; lower the rates or workload.duration")

    def requests(self, vocabulary: Vocabulary | None) -> Sequence[Request]:
        parts = [self._draw(key, client.scale(self.rate_scale)) for key, client in self.clients.items()]
        if not (num := sum(len(times) for _, times, *_ in parts)):
            silent = [
                f"workload.clients.{key}.rate=0" for key, of in self.clients.items() if not (of.rate or of.end_rate)
            ]
            if len(silent) == len(self.clients):
                raise WorkloadError(f"{', '.join(silent)}: no client sends a request; raise a rate")
            raise WorkloadError(f"workload.duration={self.duration}: no client sends a request; raise it, or the rates")
        if self.num_requests is not None and self.num_requests > num:
            remedy = "ask for fewer, or raise workload.duration"
            raise WorkloadError(f"workload.num_requests={self.num_requests}: the clients send {num}; {remedy}")
        return self._build(join_clients("clients", parts, self.num_requests), vocabulary)

    def _draw(self, key: str, client: Client) -> tuple[Any, Floats, Ints, Ints]:
        """Draws names, times, prompt and output tokens of the requests of one entry."""
        stream = partial(generator, self.seed, Purpose.CLIENTS, crc32(key.encode(errors="surrogatepass")))
        times = client.times(stream(0), self.duration)
        prompts = stream(1).integers(*client.prompt_tokens, len(times), endpoint=True)
        outputs = stream(2).integers(*client.output_tokens, len(times), endpoint=True)
        return np.full(len(times), client.client or key, dtype=object), times, prompts, outputs
