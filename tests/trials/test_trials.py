"""Replications, and the rate of a load."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import message

from cbatch import ConfigError, Request, WorkloadError
from cbatch.sim.drafter import SurvivalsDrafter
from experiments.capacity.simulation import replicate
from experiments.settings.compose import compose_run
from experiments.settings.settings import Settings
from experiments.setup.assemble import Run, assemble
from experiments.trials.load import bounds_together, resolve_load
from experiments.trials.replications import Replication, check_random, natural_rate, num_recorded
from experiments.workloads import (
    Chat,
    Clients,
    DailyArrivals,
    GammaArrivals,
    OpenLoop,
    TraceReplay,
    UniformLengths,
    Workload,
)
from experiments.workloads.clients import Client
from experiments.workloads.open_loop import PrefixGroups

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


def test_a_rate_only_stretches_time_and_each_replication_has_draws_of_its_own() -> None:
    places = ((0, 1.0), (0, 4.0), (1, 1.0))
    slow, fast, other = (arrivals(Replication(OPEN, number, rate, 50)) for number, rate in places)
    assert slow[0] == pytest.approx([4 * time for time in fast[0]])
    assert slow[1] == fast[1] != other[1]
    assert natural_rate(OPEN, 50) == 5.0 and num_recorded(OPEN) is None
    assert natural_rate(replace(OPEN, rate_scale=2.0), 50) == 10.0
    groups = PrefixGroups(arrivals=GammaArrivals(rate=5.0, cv=3.0), lengths=LENGTHS)
    assert natural_rate(groups, 50) == 5.0
    assert arrivals(Replication(replace(OPEN, seed=4), 0, 1.0, 50)) == other, "replication k has seed + k"


def test_a_rate_that_is_measured_is_known_far_better_than_a_capacity() -> None:
    """Within 3.5 errors of 0.18%: that of 300,000 Poisson arrivals. An own class's rate has its own unit."""
    for arrivals in (PerMinute(300), DailyArrivals(rate=5.0, swing=0.0)):
        assert natural_rate(replace(OPEN, seed=1000, arrivals=arrivals), 2000) == pytest.approx(5, rel=0.0064)


def turns_of(requests: Sequence[Request]) -> dict[str | None, list[Request]]:
    return {
        name: [request for request in requests if request.session == name] for name in {r.session for r in requests}
    }


@pytest.mark.long
def test_a_rate_moves_conversations_and_keeps_their_pauses() -> None:
    """Conversations of 4 turns: the requests per second are four times the conversations per second."""
    chat = Chat(closed=False, num_requests=4000, turns=4, arrivals=GammaArrivals(rate=0.5), lengths=LENGTHS, pause=10.0)
    asked = turns_of(chat.requests(None))
    natural = natural_rate(chat, 4000)
    assert natural == pytest.approx(0.5 * 4, rel=0.012), "3.3 errors of 75,000 conversations"
    for factor in (0.1, 1.0, 20.0):
        requests = Replication(chat, 0, natural * factor, 4000).requests(None)
        assert [r.arrival_time for r in requests] == sorted(r.arrival_time for r in requests)
        moved = turns_of(requests)
        for name, turns in asked.items():
            pauses = np.diff([turn.arrival_time for turn in turns])
            assert np.diff([turn.arrival_time for turn in moved[name]]) == pytest.approx(pauses)
            assert [turn.num_prompt_tokens for turn in moved[name]] == [turn.num_prompt_tokens for turn in turns]
            assert moved[name][0].arrival_time == pytest.approx(turns[0].arrival_time / factor)


def test_equal_replications_are_refused() -> None:
    """Evenly spaced requests of one length: their only difference is the seed of their sampling."""
    client = Client(rate=2.0, cv=0, prompt_tokens=(10, 10), output_tokens=(5, 5))
    same = Clients(duration=50.0, clients={"a": client})
    assert "the seed changes nothing" in message(lambda: check_random(same, 20))
    check_random(replace(same, clients={"a": replace(client, output_tokens=(5, 6))}), 20)
    check_random(replace(same, clients={"a": client, "b": client}), 20)


def test_replications_of_a_trace_are_its_pieces(trace: TraceReplay) -> None:
    """The second piece of three requests has 2 intervals in 9 s."""
    assert num_recorded(trace) == 6 and natural_rate(trace, 3) == 5 / 15
    assert arrivals(Replication(trace, 1, 2.0, 3)) == (pytest.approx([0.0, 4 / 9, 1.0]), [14, 15, 16])


def settings(workload: Workload) -> Settings:
    return replace(compose_run("model=tiny", "backend=sim", "batch=4"), workload=workload)


@pytest.mark.long
def test_a_load_in_percent_is_refused_and_one_of_an_overload_study_is_not(trace: TraceReplay) -> None:
    assert replace(trace, load=3.0).load == 3
    with pytest.raises(WorkloadError, match=r"^workload\.load=70.0: give a share above 0, at most 10, not percent"):
        replace(trace, load=70.0)


def test_a_load_is_a_share_of_the_highest_rate_of_all_replications_together(trace: TraceReplay) -> None:
    of_a_trace = [replace(trace, load=0.5, replications=2, seed=seed) for seed in (0, 1)]
    drawn = [replace(OPEN, load=0.5, replications=2, seed=seed) for seed in (0, 1)]
    for whole, size, workloads in ((trace, 3, of_a_trace), (replace(OPEN, seed=0), 7, drawn)):
        highest = bounds_together(settings(whole), 2, size).rate
        for number, workload in enumerate(workloads):
            load = resolve_load(settings(workload))
            assert load[1:] == (0.5, 0.5 * highest)
            assert arrivals(assemble(load.settings)) == arrivals(Replication(whole, number, 0.5 * highest, size))
    assert resolve_load(settings(OPEN))[1:] == (None, None)
    alone = assemble(resolve_load(settings(replace(trace, load=0.5, num_requests=4))).settings)
    assert arrivals(alone)[1] == [11, 12, 13, 14]


def test_replications_draw_acceptance_independently() -> None:
    """Every rate and policy has the draws of its replication."""
    drafted = replace(settings(OPEN), drafter=SurvivalsDrafter(alpha=0.5, seed=3))
    drafters = [replicate(drafted, number, 1.0, 7).drafter for number in (0, 1, 1)]
    assert [drafter.seed for drafter in drafters if isinstance(drafter, SurvivalsDrafter)] == [3, 4, 4]
    assert isinstance(drafted.drafter, SurvivalsDrafter) and drafted.drafter.seed == 3


def test_a_load_that_cannot_be_is_refused(trace: TraceReplay) -> None:
    loaded = settings(replace(OPEN, load=0.5))
    with pytest.raises(ConfigError, match=r"workload\.replications=7"):
        resolve_load(settings(replace(trace, load=0.5, replications=7)))
    with pytest.raises(ConfigError, match=r"workload\.seed=2"):
        resolve_load(settings(replace(trace, load=0.5, replications=2, seed=2)))
    with pytest.raises(ConfigError, match=r"workload\.load=0\.5"):
        replicate(loaded, 0, 1.0, 7)
    with pytest.raises(ConfigError, match=r"workload\.load=0\.5.*backend=cpu"):
        resolve_load(replace(loaded, backend=compose_run("backend=cpu").backend))
    with pytest.raises(ConfigError, match="not with a drafter"):
        resolve_load(replace(loaded, drafter=SurvivalsDrafter([0.9])))  # a drafted run can end before the bound
    with pytest.raises(WorkloadError, match=r"workload\.replications=2"):
        replace(OPEN, replications=2)
