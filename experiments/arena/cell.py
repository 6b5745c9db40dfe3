"""A cell of the arena: one policy on one trace, at one load and under one set of objectives, by several replications.

A load is the request rate over the highest that any policy can sustain (B3): the same load is as hard on any trace, model and
GPU. The bounds are those of the union of the replications, so that they are the same for all policies.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from cbatch import ConfigError
from cbatch.bounds import Bounds
from cbatch.results.metrics import collect_served
from cbatch.results.regret import regret
from cbatch.validation import Give, Switch, positive, whole
from experiments.capacity.command import FEWEST_REQUESTS, REQUESTS, slo_name, split
from experiments.capacity.replications import natural_rate, num_recorded, replicate, together
from experiments.serve import Command, about_run, bounds_of, figures_of
from experiments.settings.assemble import assemble
from experiments.store.claim import claimed, make_folder
from experiments.store.crash_report import UNFINISHED
from experiments.store.result_file import ResultFile
from experiments.store.sources import sources_of
from experiments.store.text import flat, format_number, format_share

CELL = ResultFile("cell.json", frozenset({"cell", "by_replication"}), without=("capacity",))

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
class Keys:
    """The keys of conf/arena.yaml."""

    slo: Mapping[str, Any]
    load: Annotated[float, positive("0.5 for half of the highest rate that can be sustained")]
    replications: Annotated[int, whole(2, 10_000)]
    requests: Annotated[Literal["auto"] | Annotated[int, whole(FEWEST_REQUESTS, 1_000_000)], Give(REQUESTS)]
    capacity: Switch


def measure(
    settings: Mapping[str, Any],
    folder: Path,
    command: Command = Command(),  # noqa: B008 - frozen
    *,
    replace: bool = False,
    say: Callable[[str], None] = print,
    bar: bool = True,
) -> dict[str, Any]:
    """Simulates a cell and writes its folder; returns what cell.json holds. The arguments are those of `serve`.

    Raises:
        CbatchError: a setting that cannot be used, or a failure of the policy.
    """
    began = time.perf_counter(), time.process_time()
    keys, run_settings = split(Keys, settings)
    requests = _num_requests(keys, run_settings["workload"])
    highest, bounds = _machine(_without_policy(run_settings), keys.replications, requests)
    make_folder(folder)
    with claimed(folder / UNFINISHED):
        rate = keys.load * highest
        values: dict[str, list[float]] = {}
        outside = 0
        for number in range(keys.replications):
            run = assemble(replicate(run_settings, number, rate, requests))
            record = run.engine.run()
            served = collect_served(record)
            outside += run.cost.num_outside
            figures = {**figures_of(run, record, served), "regret": regret(run.requests, served, bounds)}
            for key, value in flat(figures):
                if key in FIGURES or (key.startswith("attainment.tiers.") and key.endswith(".share")):
                    values.setdefault(key, []).append(value if value is not None and isfinite(value) else float("nan"))
        cell = {"load": keys.load, "rate": rate, "rate_bound": highest, "requests": requests}
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        origin = {"slo": slo_name(command), "code": sources_of(run_settings), "wall_seconds": wall}
        about = {**about_run(run, run_settings, command), **origin}
        about["execution"]["iterations_outside_measured_range"] = outside
        summary = {"about": about, "cell": {**cell, "cpu_seconds": cpu}, "by_replication": values}
        CELL.write(folder, summary, settings)
    return summary


def _num_requests(keys: Keys, workload: Mapping[str, Any]) -> int:
    recorded = num_recorded(workload)
    most = _REQUESTS if recorded is None else recorded // keys.replications
    requests = min(_REQUESTS, most) if keys.requests == "auto" else keys.requests
    if recorded is not None and requests > most:
        problem = f"a trace of {recorded} requests holds {recorded // requests} replications of this length"
        remedy = f"requests={most}, or fewer replications=" if most >= FEWEST_REQUESTS else "fewer replications="
        raise ConfigError(f"requests={requests}: {problem}; give {remedy}")
    natural_rate(workload, requests)  # it has one
    return requests


def _without_policy(settings: Mapping[str, Any]) -> str:
    """The settings that bounds depend on, as JSON."""
    workload = {**settings["workload"], "slo": None, "tiers": None}
    policy = {"_target_": "policies.orca.Orca"}
    return json.dumps({**settings, "policy": policy, "workload": workload, "predictor": None, "sweep": ""})


@lru_cache(maxsize=2)
def _machine(settings: str, replications: int, requests: int) -> tuple[float, Callable[..., Bounds]]:
    """The highest rate that any policy can sustain, and a function that bounds any subset of the requests."""
    run = assemble(together(json.loads(settings), replications, requests))
    bounds = bounds_of(run)
    return bounds(run.requests).rate, bounds


def cell_line(name: str, summary: Mapping[str, Any]) -> str:
    """One cell in a line."""
    values = summary["by_replication"]
    share = sum(values["attainment.share"]) / len(values["attainment.share"])
    over = sum(values["regret.latency"]) / len(values["regret.latency"])
    rate = format_number(summary["cell"]["rate"])
    return f"{name}: {format_share(share)} attained at {rate} requests/s, mean latency {over:.3g} x its bound"
