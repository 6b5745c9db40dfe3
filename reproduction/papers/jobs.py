"""Many simulated runs for one figure, on all cores; each result is kept, so that an interrupted command can resume."""

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import ceil, inf, nan
from pathlib import Path
from typing import Any

import pandas as pd

from cbatch import CostModel, Engine, KVSize, Limits, Policy, Request, RunRecord, Server
from cbatch.sim import SimExecutor
from experiments.serve import figures_of
from experiments.settings.assemble import assemble
from experiments.settings.compose import compose_run
from experiments.store.sources import hash_of

FOLDER = Path("runs", "paper")
"""Where the figures of single runs are kept, a file of JSON lines for each figure."""

LINES = 50
"""The most lines of progress of a figure."""

_CODE = ("cbatch", "policies", "experiments/settings", "experiments/workloads", "reproduction/papers/jobs.py")

Figures = dict[str, float]


def run_jobs(
    run: Callable[..., Figures], jobs: Sequence[Mapping[str, Any]], say: Callable[[str], None], folder: Path = FOLDER
) -> pd.DataFrame:
    """A row for each job, in order: its arguments, and what `run` returns for them.

    run: a function of a module, which other processes import. Rows that the same code has made before are read.
    """
    own = Path(inspect.getfile(run))
    path, code = folder / f"{own.stem}.jsonl", f"{hash_of(_CODE)} {hashlib.sha256(own.read_bytes()).hexdigest()[:16]}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    known = {entry["job"]: entry["figures"] for entry in map(json.loads, lines) if entry["code"] == code}
    keys = [json.dumps(job, sort_keys=True) for job in jobs]
    missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in known}
    if len(missing) < len(jobs):
        say(f"{len(jobs) - len(missing)} of {len(jobs)} runs finished before: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, path.open("a", encoding="utf-8") as file:
        futures = {pool.submit(run, **job): key for key, job in missing.items()}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                key = futures[future]
                known[key] = future.result()
                file.write(json.dumps({"job": key, "code": code, "figures": known[key]}) + "\n")
                file.flush()
                if number % ceil(len(missing) / LINES) == 0 or number == len(missing):
                    say(f"{number} of {len(missing)} runs, the last one: {' '.join(map(str, missing[key].values()))}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return pd.DataFrame([{**job, **known[key]} for key, job in zip(keys, jobs, strict=True)])


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
    run = assemble(compose_run("backend=sim", "timeline=false", *overrides))
    return figures_of(run, run.engine.run())


def crossing(rates: Sequence[float], shares: Sequence[float], most: float) -> float:
    """The rate, ascending, from which on a share exceeds `most`, linear between two rates; NaN if none or every one does."""
    lower, below = nan, -inf
    for rate, share in zip(rates, shares, strict=True):
        if share > most:
            return lower + (rate - lower) * (most - below) / (share - below)
        lower, below = rate, share
    return nan
