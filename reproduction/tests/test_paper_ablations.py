"""The ablations and the two posts' figures: what they measure, what they make of benchmarks' files, and that they draw."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib import pyplot as plt

from cbatch.errors import ConfigError
from cbatch.sim import Profile
from cbatch.sim.cost import ProfileCost
from policies.chunking import PDAware, TileAligned
from policies.chunking.steady_state import steady_state_seconds
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.experiment_files import FOLDER, composed, swept, swept_numbers, workload
from reproduction.papers import frames
from reproduction.papers.claims import check, read_claims
from reproduction.papers.figures import (
    async_lanes,
    chunk_drift,
    chunk_regret,
    graph_gain,
    graph_pool,
    loops,
    stagger,
    tile_alignment,
    tile_curve,
)
from reproduction.papers.machines import LARGEST_BATCH, Machines
from reproduction.papers.steady import Load, seconds_per_request

GPU = "NVIDIA H200"


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@cache
def machines() -> Machines:
    return Machines()


def quiet(_: str) -> None:
    """Progress is not shown."""


# -- The steady state that chunks are chosen by ------------------------------------------------------------------------


def without_power(profile: Profile) -> Profile:
    """The measured tables, less what the steady state by hand leaves out: the GPU's past."""
    models = {
        name: replace(model, tensor_parallel={d: replace(of, power=None) for d, of in model.tensor_parallel.items()})
        for name, model in profile.models.items()
    }
    return replace(profile, models=models)


@cache
def cost_of(name: str) -> ProfileCost:
    """The cost model of a machine whose iteration times depend only on tokens, requests and mean context."""
    at = machines().get(name)
    assert at is not None
    cost = at.cost
    if name == "a6000":
        return cost
    return ProfileCost(without_power(cost.profile), cost.spec, max_batch=LARGEST_BATCH)


@pytest.mark.parametrize("total", [128, 256, 512, 1024])
@pytest.mark.parametrize("pd_ratio", [2, 5, 14, 28, 50])
@pytest.mark.parametrize("name", ["a6000", "h200", "h200-13b"])
def test_the_steady_state_by_hand_is_that_of_a_run(name: str, pd_ratio: float, total: int) -> None:
    """By hand an iteration takes what it takes after its like, with decodes of equal context.

    On an H200 an iteration also takes less or more after others than after its like, as the clock follows the power.
    That is left out of the profile here, so that what is compared is the count of iterations and what is in them. The
    A6000's profile knows none.
    """
    cost, load = cost_of(name), Load(1024, 18, pd_ratio)
    run = seconds_per_request(cost, Sarathi(TileAligned(total)), load)
    prompt = load.length - load.output
    assert steady_state_seconds(cost, total, load.batch, prompt, load.output) == pytest.approx(run, rel=0.01)


# -- Simulated ablations -----------------------------------------------------------------------------------------------


def test_a_chosen_chunk_is_within_2_percent_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_regret, "HARDWARE", ("a6000",))
    monkeypatch.setattr(chunk_regret, "swept_numbers", lambda *_: [14.0, 50.0])
    data = chunk_regret.measure(machines(), quiet)
    assert chunk_regret.worst_regret(data, hardware="a6000") <= 2.0
    assert chunk_regret.worst_regret(data, "fixed", "a6000") > 10
    assert (chunk_regret.regret(data)["value"] >= 0).all()
    assert len(chunk_regret.draw(data, []).axes) == 1
    assert "P:D-aware" in chunk_regret.text(data)


def chosen_at_the_end_of_each_phase(drift: chunk_drift.Drift) -> list[int]:
    """The total of an iteration when the last request of each P:D ended."""
    in_force = [(begin, end, total) for (begin, total), (end, _) in pairwise(drift.chunks)]
    each = len(drift.ends) // len(composed("chunk_drift")["workload"]["lengths"]["pd_ratios"])
    last_ends = drift.ends[each - 1 :: each]
    return [next(total for begin, end, total in in_force if begin < second <= end) for second, _ in last_ends]


@pytest.mark.parametrize("hardware", chunk_drift.HARDWARE)
def test_the_chosen_chunk_follows_a_drift(hardware: str) -> None:
    """What is chosen in each phase is within 2% of that phase's best fixed total, which one total for all is not."""
    at = machines().get(hardware)
    assert at is not None
    aware, config = chunk_drift.run(at.cost, PDAware()), composed("chunk_drift")
    chosen, totals = (
        chosen_at_the_end_of_each_phase(aware),
        [int(chunk) for chunk in swept("chunk_drift", "chunk")[:-1]],
    )
    slowdowns: list[dict[int, float]] = []  # of each phase, by total, over its best
    for ratio in config["workload"]["lengths"]["pd_ratios"]:
        load = Load(config["workload"]["lengths"]["length"], config["batch"], ratio)
        times = {total: seconds_per_request(at.cost, Sarathi(TileAligned(total)), load) for total in totals}
        slowdowns.append({total: seconds / min(times.values()) for total, seconds in times.items()})
    for total, of_phase in zip(chosen, slowdowns, strict=True):
        assert of_phase[total] <= 1.02, (total, min(of_phase, key=of_phase.__getitem__))
    assert all(max(of_phase[total] for of_phase in slowdowns) > 1.02 for total in totals)
    assert aware.seconds < chunk_drift.run(at.cost, TileAligned(256)).seconds


def test_orca_gains_with_the_stagger_and_sarathi_does_not() -> None:
    data = stagger.measure(machines(), quiet)
    assert stagger.worst_case(data, "a6000") == pytest.approx(1.0, abs=0.005)
    assert stagger.best_case(data, "a6000") == pytest.approx(1.11, abs=0.06)
    assert stagger.reached(data, "a6000", 14) > 0.98
    sarathi = data[data["series"] != "Orca"].groupby(["hardware", "pd_ratio"])["value"]
    assert (sarathi.max() - sarathi.min()).max() < 0.01
    assert len(stagger.draw(data, read_claims("stagger")).axes) == 2


def test_alignment_is_most_of_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_alignment, "swept_numbers", lambda *_: [5.0, 14.0])
    data = tile_alignment.measure(machines(), quiet)
    table = data[data["hardware"] == "a6000"].pivot_table(index="pd_ratio", columns="series", values="value")
    gains = dict(table.loc[14.0].items())
    aligned, unaligned = (gains[series] for series in tile_alignment.SCHEMES)
    assert (aligned - unaligned) / (aligned - 1) > 0.5
    assert len(tile_alignment.draw(data, []).axes) == 4


def test_sweeps_are_those_of_the_configuration() -> None:
    assert swept_numbers("chunk_regret", "workload.pd_ratio") == [2, 5, 14, 28, 50]
    assert swept("chunk_regret", "chunk")[-1] == "auto"
    with pytest.raises(ConfigError, match="does not sweep policy"):
        swept("chunk_regret", "policy")
    with pytest.raises(ConfigError, match="no such experiment; did you mean chunk_drift"):
        composed("chunk_drif")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_experiment_is_composed_with_all_that_it_sweeps(name: str) -> None:
    """Nothing is read but the configuration: an experiment on a GPU or of a trace is composed here as well."""
    config = composed(name)
    assert {"policy", "workload", "backend"} <= set(config)
    if name not in ("chat_replay", "landscape", "arena"):
        assert workload(name).requests(None)


def test_a_closed_batch_serves_any_policy() -> None:
    at, load = machines().get("a6000"), Load(1024, 18, 14)
    assert at is not None
    together = seconds_per_request(at.cost, Orca(), load)
    assert together == pytest.approx(at.seconds("orca_worst", load), rel=0.005)
    assert seconds_per_request(at.cost, Orca(), load, stagger="even") < together


# -- The asynchronous loop ---------------------------------------------------------------------------------------------


def test_the_posts_asynchronous_run_follows_from_its_synchronous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_lanes, "FOLDER", tmp_path)
    said: list[str] = []
    data = async_lanes.measure(machines(), said.append)
    assert any(line.startswith("left out: results/h200/async.json is ") for line in said)
    assert async_lanes.of(data, "simulated", "async", "seconds") == pytest.approx(234.5, rel=0.03)
    assert async_lanes.gain(data, "simulated") == pytest.approx(1.28, abs=0.04)
    claims = read_claims("async_lanes")
    verdicts = list(check(claims, machines(), async_lanes, data))
    assert len(verdicts) == 6 and all(verdict.holds for verdict in verdicts)
    assert len(async_lanes.draw(data, claims).axes) == 3


# -- What benchmarks measure on a GPU ----------------------------------------------------------------------------------


def given(monkeypatch: pytest.MonkeyPatch, module: Any, found: dict[str, Any] | None) -> None:
    for reader in (frames, module):
        monkeypatch.setattr(reader, "read_benchmark", lambda name: found, raising=False)


@pytest.mark.parametrize(
    ("module", "name"), [(tile_curve, "tiles"), (loops, "loops"), (graph_gain, "graphs"), (graph_pool, "graph_memory")]
)
def test_a_benchmark_that_was_not_run_is_named(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, module, None)
    said: list[str] = []
    assert module.measure(machines(), said.append).empty
    (line,) = said
    assert line.startswith(
        f"left out: results/h200/{name}.json is neither in this folder nor in a checkout of cbatch; "
    )
    assert line.endswith(f"python -m reproduction.bench {name}")


def test_a_file_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert frames.read_benchmark("tiles", tmp_path) is None
    (tmp_path / "tiles.json").write_text('{"model": "small"}')
    assert frames.read_benchmark("tiles", tmp_path) == {"model": "small"}


def test_sizes_to_avoid_are_slower_than_a_larger_one_or_far_below_a_smaller_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {64: 4.0, 128: 5.0, 192: 9.0, 256: 7.0, 257: 8.5}
    found = {
        "hardware": GPU,
        "model": "small",
        "times": {str(size): {"median": time, "min": time - 0.1, "max": time + 0.1} for size, time in times.items()},
    }
    given(monkeypatch, tile_curve, found)
    data = tile_curve.measure(machines(), quiet)
    judged = tile_curve.judge(data).set_index("tokens")
    assert judged["instead"].to_dict() == {64: 0, 128: 0, 192: 256, 256: 0, 257: 0}
    assert judged.at[257, "lost"] == pytest.approx(1 - (257 / 8.5) / (256 / 7))
    assert tile_curve.num_to_avoid(data) == 1
    assert tile_curve.step_over(data, 256) == pytest.approx(8.5 / 7)
    assert len(tile_curve.draw(data, []).axes) == 2
    assert "avoid: 256 takes less time" in tile_curve.text(data)


def test_loops_and_graphs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        f"{loop}, graphs {graphs}": {
            "tokens_per_second": {"median": rate},
            "active_share": {"median": 0.9},
            "eager_iterations": 5,
            "iterations": 10,
        }
        for loop, graphs, rate in (
            ("sync", "off", 100.0),
            ("async", "off", 110.0),
            ("sync", "all", 150.0),
            ("async", "all", 180.0),
        )
    }
    traffic = {"model": "small", "batch": 4, "chunk": 16, "requests": 9, "lengths": [12, 40], "ratio": 3.0}
    given(monkeypatch, loops, {"hardware": GPU, **traffic, "figures": figures})
    data = loops.measure(machines(), quiet)
    assert loops.gain(data, "async", "all") == pytest.approx(1.8)
    assert loops.gain(data, "async", "all", "sync", "all") == pytest.approx(1.2)
    assert len(loops.draw(data, []).axes) == 3
    assert "50.0%" in loops.text(data)
    assert "9 requests of 12 to 40 tokens, P:D 3, C = 16, B = 4" in data.attrs["traffic"]


def test_the_gain_of_graphs_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def way(*rates: float, capture: float) -> dict[str, Any]:
        by_batch = {str(batch): {"median": rate} for batch, rate in zip((1, 64), rates, strict=True)}
        return {"by_batch": by_batch, "capture_seconds": capture, "warm_up_seconds": 1.0, "graphs": 12}

    ways = {
        "transformers, graphs": way(120.0, 4000.0, capture=3.0),
        "transformers, eager": way(40.0, 2000.0, capture=0.0),
    }
    given(monkeypatch, graph_gain, {"hardware": GPU, "figures": ways})
    data = graph_gain.measure(machines(), quiet)
    names = ("transformers, graphs", "transformers, eager")
    assert graph_gain.gain(data, *names) == pytest.approx(3.0)
    assert graph_gain.share_left(data, *names, batch=64) == pytest.approx((1 / 2) / (2 / 3))
    assert graph_gain.seconds_per_size(data, names[0]) == pytest.approx(3.0 / 6)
    assert pd.isna(graph_gain.rate(data, "torch.compile"))
    assert len(graph_gain.draw(data, read_claims("graph_gain")).axes) == 2
    assert "transformers, eager" in graph_gain.text(data)


def test_the_memory_of_graphs_by_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        graph_pool.SHARED: {"tokens": [8, 8, 1], "bytes": [80, 82, 84]},
        graph_pool.OWN: {"tokens": [8, 8, 1], "bytes": [80, 160, 170]},
    }
    given(monkeypatch, graph_pool, {"hardware": GPU, "figures": figures})
    data = graph_pool.measure(machines(), quiet)
    assert graph_pool.over_largest(data) == pytest.approx(1.05)
    assert graph_pool.over_largest(data, graph_pool.OWN) == pytest.approx(2.125)
    assert len(graph_pool.draw(data, []).axes) == 1


# -- Claims ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [chunk_regret, chunk_drift, stagger, tile_curve, loops, async_lanes, graph_gain, graph_pool]
)
def test_every_figure_has_claims_and_those_that_cannot_be_met_say_why(module: Any) -> None:
    claims = read_claims(module.__name__.rpartition(".")[2])
    assert claims
    for claim in claims:
        assert callable(getattr(module, claim.quantity)), claim.id
        assert claim.expected == "held" or claim.note
