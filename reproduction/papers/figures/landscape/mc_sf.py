"""MC-SF against the hindsight optimum (arXiv 2502.07115): total latency on small random instances.

The optimum is found by trying every start time of every request. In rounds of one token each, a request of prompt s and
output o that starts in round t holds s + j in round t + j and ends with round t + o.
"""

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pandas as pd

from cbatch import CostFunction, Request
from experiments.workloads.trace import Ints
from policies.mc_sf import McSf
from policies.predictors import Oracle
from reproduction.papers.claims import Claim
from reproduction.papers.jobs import Figures, run_jobs, serve_on
from reproduction.papers.machines import Machines

MEMORY, NUM_REQUESTS, INSTANCES = 10, 4, 200
ARRIVALS = {"together": 0, "online": 5}
"""The last round in which a request may arrive."""
ORDERS = {"shortest": "MC-SF", "arrival": "MC-Benchmark"}
GOLDEN = ((0, 3, 2), (0, 4, 3), (0, 4, 5), (0, 2, 3))
"""(arrival, prompt, output) of the example computed by hand: optimum 20, MC-SF 22, MC-Benchmark 27."""

Asked = Sequence[tuple[int, int, int]]
"""(arrival, prompt, output) of each request."""


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: arrivals, instance, optimum (rounds of latency in all), and those of each order over the optimum."""
    return run_jobs(run, [{"arrivals": name, "seed": seed} for name in ARRIVALS for seed in range(INSTANCES)])


def run(arrivals: str, seed: int) -> Figures:
    """One random instance."""
    random = Random(seed)
    asked = []  # in order of arrival; each fits into the memory alone
    for arrival in sorted(random.randint(0, ARRIVALS[arrivals]) for _ in range(NUM_REQUESTS)):
        prompt = random.randint(1, 5)
        asked.append((arrival, prompt, random.randint(1, MEMORY - prompt)))
    best = optimum(asked)
    return {"optimum": best, **{order: latency(asked, order) / best for order in ORDERS}}


def latency(asked: Asked, order: str) -> float:
    """Rounds from arrivals to ends, summed, of the policy."""
    requests = [Request(id_, prompt, output, arrival_time=float(at)) for id_, (at, prompt, output) in enumerate(asked)]
    record = serve_on(CostFunction(lambda shape: 1.0), McSf(Oracle(), order), requests, memory=MEMORY)
    return sum((request.finished_at or 0.0) - request.arrival_time for request in record.requests)


def optimum(asked: Asked) -> float:
    """The least sum of any start times, [requests], whose memory fits in every round."""
    horizon = max(arrival for arrival, _, _ in asked) + sum(output for _, _, output in asked)
    usage = {}  # of a request that starts in a round, [rounds]
    for index, (arrival, prompt, output) in enumerate(asked):
        for start in range(arrival, horizon - output + 1):
            held = np.zeros(horizon + 1, np.int64)
            held[start + 1 : start + output + 1] = prompt + np.arange(1, output + 1)
            usage[index, start] = held
    return _extend(asked, usage, 0, np.zeros(horizon + 1, np.int64), float("inf"))


def _extend(asked: Asked, usage: dict[tuple[int, int], Ints], index: int, held: Ints, most: float) -> float:
    """The least latency of the requests from `index` on beside what is held; `most` if none is below it."""
    if index == len(asked):
        return 0.0
    arrival, _, output = asked[index]
    later = sum(output for _, _, output in asked[index + 1 :])  # each ends its output after its arrival at the earliest
    start = arrival
    while (index, start) in usage and start + output - arrival + later < most:
        together = held + usage[index, start]
        if together.max() <= MEMORY:
            own = start + output - arrival
            most = min(most, own + _extend(asked, usage, index + 1, together, most - own))
        start += 1
    return most


def golden(data: pd.DataFrame, order: str = "") -> float:
    """Latency of the example, of a policy or, without one, the optimum."""
    return latency(GOLDEN, order) if order else optimum(GOLDEN)


def least_ratio(data: pd.DataFrame) -> float:
    """The smallest of all ratios: no policy is better than the optimum."""
    return float(data[[*ORDERS]].min().min())


def draw(data: pd.DataFrame, printed: Sequence[Claim]) -> str:
    """Returns the distribution of each order's ratios over the instances, as a table."""
    ratios = data.rename(columns=ORDERS).melt("arrivals", [*ORDERS.values()], "order")
    return ratios.groupby(["arrivals", "order"])["value"].describe().reset_index().to_markdown(index=False)
