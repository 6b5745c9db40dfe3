"""Confidence intervals of mean waits that treat requests as independent, on queues whose mean is known (M/M/1).

From 2,048 customers of a stationary queue, 3,000 times: how often the usual 95% interval, mean +- 1.96 standard errors, holds the
true mean. Consecutive waits are correlated, the more the higher the load: near capacity the interval is far too narrow.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from reproduction.papers.frames import select
from reproduction.papers.jobs import Figures, run_jobs
from reproduction.papers.machines import Machines

CUSTOMERS, RUNS = 2048, 3000
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)


def measure(machines: Machines, say: Callable[[str], None]) -> pd.DataFrame:
    """Columns: load, covered (share of the intervals that hold the mean), true and naive (half-widths over the mean)."""
    return run_jobs(run, [{"load": load} for load in LOADS])


def run(load: float) -> Figures:
    """One load; services take 1 on average."""
    random = np.random.default_rng(0)
    wait = np.where(random.random(RUNS) < load, random.exponential(1 / (1 - load), RUNS), 0.0)  # of the first
    total = squares = np.zeros(RUNS)
    for _ in range(CUSTOMERS):
        total, squares = total + wait, squares + wait**2
        wait = np.maximum(wait + random.exponential(1.0, RUNS) - random.exponential(1 / load, RUNS), 0.0)
    mean, truth = total / CUSTOMERS, load / (1 - load)
    naive = 1.96 * np.sqrt((squares / CUSTOMERS - mean**2) / CUSTOMERS)
    covered = float((abs(mean - truth) <= naive).mean())
    return {"covered": covered, "true": 1.96 * float(mean.std()) / truth, "naive": float(naive.mean()) / truth}


def of(data: pd.DataFrame, load: float, what: str) -> float:
    """A figure of one load."""
    return float(select(data, load=load)[what].iloc[0])
