"""`experiments.profile card`: the speed of one card against a profile, in the file and in the runs that use it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cbatch import BatchShape, ConfigError, KVSize, Limits, Server, Step, StepResult
from cbatch.cost import NO_COST
from cbatch.sim import ProfileCost, load_profile
from cbatch.sim.profile import Card
from experiments.api import simulate
from experiments.profile import card
from experiments.profile.__main__ import main
from experiments.profile.machine import Machine
from experiments.settings.backends import Cuda
from experiments.setup.presets import load_spec

SPEC = load_spec("llama-3.1-8b")
SLOW = Card("Some GPU 12ab34cd", 1.05, 0.98, 1.5)
H100 = load_profile("h100")


class OtherCard:
    """An executor whose iterations take what the profile says, at the speed of another card, and now and then longer.

    Its host launches a decode in 1 ms, a prompt from a graph in 3 ms, and a prompt without one in 1.5 times the profile's 29.79 ms, beyond the decode's.
    """

    num_stages, needs_tokens = 1, True
    busier = 0.0
    """Seconds by which a launch without a graph takes longer once 50 iterations have been launched."""

    def __init__(self) -> None:
        self.clock, self.host, self.number = 0.0, 0.0, 0
        self.cost = ProfileCost(replace(H100, card=SLOW), SPEC, max_batch=card.LIMITS["batch"])

    def launch(self, step: Step) -> StepResult:
        started, self.number = self.clock, self.number + 1
        shape = step.shape()
        eager = 0.044685 + (self.busier if self.number > 50 else 0.0)
        self.host += 0.001 + (eager if shape.num_tokens > 2048 else 0.002 if shape.chunks else 0.0)
        self.clock += self.cost.predict(step.shape()) * (1.5 if self.number % 7 == 0 else 1.0)
        return StepResult(None, started, self.clock)

    def now(self) -> float:
        return self.host

    def ready_at(self) -> float:
        return 0.0

    def wait(self, in_flight: StepResult) -> StepResult:
        return in_flight

    def close(self) -> None:
        pass


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that the command writes on a machine with that card."""

    def build(backend: str, spec: Any, *, batch: int, max_tokens: int, longest: int) -> Machine:
        server: Any = Server(OtherCard(), Limits(batch, max_tokens, longest, tile=128), NO_COST, KVSize(3000, 128))  # type: ignore[type-var]
        return Machine("Some GPU", server, (1, 64), (128, 2048), "")

    monkeypatch.setattr(card, "build", build)
    monkeypatch.setattr(card, "hardware_name", lambda backend: H100.hardware)
    monkeypatch.setattr(card, "card_name", lambda: SLOW.name)
    path = tmp_path / "slow.json"
    assert main(["card", f"output={path}"]) == 0
    return path


def test_the_command_finds_the_factors_of_a_card(file: Path) -> None:
    assert json.loads(file.read_text())["card"]["name"] == SLOW.name
    found, alone = load_profile(str(file)), load_profile("h100")
    assert (found.card.prompts, found.card.decodes) == pytest.approx((1.05, 0.98), abs=1e-3)
    assert found.card.launches == 1.5
    assert (found.models, found.host, found.error, found.name) == (alone.models, alone.host, alone.error, "h100")
    assert found.origin("card").startswith(
        "measured by python -m experiments.profile card model=llama-3.1-8b hardware=h100"
    )


@pytest.mark.parametrize(("busier", "factor"), [(0.004, 1.5 * (1 + 0.002 / 0.044685)), (0.005, 1.0), (-0.005, 1.0)])
def test_launches_that_other_work_makes_longer_or_shorter_keep_the_time_of_the_profile(
    busier: float, factor: float, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """44.7 ms first, then 48.7 (9% more: the mean counts), 49.7 (11%) or 39.7."""
    monkeypatch.setattr(OtherCard, "busier", busier)
    assert load_profile(str(request.getfixturevalue("file"))).card.launches == pytest.approx(factor, abs=1e-3)


def test_a_run_has_the_speed_of_the_card_in_its_file_and_says_so(file: Path) -> None:
    keys = {"batch": 16, "hardware": str(file), "requests": 40}
    run, own = simulate("sarathi", **keys), simulate("sarathi", **keys | {"hardware": "h100"})
    factors = "prompts x1.050, decodes x0.980, launches without a graph x1.500"
    assert f"SIMULATED with profile h100 at the speed of Some GPU 12ab34cd: {factors}" in str(run)
    assert "at the speed" not in str(own)
    seconds = [(result.steps["ended"] - result.steps["started"]).to_numpy() for result in (run, own)]
    with_prompts = own.steps["num_prefill_tokens"].to_numpy() > 0
    assert seconds[0][with_prompts].sum() / seconds[1][with_prompts].sum() == pytest.approx(1.05, abs=0.005)


def test_a_file_with_factors_of_iteration_times_alone_has_the_launches_of_its_profile(file: Path) -> None:
    content = json.loads(file.read_text())
    del content["card"]["launches"]
    file.write_text(json.dumps(content))
    assert load_profile(str(file)).host_time(True, SPEC) == H100.host_time(True, SPEC)


@pytest.mark.parametrize(
    ("shape", "factor"), [(BatchShape(((500, 100),), 7, 700), 1.05), (BatchShape((), 7, 700), 0.98)]
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-13b"])  # measured, and estimated
def test_factors_scale_every_part_of_an_iteration(model: str, shape: BatchShape, factor: float) -> None:
    slow, own = (ProfileCost(profile, load_spec(model)) for profile in (replace(H100, card=SLOW), H100))
    assert slow.predict(shape) == pytest.approx(factor * own.predict(shape), rel=1e-4)
    for part, of_own in zip(slow.parts(shape), own.parts(shape), strict=True):
        assert part == pytest.approx(factor * of_own, rel=1e-3)


def test_a_gpu_is_not_predicted_at_the_speed_of_another_card(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.settings.backends.card_name", lambda: "Some GPU 99999999")
    with pytest.raises(ConfigError, match="was fitted to Some GPU 12ab34cd, but this is Some GPU 99999999"):
        Cuda().cost(str(file), SPEC, 16)
    monkeypatch.setattr("experiments.settings.backends.card_name", lambda: SLOW.name)
    assert Cuda().cost(str(file), SPEC, 16).profile.card.prompts == pytest.approx(1.05, abs=1e-3)


def test_a_profile_of_another_kind_or_without_the_model_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["card", "model=yi-34b"]) == 2
    assert "hardware=h100 has no tables of model=yi-34b; give model=llama-3.1-8b" in capsys.readouterr().err
    monkeypatch.setattr(card, "hardware_name", lambda backend: "NVIDIA A10")
    assert main(["card"]) == 2
    assert "there is no profile of NVIDIA A10; give hardware=NAME" in capsys.readouterr().err
