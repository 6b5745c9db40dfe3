"""The end results that SARATHI prints, predicted from the single-iteration times that it prints (LLaMA-13B on an A6000)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from cbatch import BatchShape
from cbatch.errors import ConfigError
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile import PROFILES, load_profile
from experiments.bench.presets import load_spec
from experiments.paper import __main__ as command
from experiments.paper import a6000, claims
from experiments.paper.claims import Claim, Verdict, read_claims, table
from experiments.paper.closure import check
from experiments.paper.quantities import QUANTITIES
from experiments.paper.steady import COUNTED, WARM_UP, Load, SteadyState, closed_form_gain

CLAIMS = read_claims("closure", QUANTITIES)


@cache
def at_hand() -> SteadyState:
    return SteadyState(ProfileCost(load_profile(a6000.NAME), load_spec(a6000.MODEL)))


@pytest.mark.parametrize("claim", [claim for claim in CLAIMS if claim.hardware == "a6000"], ids=lambda claim: claim.id)
def test_a_printed_result_is_met(claim: Claim) -> None:
    (verdict,) = check([claim], {"a6000": at_hand()})
    if not claim.tested:
        assert claim.note and not verdict.holds, "a claim is left out only where it cannot hold, and the note says why"
    assert not verdict.failed, f"{claim.where}: {claim.asked}, simulated {verdict.value:.3f}"


def test_every_end_result_of_the_13b_model_is_among_the_claims() -> None:
    asked = {claim.id for claim in CLAIMS if claim.tested}
    assert {"table4-13b-1k", "table4-13b-2k", "table4-13b-3k", "fig9-c256", "fig9-c512", "fig9-c256-peak", "fig9-c512-peak",
            "fig11-1k", "fig11-2k", "fig11-3k", "fig11-orca-best", "fig11-orca-worst", "fig13-c128"} <= asked  # fmt: skip
    assert all(claim.within is None or claim.within <= 0.06 for claim in CLAIMS if claim.hardware == "a6000")


def test_the_profile_is_what_the_printed_numbers_give() -> None:
    assert json.loads((PROFILES / f"{a6000.NAME}.json").read_text()) == json.loads(json.dumps(a6000.profile()))


def test_the_profile_gives_back_the_iterations_that_are_printed() -> None:
    """Table 2: linear and attention milliseconds of a prompt, of decodes, and of both."""
    parts = at_hand().cost.parts
    for shape, linear, attention in (
        (BatchShape(((1024, 0),)), 224.8, 10.0),
        (BatchShape((), 4, 4096), 44.28, 5.68),
        (BatchShape(((1021, 0),), 3, 3072), 223.2, 15.2),
    ):
        assert parts(shape).linear * 1e3 == pytest.approx(linear, rel=0.01)
        assert parts(shape).attention * 1e3 == pytest.approx(attention, rel=0.01)


def test_a_steady_state_repeats_whatever_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(1024, 18, 14)
    once = at_hand().gain("sarathi", load)
    monkeypatch.setattr("experiments.paper.steady.WARM_UP", WARM_UP + 2)
    monkeypatch.setattr("experiments.paper.steady.COUNTED", COUNTED + 3)
    assert SteadyState(at_hand().cost).gain("sarathi", load) == pytest.approx(once, rel=1e-3)


@pytest.mark.parametrize(("length", "batch", "pd_ratio"), [(1024, 18, 14.06), (2048, 10, 27.44), (3072, 6, 50.2)])
def test_runs_and_the_steady_state_by_hand_agree(length: int, batch: int, pd_ratio: float) -> None:
    load = Load(length, batch, pd_ratio)
    assert at_hand().gain("sarathi", load) == pytest.approx(closed_form_gain(at_hand().cost, load, 256), rel=0.02)


def test_the_order_of_the_schemes() -> None:
    gains = [
        at_hand().gain(scheme, Load(1024, 18, 14.06)) for scheme in ("baseline", "orca_worst", "orca_best", "sarathi")
    ]
    assert gains[0] == pytest.approx(gains[1], abs=0.005)
    assert gains[1] < gains[2] < gains[3]


def test_a_claim_holds_or_fails_by_what_it_asks() -> None:
    def claim(**asked: float) -> Claim:
        return Claim(id="c", where="there", hardware="a6000", quantity="gain", setting={}, **asked)

    assert claim(printed=1.0, within=0.06).holds(1.059) and not claim(printed=1.0, within=0.05).holds(1.06)
    assert claim(printed=20.0, share=0.1).holds(22.0) and not claim(printed=20.0, share=0.1).holds(22.1)
    assert claim(at_least=1.0, at_most=2.0).holds(2.0) and not claim(at_least=1.0).holds(0.9)
    failing = Verdict(claim(at_least=1.0), 0.5)
    assert failing.failed and "no" in table([failing])


def test_claims_that_cannot_be_checked_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    (tmp_path / "c.yaml").write_text("- {id: x, where: y, quantity: gian, at_least: 1}")
    with pytest.raises(ConfigError, match="claim x: quantity gian is unknown; known: gain"):
        read_claims("c", QUANTITIES)
    (tmp_path / "c.yaml").write_text("- {id: x, where: y, quantity: gain}")
    with pytest.raises(ConfigError, match="claim x asks for nothing"):
        read_claims("c", QUANTITIES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["clousre"], "command 'clousre' is unknown; did you mean closure?"),
        (["closure", "table=x"], "table=x: closure has no such option; known: tables, folder"),
        (["served"], "served needs tables=..."),
        (["closure", "tables"], "option 'tables' is not of the form key=value"),
        (["fig12", "tables=/nowhere", "links=/nowhere"], "hardware=/nowhere: no such profile"),
        (["fig12", "tables=x", "links=y", "step=0"], "step=0: give a whole number, at least 1"),
        (["served", "tables=/nowhere"], "requests.jsonl.gz: cannot read the run"),
    ],
)
def test_wrong_commands_are_answered_in_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1
