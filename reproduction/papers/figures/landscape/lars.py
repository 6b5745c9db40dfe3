"""LARS (Medha, arXiv 2409.17264) against other orders of prompts, 5% of them long: time to first token over that alone.

Llama-3.1-8B on a simulated H200; long prompts have 120,000 tokens, others 256 to 4,096. A request's objective is twice the time that
its prompt takes alone. The orders differ in nothing else: chunks fit the same target; only LARS lets a long prompt yield.
"""

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np
import pandas as pd

from cbatch import SLO, PlanBuilder, Request, View
from cbatch.results.metrics import collect_served
from cbatch.sim import ProfileCost, load_profile
from experiments.setup.presets import load_spec
from policies.lars import LARS
from reproduction.papers.jobs import Figures, run_jobs, serve_on
from reproduction.papers.machines import Machines
from reproduction.papers.quantities import sum_of_chunks

LOADS, NUM_REQUESTS, SHARE, LONG, SHORT, OUTPUT = (0.5, 0.8), 1000, 0.05, 120_000, (256, 4096), 32
CHUNK = 2048


class Ordered(LARS):
    """Prompts in another order, without yielding."""

    def __init__(self, key: Callable[[Request, float], float]) -> None:
        """key: of a request and the seconds of its prompt still to come; lower comes first."""
        super().__init__()
        self.key = key

    def slack(self, request: Request, view: View) -> float:
        """Nothing to yield."""
        return 0.0

    def _by_slack(self, plan: PlanBuilder, view: View) -> list[Request]:
        def rank(request: Request) -> tuple[float, int]:
            return self.key(request, self._whole[request] * request.num_ready / request.num_tokens), request.id

        return sorted([*view.prefilling, *view.waiting], key=rank)


def _due(request: Request) -> float:
    return request.arrival_time + (request.slo.ttft or 0.0)


ORDERS: Mapping[str, Callable[[], LARS]] = {
    "LARS": LARS,
    "FCFS": lambda: Ordered(lambda request, left: request.arrival_time),
    "EDF": lambda: Ordered(lambda request, left: _due(request)),
    "least slack": lambda: Ordered(lambda request, left: _due(request) - left),
}


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: load, order, normalised (mean TTFT over the seconds of the prompt alone), of all, short and long requests."""
    data = run_jobs(run, [{"load": load, "order": order} for load, order in product(LOADS, ORDERS)])
    cost = _cost()
    machines.note("h200", {"model": cost.spec.name, **cost.provenance()})
    return data


def run(load: float, order: str, num_requests: int = NUM_REQUESTS) -> Figures:
    """One order at one load: the share of time that prompts alone would take."""
    cost, random = _cost(), np.random.default_rng(0)
    long = random.random(num_requests) < SHARE
    prompts = np.where(long, LONG, random.integers(*SHORT, num_requests, endpoint=True)).tolist()
    alone = np.array([sum_of_chunks(cost.predict, CHUNK, prompt) for prompt in prompts])
    arrivals = np.cumsum(random.exponential(alone.mean() / load, num_requests))
    requests = [
        Request(index, prompt, OUTPUT, arrival_time=time, slo=SLO(ttft=2 * seconds))
        for index, (prompt, time, seconds) in enumerate(zip(prompts, arrivals.tolist(), alone.tolist(), strict=True))
    ]
    served = collect_served(serve_on(cost, ORDERS[order](), requests, memory=900_000, batch=128, tokens=32_768))
    normalised = served.ttft / alone[served.id]
    return {
        "all": float(normalised.mean()),
        "short": float(normalised[~long[served.id]].mean()),
        "long": float(normalised[long[served.id]].mean()),
    }


def _cost() -> ProfileCost:
    return ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b"))
