"""Ablation between Orca's worst and best case in Fig 11 of SARATHI (arXiv 2308.16369): the gain against the stagger.

If all requests start together, whole prompts never meet decodes (worst case). If starts are spread evenly over a
request's life of D iterations, D / B apart, every prompt does (best case, the last point of a line). Sarathi staggers
requests by itself.
"""

from collections.abc import Callable, Iterator

import pandas as pd

from policies.orca import Orca
from policies.request_level import RequestLevel
from reproduction.experiment_files import swept, swept_numbers
from reproduction.papers.frames import Row, data_frame, select
from reproduction.papers.machines import Machines
from reproduction.papers.steady import Load, load_of, seconds_per_request

EXPERIMENT = "stagger"
HARDWARE = ("a6000", "h200")


@data_frame("hardware", "pd_ratio", "stagger", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Orca's throughput over the baseline's against the stagger, iterations between two starts."""
    for hardware, at in machines.available(HARDWARE):
        for ratio in swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            say(f"{hardware}, P:D {ratio:g}")
            load = load_of(EXPERIMENT, ratio)
            baseline = seconds_per_request(at.cost, RequestLevel(), load)
            for stagger in _staggers(load):
                yield hardware, ratio, stagger, baseline / seconds_per_request(at.cost, Orca(), load, stagger=stagger)


def _staggers(load: Load) -> list[float]:
    """Iterations between two arrivals, up to the even spread over a request's life."""
    even = load.output / load.batch
    given = [even if value == "even" else float(value) for value in swept(EXPERIMENT, "workload.stagger")]
    return sorted(stagger for stagger in given if stagger <= even)


def worst_case(data: pd.DataFrame, hardware: str) -> float:
    """Orca's lowest gain of any P:D where all requests start together."""
    gains = _orca(data, hardware)
    return float(gains.xs(0.0, level="stagger").min())


def best_case(data: pd.DataFrame, hardware: str) -> float:
    """Orca's highest gain of any P:D and stagger."""
    return float(_orca(data, hardware).max())


def reached(data: pd.DataFrame, hardware: str, pd_ratio: float, stagger: float = 1.0) -> float:
    """Orca's gain at this stagger as a share of its gain at an even spread."""
    gains = _orca(data, hardware).xs(pd_ratio, level="pd_ratio") - 1
    return float(gains[stagger] / gains.iloc[-1])


def _orca(data: pd.DataFrame, hardware: str) -> "pd.Series[float]":
    """Orca's gains, [P:D, stagger]."""
    return select(data, hardware=hardware).set_index(["pd_ratio", "stagger"])["value"]
