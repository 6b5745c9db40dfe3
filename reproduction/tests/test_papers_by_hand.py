"""What figures measure, by hand: steady states, operations, and pipelines."""

import json
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
from places import ROOT
from small_cluster import make_cost, make_engine

from cbatch import BatchShape, Request
from cbatch.model.topology import Topology
from cbatch.sim import Profile
from cbatch.sim.cost import ProfileCost
from policies.chunking import TileAligned
from policies.chunking.steady_state import steady_state_seconds
from policies.orca import Orca
from policies.sarathi import Sarathi
from reproduction.papers.claims import Claim, Verdict, read_claims
from reproduction.papers.figures import later_summary as later
from reproduction.papers.figures.fig5 import Calendar
from reproduction.papers.figures.later_summary import CHUNKS
from reproduction.papers.machines import LARGEST_BATCH, Machines
from reproduction.papers.operations import ORDER, intensity_by_operation, seconds_by_operation
from reproduction.papers.steady import Load, seconds_per_request


@cache
def machines() -> Machines:
    return Machines()


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
    """By hand an iteration takes what it takes after its like: the H200's clock, which follows the power, is left out of both."""
    cost, load = cost_of(name), Load(1024, 18, pd_ratio)
    run = seconds_per_request(cost, Sarathi(TileAligned(total)), load)
    prompt = load.length - load.output
    assert steady_state_seconds(cost, total, load.batch, prompt, load.output) == pytest.approx(run, rel=0.01)


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


def test_the_later_summary_is_judged_row_by_row() -> None:
    """Its formula; a prompt alone, whole and in chunks, on the profile of today; and a stored line with a verdict for each row."""
    nothing = pd.DataFrame()
    assert (
        later.optimum(nothing, 2048, 128.0)
        == 512
        == min(CHUNKS, key=lambda c: later.objective(nothing, 2048, 128.0, c))
    )
    idle = pd.DataFrame(later._alone("h100", "h100"))
    stored = json.loads((ROOT / "reproduction/results/paper/later_summary.json").read_text())["claims"]
    ours = {row["id"]: row["ours"] for row in stored}
    claims = read_claims("later_summary")
    assert ours.keys() == {claim.id for claim in claims}
    for claim in [claim for claim in claims if claim.setting.get("study") == "idle"]:
        alone = later.over_whole(idle, "h100", **claim.setting)
        assert alone == pytest.approx(ours[claim.id], rel=1e-3) and alone < 1.001
    page = (ROOT / "reproduction/results/paper/later_summary.md").read_text()
    words = [line.split("|")[5].strip() for line in page.splitlines()[2:] if line.startswith("|")]
    assert len(words) == len(claims) and {*words} == {*later.WORDS.values(), *later.STATED}
    queued = Claim(
        id="c", figure="", where="", quantity="", printed=2.0, share=0.1, at_least=1.0, note="only under queueing: so"
    )
    verdicts = [later.word_of(Verdict(queued, value)) for value in (2.0, 1.2, 0.9)]
    assert verdicts == ["only under queueing", "only under queueing", "does not hold"]
