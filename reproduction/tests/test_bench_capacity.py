"""Capacities with real tokens: the rates to serve, what a card's speed corrects, and the crossing between served rates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_fidelity import trace as trace

from cbatch import Limits, Server
from cbatch.kv import KVSize
from cbatch.request_spec import SLO
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import load_profile
from experiments.profile.machine import Machine
from experiments.setup.presets import load_spec
from reproduction.validation import capacity
from reproduction.validation import runs as kept_runs
from reproduction.validation.__main__ import main
from reproduction.validation.cases import Case, workload
from reproduction.validation.compare import cost_of, pair, speed_of
from reproduction.validation.runs import ServedRun
from reproduction.validation.serve import serve

PROFILE = load_profile("h200")
QUEUED = Case("card, queued", "llama-3.1-8b", 16, 2048, ("orca", "vtc", "sarathi_serve, 512 tokens"), 40)
SLOW = Card("slow", 1.06, 1.08)
"""Iterations with prompts take 6% longer than the profile says, decodes alone 8%."""


def machine(speed: Card) -> Machine:
    cost = cost_of(ServedRun({"model": QUEUED.model, "batch": 16}, {}, {}), replace(PROFILE, card=speed))
    server = Server(SimExecutor(cost, PROFILE.host_time(True)), Limits(16, 2048, 2048), cost, KVSize(256, 128))
    return Machine("NVIDIA H200", server, (), (), "none")


def served(case: Case, trace: str, speed: Card) -> list[ServedRun]:
    requests = workload(case, trace, None)
    return [serve(machine(speed), load_spec(case.model), case, policy, requests) for policy in case.policies]


def at(rate: float, load: float) -> Case:
    return replace(QUEUED, name=f"capacity, orca at {load:.0%}", policies=("orca",), load=load, rate=rate, slo=SLO(0.2))


@pytest.mark.long
def test_queued_runs_tell_the_speed_of_a_card_and_others_are_then_simulated_without_error(trace: str) -> None:
    speed = speed_of(served(QUEUED, trace, SLOW), PROFILE)
    assert (speed.prompts, speed.decodes) == pytest.approx((1.06, 1.08), abs=0.01)
    measured = Card("measured", 1.03, 1.2, 0.7)
    again = speed_of(served(QUEUED, trace, SLOW), replace(PROFILE, card=measured))  # corrects its factors of iterations
    assert (again.prompts, again.decodes, again.launches) == pytest.approx((1.06, 1.08, 0.7), abs=0.01)
    [run] = served(at(50.0, 0.9), trace, SLOW)
    plain, corrected = (pair(run, replace(PROFILE, card=used)).simulated["end to end mean"] for used in (Card(), speed))
    assert abs(corrected / run.figures["end to end mean"] - 1) < 0.01 < abs(plain / run.figures["end to end mean"] - 1)


def test_violations_are_linear_in_their_logarithm_between_two_rates() -> None:
    assert capacity.crossing([9, 10, 11], [1.0, 0.95, 0.8], 400, 0.9) == pytest.approx(10.5)  # 5%, 10%, 20%


@pytest.mark.long
def test_a_kept_run_on_each_side_gives_the_capacity(trace: str, tmp_path: Path) -> None:
    found = capacity.simulated_capacity(at(1.0, 1.0), trace, 0.9, PROFILE)
    cases = [QUEUED, at(0.9 * found, 0.9), at(1.1 * found, 1.1)]
    kept_runs.save(
        tmp_path / "a.npz", {"hardware": "NVIDIA H200"}, [run for case in cases for run in served(case, trace, Card())]
    )
    assert main(["capacity", f"measured={tmp_path / 'a.npz'}", f"folder={tmp_path}"]) == 0
    row = json.loads((tmp_path / "h200" / "capacity.json").read_text())["capacities"]["orca"]
    assert row["searched"] == pytest.approx(found)
    assert row["measured"] == row["profile"] == row["card"]
    assert row["measured"][0] >= 0.9 > row["measured"][1]
    assert 0.9 * found <= row["capacity, measured"] == row["capacity, card"] <= 1.1 * found
