"""Measures the service that clients receive, as in VTC (Sheng et al., "Fairness in serving large language models", OSDI 2024).

The service of a request is 1 per prompt token and 2 per output token. As in the code of the paper's figures
(Ying1123/VTC-artifact, fair_bench/plot/visualize.py), service is requested when the request arrives, and received evenly between
the request's first and last token. Only served requests count.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.request import SERVED
from cbatch.results.metrics import Entry, Floats, Served, Window, mean, statistics

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
WINDOW_SECONDS = 60.0
_TICKS = 20
NO_CLIENT = "no client"  # client of requests that name no client


@dataclass(frozen=True, eq=False)
class Service:
    """Served requests as columns, [requests]; times in seconds. weights: weights of clients by name; default 1."""

    client: NDArray[Any]
    arrival: Floats
    first_token: Floats
    last_token: Floats
    prompt_tokens: NDArray[Any]
    output_tokens: NDArray[Any]
    weights: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def clients(self) -> list[str]:
        """Returns the clients' names in alphabetical order."""
        return [str(name) for name in np.unique(self.client)]

    @cached_property
    def weight(self) -> Floats:
        """Returns the weight of each client, [clients]."""
        return np.array([self.weights.get(name, 1.0) for name in self.clients])

    @cached_property
    def amount(self) -> Floats:
        """Returns the service of each request, [requests]."""
        return PROMPT_WEIGHT * self.prompt_tokens + OUTPUT_WEIGHT * self.output_tokens

    def received(self, times: Floats) -> Floats:
        """Returns the service that each client has received by each time, [times, clients]."""
        at_once = self.last_token <= self.first_token
        seconds = np.where(at_once, 1, self.last_token - self.first_token)
        parts = (np.where(at_once, time >= self.last_token, (time - self.first_token) / seconds) for time in times)
        return self._by_client(parts)

    def requested(self, times: Floats) -> Floats:
        """Returns the service that each client has requested by each time, [times, clients]."""
        return self._by_client(self.arrival <= time for time in times)

    def _by_client(self, parts: Iterable[NDArray[Any]]) -> Floats:
        """Sums service by client. parts: for each time, the share of each request, clipped to 0 .. 1."""
        index = np.searchsorted(self.clients, self.client)
        num = len(self.clients)
        return np.array([np.bincount(index, self.amount * np.clip(part, 0, 1), num) for part in parts])


def service_of(
    requests: Collection[Entry], served: Served, weights: Mapping[str, float] | None = None
) -> Service | None:
    """Returns the service of a run; None if no request names its client. requests: in the order of their ends."""
    if not any(request.client for request in requests):
        return None
    ended = (request for request in requests if request.finish_reason in SERVED)
    names = np.array([request.client or NO_CLIENT for request in ended], dtype=str)
    times = served.arrival, served.first_token, served.last_token
    return Service(names, *times, served.prompt_tokens, served.output_tokens, weights or {})


def waits_of_clients(service: Service, served: Served, window: Window) -> dict[str, dict[str, Any]]:
    """Returns how long each client waits for its tokens, of the requests that end in the window."""
    counts, figures = window.holds(served.last_token), dict[str, dict[str, Any]]()
    for name in service.clients:
        own = counts & (service.client == name)
        latencies = {"ttft_seconds": statistics(served.ttft[own]), "tpot_seconds": statistics(served.tpot[own])}
        figures[name] = {"counted_requests": int(own.sum()), **latencies}
    return figures


class Windows(NamedTuple):
    """Fairness per window of a run, [windows] each. middle: seconds. difference: service per second. jain: NaN without service."""

    middle: Floats
    difference: Floats
    jain: Floats


def fairness(service: Service) -> dict[str, Any]:
    """Returns mean and worst values over `measure_windows` (NaN without windows), and the total service of each client."""
    totals = dict(zip(service.clients, service.received(np.array([np.inf]))[0].tolist(), strict=True))
    windows = measure_windows(service)
    difference, jain = windows.difference, windows.jain[~np.isnan(windows.jain)]
    most, least = max(difference.tolist(), default=math.nan), min(jain.tolist(), default=math.nan)
    return {
        "service_difference": {"max": most, "mean": mean(difference)},
        "jain_index": {"mean": mean(jain), "min": least},
        "clients": totals,
    }


def measure_windows(service: Service, seconds: float = WINDOW_SECONDS) -> Windows:
    """Returns service difference and Jain's index in 19 windows; in none if the last arrival precedes the end of the first window.

    The middles of the windows divide the time from half a window to the last arrival into 20 equal parts.

    difference: sum over clients of the lesser of two distances, to the client that received most and to the requested service;
        in service over weight (VTC, table 2, and its weighted variant).
    jain: (sum x)^2 / (n sum x^2), where x is a client's service divided by the client's weighted max-min fair share of all service
        in the window, given the service that clients wait for (Jain, Chiu and Hawe, DEC-TR-301, 1984); from 1/n (unfair) to 1 (fair).
    """
    last = float(service.arrival.max(initial=0.0))
    if last < seconds:
        return Windows(*np.zeros((3, 0)))
    middle: Floats = (last - seconds / 2) / _TICKS * np.arange(1.0, _TICKS) + seconds / 2
    begin = middle - seconds / 2
    end: Floats = begin + seconds
    before = service.received(begin)
    received: Floats = service.received(end) - before
    requested_by_end = service.requested(end)
    requested = requested_by_end - service.requested(np.nextafter(begin, -np.inf))  # both ends included
    level = received / service.weight
    short = np.minimum(level.max(axis=1, keepdims=True) - level, np.abs(requested - received) / service.weight)
    jain = [_jain(*window, service.weight) for window in zip(received, requested_by_end - before, strict=True)]
    return Windows(middle, short.sum(axis=1) / seconds, np.array(jain))


def _jain(received: Floats, wanted: Floats, weight: Floats) -> float:
    """Returns Jain's index of one window. Arguments: [clients]. NaN if no client received service."""
    fair = max_min_shares(float(received.sum()), wanted, weight)
    ratio = received[fair > 0] / fair[fair > 0]
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if ratio.any() else float("nan")


def max_min_shares(total: float, wanted: Floats, weight: Floats) -> Floats:
    """Returns the weighted max-min fair division of `total` among clients, [clients].

    No client gets more than wanted, and a client that gets less than wanted gets at least as much per weight as any other client.
    """
    level = wanted / weight  # level at which a client has all it wants
    order = np.argsort(level)
    below = np.concatenate([[0.0], np.cumsum(wanted[order])[:-1]])
    others = np.cumsum(weight[order][::-1])[::-1]  # total weight from each rank on
    rank = int(np.searchsorted(below + level[order] * others, total))
    if rank == len(wanted):
        return wanted
    shares: Floats = np.minimum(wanted, weight * (total - below[rank]) / others[rank])
    return shares
