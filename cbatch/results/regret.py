"""Regret: the distance of a simulated run from bounds that no policy can beat (docs/bounds.md)."""

from collections.abc import Callable, Sequence

from cbatch.bounds import Bounds
from cbatch.request import Request
from cbatch.request_spec import NO_SLO
from cbatch.results.attainment import judge
from cbatch.results.metrics import Served

BoundsOf = Callable[[Sequence[Request]], Bounds]  # returns the lower bounds of requests


def regret(requests: Sequence[Request], served: Served, bounds: BoundsOf) -> dict[str, float]:
    """Returns figures of the whole run; empty if no request was served. bounds: computes the bounds of the given requests.

    `latency`, `makespan`: ratios to the lower bounds B6 and B2, over served requests. `violations`: requests that missed their
    objectives, minus the lower bound B9. `*_bound`: the bounds, in seconds and requests. The true regret, relative to the best
    policy, is at most this large.
    """
    if not len(served.id):
        return {}
    ended = set(served.id.tolist())
    lower = bounds([request for request in requests if request.id in ended])
    latency, makespan = lower.latency, lower.makespan
    figures = {
        "latency": float(served.end_to_end.mean()) / latency,
        "latency_bound": latency,
        "makespan": float(served.last_token.max()) / makespan,
        "makespan_bound": makespan,
    }
    if with_objectives := [request for request in requests if request.slo != NO_SLO]:
        missed = int((~judge(with_objectives, served).met.all(axis=0)).sum())
        least = bounds(with_objectives).violations
        figures |= {"violations": missed - least, "violations_bound": least}
    return figures
