"""Replications, and the rate of a load."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch import ConfigError, WorkloadError
from experiments.capacity.simulation import replicate
from experiments.settings.assemble import Run, assemble, bounds_together
from experiments.settings.compose import compose_run
from experiments.settings.settings import Settings
from experiments.trials.replications import Replication, natural_rate, num_recorded
from experiments.workloads import GammaArrivals, OpenLoop, TraceReplay, UniformLengths, Workload

LENGTHS = UniformLengths(min_length=20, max_length=90, pd_ratio=4)
OPEN = OpenLoop(num_requests=7, seed=3, arrivals=GammaArrivals(rate=5.0), lengths=LENGTHS)


@dataclass(frozen=True)
class PerMinute:
    rate: float

    def times(self, generator: np.random.Generator, num: int) -> Any:
        return np.cumsum(generator.exponential(60 / self.rate, num))


@pytest.fixture
def trace(tmp_path: Path) -> TraceReplay:
    """Arrivals at 0, 1, 3, 6, 10 and 15 s."""
    path = tmp_path / "trace.csv"
    rows = [f"{time},ann,{tokens},1\n" for time, tokens in zip((0, 1, 3, 6, 10, 15), range(11, 17), strict=True)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    return TraceReplay(path=str(path), format="vtc")


def arrivals(of: Workload | Replication | Run) -> tuple[list[float], list[int]]:
    requests = of.requests if isinstance(of, Run) else of.requests(None)
    assert [request.id for request in requests] == list(range(len(requests)))
    return [request.arrival_time for request in requests], [request.num_prompt_tokens for request in requests]


def test_a_rate_only_stretches_time_and_each_replication_is_drawn_anew() -> None:
    places = ((0, 1.0), (0, 4.0), (1, 1.0))
    slow, fast, other = (arrivals(Replication(OPEN, number, rate, 50)) for number, rate in places)
    assert slow[0] == pytest.approx([4 * time for time in fast[0]])
    assert slow[1] == fast[1] != other[1]
    assert natural_rate(OPEN, 50) == 5.0 and num_recorded(OPEN) is None
    assert natural_rate(replace(OPEN, rate_scale=2.0), 50) == 10.0
    measured = natural_rate(replace(OPEN, arrivals=PerMinute(300)), 2000)
    assert measured == pytest.approx(5, rel=0.05), "an own class's rate has its own unit"
    assert arrivals(Replication(replace(OPEN, seed=4), 0, 1.0, 50)) == other, "replication k has seed + k"


def test_replications_of_a_trace_are_its_pieces(trace: TraceReplay) -> None:
    """The second piece of three requests has 2 intervals in 9 s."""
    assert num_recorded(trace) == 6 and natural_rate(trace, 3) == 5 / 15
    assert arrivals(Replication(trace, 1, 2.0, 3)) == (pytest.approx([0.0, 4 / 9, 1.0]), [14, 15, 16])


def settings(workload: Workload) -> Settings:
    return replace(compose_run("model=tiny", "backend=sim", "batch=4"), workload=workload)


def test_a_load_is_a_share_of_the_highest_rate_of_all_replications_together(trace: TraceReplay) -> None:
    of_a_trace = [replace(trace, load=0.5, replications=2, seed=seed) for seed in (0, 1)]
    drawn = [replace(OPEN, load=0.5, replications=2, seed=seed) for seed in (0, 1)]
    for whole, size, workloads in ((trace, 3, of_a_trace), (replace(OPEN, seed=0), 7, drawn)):
        highest = bounds_together(settings(whole), 2, size).rate
        for number, workload in enumerate(workloads):
            run = assemble(settings(workload))
            assert run.rate == 0.5 * highest and arrivals(run) == arrivals(Replication(whole, number, run.rate, size))
    assert assemble(settings(OPEN)).rate is None
    alone = assemble(settings(replace(trace, load=0.5, num_requests=4)))
    assert arrivals(alone)[1] == [11, 12, 13, 14]


def test_a_load_that_cannot_be_is_refused(trace: TraceReplay) -> None:
    loaded = settings(replace(OPEN, load=0.5))
    with pytest.raises(ConfigError, match=r"workload\.replications=7"):
        assemble(settings(replace(trace, load=0.5, replications=7)))
    with pytest.raises(ConfigError, match=r"workload\.seed=2"):
        assemble(settings(replace(trace, load=0.5, replications=2, seed=2)))
    with pytest.raises(ConfigError, match=r"workload\.load=0\.5"):
        replicate(loaded, 0, 1.0, 7)
    with pytest.raises(ConfigError, match=r"workload\.load=0\.5.*backend=cpu"):
        assemble(replace(loaded, backend=compose_run("backend=cpu").backend))
    with pytest.raises(WorkloadError, match=r"workload\.replications=2"):
        replace(OPEN, replications=2)
