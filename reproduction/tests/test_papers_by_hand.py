"""What figures measure, by hand: steady states, operations, tiles, pipelines, chunks that follow a drift, and the posts' loops."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from places import SHARED
from small_cluster import make_cost, make_engine

from cbatch import BatchShape, Request
from cbatch.model.topology import Topology
from cbatch.sim import Profile
from cbatch.sim.cost import ProfileCost
from policies.chunking import PDAware, TileAligned
from policies.chunking.steady_state import steady_state_seconds
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.experiment_files import composed, swept
from reproduction.papers.claims import check, read_claims
from reproduction.papers.figures import chunk_drift, fig4, fig12, graph_gain, table2
from reproduction.papers.figures.fig5 import Calendar
from reproduction.papers.machines import LARGEST_BATCH, Machines
from reproduction.papers.operations import ORDER, intensity_by_operation, seconds_by_operation
from reproduction.papers.steady import Load, seconds_per_request

PROFILES = SHARED / "profiles"


@cache
def machines() -> Machines:
    return Machines()


def quiet(_: str) -> None:
    """Progress is not shown."""


@cache
def data_of(figure: ModuleType) -> pd.DataFrame:
    data: pd.DataFrame = figure.measure(machines(), quiet)
    return data


def cost() -> ProfileCost:
    at = machines().get("a6000")
    assert at is not None
    return at.cost


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


@pytest.mark.parametrize("total", [128, 512, 1024])
@pytest.mark.parametrize("pd_ratio", [2, 14, 50])
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


def test_the_gain_of_graphs_by_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def way(*rates: float, capture: float) -> dict[str, Any]:
        by_batch = {str(batch): {"median": rate} for batch, rate in zip((1, 64), rates, strict=True)}
        return {"by_batch": by_batch, "capture_seconds": capture, "warm_up_seconds": 1.0, "graphs": 12}

    ways = {
        "transformers, graphs": way(120.0, 4000.0, capture=3.0),
        "transformers, eager": way(40.0, 2000.0, capture=0.0),
    }
    (tmp_path / "graphs.json").write_text(json.dumps({"hardware": "NVIDIA H200", "figures": ways}))
    monkeypatch.setattr(graph_gain, "FOLDER", tmp_path)
    data = graph_gain.measure(machines(), quiet)
    names = ("transformers, graphs", "transformers, eager")
    assert graph_gain.gain(data, *names) == pytest.approx(3.0)
    assert graph_gain.share_left(data, *names, batch=64) == pytest.approx((1 / 2) / (2 / 3))
    assert graph_gain.seconds_per_size(data, names[0]) == pytest.approx(3.0 / 6)
    assert pd.isna(graph_gain.rate(data, "torch.compile"))


def test_intensity_of_a_prompt_by_hand() -> None:
    """A product of H by n H: 2 T n H^2 operations; 2 bytes for each of n H^2 weights and T (1 + n) H activations."""
    hidden, tokens = 5120, 1024
    found = intensity_by_operation(cost(), BatchShape(((tokens, 0),)))
    assert found["preproj"] == pytest.approx(3 * hidden * tokens / (3 * hidden + 4 * tokens))
    assert found["ffn"] == pytest.approx(4 * hidden * tokens / (4 * hidden + 5 * tokens))


def test_operations_add_up_to_the_iteration_and_products_split_by_weight() -> None:
    shape = BatchShape(((255, 512),), 17, 17 * 1000)
    seconds = seconds_by_operation(cost(), shape)
    assert tuple(seconds) == ORDER
    assert sum(seconds.values()) == pytest.approx(cost().predict(shape))
    assert seconds["preproj"] / seconds["postproj"] == pytest.approx(3)
    assert seconds["ffn"] / seconds["postproj"] == pytest.approx(8)


def test_fig4_leaves_out_what_was_not_measured() -> None:
    """The H200 was measured with up to 128 decodes: none beyond is drawn, and no claim about more of them is judged."""
    data, notes = data_of(fig4), list[str]()
    decodes = data[(data["panel"] == "decode") & (data["hardware"] == "h200")]
    assert decodes.groupby("series")["x"].max().to_dict() == dict.fromkeys(decodes["series"], 128)
    (claim,) = (claim for claim in read_claims("fig4") if claim.id == "h200-fig4-decode")
    assert not list(check([claim], machines(), fig4, data, notes.append))
    assert notes == ["left out: claim h200-fig4-decode, decodes near B = 256: the measurements do not cover it"]


def test_table2_adds_up_as_the_paper_does() -> None:
    def ms(series: str, column: str) -> float:
        return table2.milliseconds(data_of(table2), "a6000", series, column)

    for series in table2.SHAPES:
        assert ms(series, "total") == pytest.approx(ms(series, "linear") + ms(series, "attention"))
    assert ms("decode-only", "decode/token") == pytest.approx(ms("decode-only", "total") / 4)
    marginal = (ms("decode-maximal", "total") - ms("prefill-only", "total")) / 3
    assert ms("decode-maximal", "decode/token") == pytest.approx(marginal)
    lines = table2.draw(data_of(table2), read_claims("table2")).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")][3] == "44.28 (44.28)"


def test_a_calendar_has_every_second_of_every_stage() -> None:
    executor = Calendar(make_cost(Topology(pipeline_stages=2)))
    engine = make_engine(Orca(), executor)
    engine.submit([Request(index, 5 + 7 * index, 3 + index) for index in range(7)])
    engine.run()
    accounts = executor.accounts()
    for stage in (0, 1):
        intervals = [interval for interval in executor.intervals if interval.stage == stage]
        ends = [interval.begin + interval.milliseconds for interval in intervals]
        assert intervals[0].begin == 0
        assert [interval.begin for interval in intervals[1:]] == pytest.approx(ends[:-1])
        for kind in ("compute", "pb1", "pb2", "pb3"):
            total = sum(interval.milliseconds for interval in intervals if interval.doing == kind)
            assert total == pytest.approx(1e3 * getattr(accounts[stage], kind)), kind


def test_fig12_is_of_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, links = PROFILES / "aiconfigurator" / "a100_sxm", PROFILES / "vidur" / "network" / "a100_dgx"
    if not (tables.exists() and links.exists()):
        pytest.skip(f"the published timings are not in {PROFILES}")
    monkeypatch.setattr(fig12, "NUM_REQUESTS", 300)
    data = fig12.measure(Machines(str(tables), str(links)), quiet)
    assert set(data.loc[data["panel"] == "bubbles", "series"]) == {"TP8-PP8, Orca", "TP8-PP8, Sarathi"}
    assert data.groupby(["series", "panel"])["value"].apply(lambda values: values.is_monotonic_increasing).all()
    ends_of = data[data["panel"] == "ends"].groupby("series")["value"].max()
    assert fig12.time_over(data, "tp", "sarathi") == ends_of["8 x TP8, Orca"] / ends_of["TP8-PP8, Sarathi"]
