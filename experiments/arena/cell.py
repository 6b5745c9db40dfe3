"""A cell of the arena: one policy on one trace, at one load and under one set of objectives, by several replications.

A load is the request rate over the highest that any policy can sustain (B3): the same load is as hard on any trace, model and
GPU. The bounds are those of the union of the replications, so that they are the same for all policies.
"""

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from cbatch import ConfigError
from cbatch.bounds import Bounds
from cbatch.results.metrics import collect_served
from cbatch.results.regret import regret
from cbatch.validation import Give, Switch, positive, whole
from experiments.capacity.command import FEWEST_REQUESTS, REQUESTS, slo_name
from experiments.capacity.replications import natural_rate, num_recorded, replicate, together
from experiments.serve import about_run, bounds_of, figures_of
from experiments.settings.assemble import assemble
from experiments.settings.identity import identity
from experiments.settings.settings import Keys, Recipe, Settings
from experiments.store.claim import claimed
from experiments.store.result_file import ResultFile
from experiments.store.sources import sources_of
from experiments.store.text import flat, format_number, format_share

CELL = ResultFile("cell.json", frozenset({"cell", "by_replication"}))

FIGURES = (
    "attainment.share",
    "ttft_seconds.p50",
    "ttft_seconds.p99",
    "tbt_seconds.p99",
    "end_to_end_seconds.mean",
    "throughput.total_tokens_per_second",
    "run.preemptions",
    "regret.latency",
    "regret.makespan",
    "regret.violations",
    "regret.violations_bound",
)
"""What is kept of each replication, by the keys of a run's summary.json; and the attainment of each service class."""

_REQUESTS = 1000


@dataclass(frozen=True, kw_only=True)
class CellKeys(Keys):
    """The root keys with those of conf/arena.yaml."""

    slo: Mapping[str, Any]
    load: Annotated[float, positive("0.5 for half of the highest rate that can be sustained")]
    replications: Annotated[int, whole(2, 10_000)]
    requests: Annotated[Literal["auto"] | Annotated[int, whole(FEWEST_REQUESTS, 1_000_000)], Give(REQUESTS)]
    capacity: Switch

    without_effect = (*Keys.without_effect, "capacity")


@dataclass(frozen=True, kw_only=True)
class Cell(CellKeys, Settings):
    """The settings of a cell."""


def measure(
    settings: Cell, folder: Path, *, replace: bool = False, say: Callable[[str], None] = print, bar: bool = True
) -> dict[str, Any]:
    """Simulates a cell and writes its folder; returns what cell.json holds. The arguments are those of `serve`.

    Raises:
        CbatchError: a setting that cannot be used, or a failure of the policy.
    """
    began = time.perf_counter(), time.process_time()
    requests = _num_requests(settings)
    highest, bounds = _machine(_without_policy(settings), settings.replications, requests)
    with claimed(folder):
        rate = settings.load * highest
        values: dict[str, list[float]] = {}
        outside = 0
        for number in range(settings.replications):
            run = assemble(replicate(settings, number, rate, requests))
            record = run.engine.run()
            served = collect_served(record)
            outside += run.cost.num_outside
            figures = {**figures_of(run, record, served), "regret": regret(run.requests, served, bounds)}
            for key, value in flat(figures):
                if key in FIGURES or (key.startswith("attainment.tiers.") and key.endswith(".share")):
                    values.setdefault(key, []).append(value if value is not None and isfinite(value) else float("nan"))
        cell = {"load": settings.load, "rate": rate, "rate_bound": highest, "requests": requests}
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        origin = {"slo": slo_name(settings), "code": sources_of(settings.composed), "wall_seconds": wall}
        about = {**about_run(run), "identity": identity(settings), **origin}
        about["execution"]["iterations_outside_measured_range"] = outside
        summary = {"about": about, "cell": {**cell, "cpu_seconds": cpu}, "by_replication": values}
        CELL.write(folder, summary, settings.composed)
    return summary


def _num_requests(keys: Cell) -> int:
    recorded = num_recorded(keys.workload)
    most = _REQUESTS if recorded is None else recorded // keys.replications
    requests = min(_REQUESTS, most) if keys.requests == "auto" else keys.requests
    if recorded is not None and requests > most:
        problem = f"a trace of {recorded} requests holds {recorded // requests} replications of this length"
        remedy = f"requests={most}, or fewer replications=" if most >= FEWEST_REQUESTS else "fewer replications="
        raise ConfigError(f"requests={requests}: {problem}; give {remedy}")
    natural_rate(keys.workload, requests)  # it has one
    return requests


def _without_policy(settings: Cell) -> bytes:
    """Returns the settings that bounds depend on, pickled."""
    workload: Any = settings.workload
    workload = replace(workload, slo=None, tiers=None)
    policy = Recipe({"_target_": "policies.orca.Orca"})
    others: Any = {"composed": {}, "overrides": (), "choices": {}, "sweep": "", "chosen": {}}
    return pickle.dumps(replace(settings, policy=policy, workload=workload, **others))


@lru_cache(maxsize=2)
def _machine(pickled: bytes, replications: int, requests: int) -> tuple[float, Callable[..., Bounds]]:
    """The highest rate that any policy can sustain, and a function that bounds any subset of the requests."""
    run = assemble(together(pickle.loads(pickled), replications, requests))
    bounds = bounds_of(run)
    return bounds(run.requests).rate, bounds


def cell_line(name: str, summary: Mapping[str, Any]) -> str:
    """One cell in a line."""
    values = summary["by_replication"]
    share = sum(values["attainment.share"]) / len(values["attainment.share"])
    over = sum(values["regret.latency"]) / len(values["regret.latency"])
    rate = format_number(summary["cell"]["rate"])
    return f"{name}: {format_share(share)} attained at {rate} requests/s, mean latency {over:.3g} x its bound"
