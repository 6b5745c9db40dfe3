"""Many simulated runs for one figure, on all cores."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import inf, nan
from typing import Any

import pandas as pd
from tqdm import tqdm

from cbatch import CostModel, Engine, KVSize, Limits, Policy, Request, RunRecord, Server
from cbatch.sim import SimExecutor
from experiments.serve import serve
from experiments.settings.compose import compose_run

Figures = dict[str, float]


def run_jobs(run: Callable[..., Figures], jobs: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Returns the rows of `rows_of`."""
    return pd.DataFrame([*rows_of(run, jobs)])


def rows_of(run: Callable[..., Figures], jobs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields a row for each job, in order: its arguments, and what `run` returns for them.

    run: a function of a module, which other processes import.
    """
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = tqdm(pool.map(partial(_call, run), jobs), total=len(jobs), leave=False)
        for job, figures in zip(jobs, results, strict=True):
            yield {**job, **figures}


def _call(run: Callable[..., Figures], job: Mapping[str, Any]) -> Figures:
    return run(**job)


def serve_on(
    cost: CostModel,
    policy: Policy,
    requests: Sequence[Request],
    *,
    memory: int,
    batch: int = 1000,
    tokens: int = 1_000_000,
    on_step: Callable[[Engine], None] = lambda engine: None,
) -> RunRecord:
    """Serve requests on one simulated machine, synchronously, with KV blocks of one token.

    memory: tokens of KV cache. batch, tokens: most in an iteration.
    """
    longest = max(request.max_tokens for request in requests)
    limits = Limits(batch, tokens, longest, tile=1)
    server = Server(SimExecutor(cost), limits, cost, KVSize(memory, 1), asynchronous=False)
    return server.serve(policy, requests, on_step=on_step)


def summary_of(*overrides: str) -> dict[str, Any]:
    """The figures of a simulated run, as in summary.json; nothing is written. overrides: as for `experiments.run`."""
    return serve(compose_run("backend=sim", *overrides), log=lambda line: None, bar=False).summary


def crossing(rates: Sequence[float], shares: Sequence[float], most: float) -> float:
    """The rate, ascending, from which on a share exceeds `most`, linear between two rates; NaN if none or every one does."""
    lower, below = nan, -inf
    for rate, share in zip(rates, shares, strict=True):
        if share > most:
            return lower + (rate - lower) * (most - below) / (share - below)
        lower, below = rate, share
    return nan
