"""Service of clients, as VTC measures it (Sheng et al., "Fairness in serving large language models", OSDI 2024).

A request's service is 1 for each prompt token and 2 for each output token. As in the code behind that paper's figures
(Ying1123/VTC-artifact, fair_bench/plot/visualize.py), it is received evenly from the request's first token to its last,
and counts as requested when the request arrives. Only served requests count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.request import Request
from cbatch.results.metrics import Floats, Served

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
WINDOW_SECONDS = 60.0
_SKIPPED_SECONDS = 30.0
_TICKS = 20
NO_CLIENT = "no client"
"""Client of the requests that name none."""


@dataclass(frozen=True, eq=False)
class Service:
    """Served requests as columns [requests]; times in seconds."""

    client: NDArray[Any]
    arrival: Floats
    first_token: Floats
    last_token: Floats
    prompt_tokens: NDArray[Any]
    output_tokens: NDArray[Any]

    @cached_property
    def clients(self) -> list[str]:
        """Names in alphabetical order."""
        return [str(name) for name in np.unique(self.client)]

    @cached_property
    def amount(self) -> Floats:
        """Service of each request, [requests]."""
        return PROMPT_WEIGHT * self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens

    def received(self, times: Floats) -> Floats:
        """Service that each client has received by each time, [times, clients]."""
        seconds = self.last_token - self.first_token
        at_once = seconds <= 0
        return self._by_client(
            np.where(at_once, time >= self.last_token, (time - self.first_token) / np.where(at_once, 1, seconds))
            for time in times
        )

    def requested(self, times: Floats) -> Floats:
        """Service that each client has asked for by each time, [times, clients]."""
        return self._by_client(self.arrival <= time for time in times)

    def _by_client(self, parts: Iterable[NDArray[Any]]) -> Floats:
        """parts: for each time, the share of each request, which is clipped to 0 .. 1."""
        index = np.searchsorted(self.clients, self.client)
        num = len(self.clients)
        return np.array([np.bincount(index, self.amount * np.clip(part, 0, 1), num) for part in parts])


def service_of(requests: Sequence[Request], served: Served) -> Service | None:
    """The service of a run; None if no request names its client."""
    clients = {request.id: request.client for request in requests}
    if not any(clients.values()):
        return None
    names = np.array([clients[id_] or NO_CLIENT for id_ in served.id.tolist()], dtype=str)
    times = served.arrival, served.first_token, served.last_token
    return Service(names, *times, served.prompt_tokens, served.output_tokens)


def fairness(service: Service) -> dict[str, Any]:
    """Service difference, Jain's index and total service of clients.

    The first two are over 19 windows of 60 s, whose middles divide the time from 30 s to the last arrival into 20 equal
    parts; NaN if the last arrival comes before 60 s.

    service_difference: per second, summed over clients: how far each is below the client that received most, or from
        what it requested, whichever is less (VTC, table 2).
    jain_index: (sum x)^2 / (n sum x^2), where x is a client's service over its max-min fair share of what all received
        in the window, given the service that it waits for (Jain, Chiu and Hawe, DEC-TR-301, 1984); 1 is fair, 1/n the
        opposite.
    """
    totals = dict(zip(service.clients, service.received(np.array([np.inf]))[0].tolist(), strict=True))
    last = float(service.arrival.max(initial=0.0))
    nan = float("nan")
    if last < WINDOW_SECONDS:
        empty = {"service_difference": {"max": nan, "mean": nan}, "jain_index": {"mean": nan, "min": nan}}
        return {**empty, "clients": totals}
    begin: Floats = (last - _SKIPPED_SECONDS) / _TICKS * np.arange(1.0, _TICKS) + _SKIPPED_SECONDS - WINDOW_SECONDS / 2
    end: Floats = begin + WINDOW_SECONDS
    before = service.received(begin)
    received: Floats = service.received(end) - before
    asked = service.requested(end)
    requested = asked - service.requested(np.nextafter(begin, -np.inf))  # both ends included
    short = np.minimum(received.max(axis=1, keepdims=True) - received, np.abs(requested - received))
    differences = short.sum(axis=1) / WINDOW_SECONDS
    indices = np.array([_jain(*window) for window in zip(received, asked - before, strict=True)])
    return {
        "service_difference": {"max": float(differences.max()), "mean": float(differences.mean())},
        "jain_index": {"mean": float(np.nanmean(indices)), "min": float(np.nanmin(indices))},
        "clients": totals,
    }


def _jain(received: Floats, wanted: Floats) -> float:
    """Jain's index of one window; NaN if no client received anything. Both are [clients]."""
    fair = max_min_shares(float(received.sum()), wanted)
    ratio = received[fair > 0] / fair[fair > 0]
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if ratio.any() else float("nan")


def max_min_shares(total: float, wanted: Floats) -> Floats:
    """The max-min fair division of `total` among clients, none of whom gets more than it wants, [clients]."""
    ascending = np.sort(wanted)
    below = np.concatenate([[0.0], np.cumsum(ascending)[:-1]])
    others = len(wanted) - np.arange(len(wanted))  # each rank's client and those above it
    rank = int(np.searchsorted(below + ascending * others, total))
    if rank == len(wanted):
        return wanted
    shares: Floats = np.minimum(wanted, (total - below[rank]) / others[rank])
    return shares
