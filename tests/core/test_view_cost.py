"""What `view.cost` predicts with where tokens are real: measurements of this machine, or a profile that is announced."""

import csv
import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from shutil import copy
from types import SimpleNamespace

import numpy as np
import pytest
from commands import command, summary

from cbatch import BatchShape, CbatchError, ModelSpec
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import PROFILES, load_profile
from experiments import api
from experiments.profile import command as profile_command
from experiments.profile import host, laboratory
from experiments.profile.laboratory import Batch, Laboratory
from experiments.settings import hardware
from experiments.settings import settings as settings_module
from experiments.settings.compose import compose_run
from experiments.settings.hardware import cpu_name, cpu_profile
from experiments.setup.presets import load_spec

TINY = load_spec("tiny")
SMALL = ("workload.num_requests=3", "workload.length=40", "timeline=off")
ASKS = "policy=asks.Asks"

POLICY = """
from cbatch import BatchShape
from policies.orca import Orca

class Asks(Orca):
    def plan(self, view):
        plan = super().plan(view)
        seconds = view.cost.predict(BatchShape((), 2, 60))
        plan.note = repr(seconds)
        if seconds < 2e-4:  # as on an H200
            plan.pad_to = 512
        return plan
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy that asks, and a home without measurements. Measuring is quick, and reads hand-made times, however busy the CPU."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profile_command, "QUICK", {"max_tokens": 32, "longest": 64})
    monkeypatch.setattr(host, "NEW", 4)
    for name, value in (("WARM_UP_SECONDS", 0.0), ("SETTLED_SECONDS", 0.0), ("MOST_SECONDS", 0.0)):
        monkeypatch.setattr(laboratory, name, value)
    timed = Laboratory._intervals
    monkeypatch.setattr(Laboratory, "_intervals", lambda self, batch: (timed(self, batch), [seconds_of(batch)])[1])
    (tmp_path / "asks.py").write_text(POLICY)
    return tmp_path


def seconds_of(batch: Batch) -> float:
    """A millisecond, 10 us per token, 100 us per request, 1 us per context token of decodes and 10 ns per pair of tokens in prompts."""
    pairs = sum(tokens * (before + (tokens + 1) / 2) for tokens, before in batch.chunks)
    counts = sum(batch.num_tokens), len(batch.ends), sum(batch.decodes), pairs
    return 1e-3 + float(np.dot(counts, (1e-5, 1e-4, 1e-6, 1e-8)))


def run(folder: Path, *keys: str, backend: str = "cpu") -> str:
    done = command("run", f"backend={backend}", *SMALL, *keys, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def predicted(run_folder: Path) -> set[float]:
    with (run_folder / "steps.csv").open(newline="") as file:
        return {float(row["note"]) for row in csv.DictReader(file)}


def on_h200() -> float:
    return ProfileCost(load_profile("h200"), TINY).predict(BatchShape((), 2, 60))


@pytest.mark.long
def test_a_policy_that_asks_needs_a_measured_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with one line that names the command, before a model is built; with its profile the same run succeeds."""
    file, keys = cpu_profile(TINY), ("backend=cpu", *SMALL, ASKS, "output=a")
    ended = command("run", *keys, cwd=folder)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and not file.exists()
    assert "this machine's CPU was not measured with model=tiny; " in ended.stderr
    assert not ended.stdout and not (folder / "a").exists()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(api, "serve_settings", lambda *_, **__: pytest.fail("a model is built"))
    with pytest.raises(CbatchError, match="this machine's CPU was not measured with model=tiny; "):
        api.serve("asks.Asks", backend="cpu", model="tiny", requests=3, length=40)
    [measure] = re.findall(r"python -m experiments\.(profile cpu model=\w+)", ended.stderr)
    assert command(*measure.split(), cwd=folder).returncode == 0
    done = command("run", *keys, cwd=folder)
    assert done.returncode == 0
    profile = load_profile(str(file))
    assert f"view.cost predicts with profile {profile.name} ({profile.error})" in done.stdout.splitlines()
    assert re.fullmatch(r"\d+ batches of this measurement: [\d.]+% off \(median\), [\d.]+% at most", profile.error)
    (seconds,) = predicted(folder / "a")
    assert seconds == pytest.approx(1e-3 + 2 * 1e-5 + 2 * 1e-4 + 60 * 1e-6, rel=1e-3), "two decodes, 60 context tokens"
    written = json.loads(file.read_text())
    assert written["hardware"] == cpu_name() and "cores" in written["hardware"]
    assert "model=tiny backend=cpu batch=16 max_tokens=32" in written["models"]["tiny"]["from"]
    assert f"torch {version('torch')}" in written["models"]["tiny"]["from"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert summary(folder / "a")["about"]["execution"]["predictions"]["hardware"] == cpu_name()
    run(folder, "hardware=cpu", "model=tiny", "policy=orca", "output=s", backend="sim")
    about = summary(folder / "s")["about"]
    assert about["hardware"] == cpu_name() and about["execution"]["not_measured"] == []


def test_a_measurement_names_keys_and_files_it_cannot_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = command("profile", "cpu", "batch=3", cwd=folder).stderr.splitlines()
    assert line == "error: batch: has no effect on a profile cpu, which takes model; leave it out"
    monkeypatch.setenv("HOME", str(folder / "asks.py"))
    [line] = command("profile", "cpu", cwd=folder).stderr.splitlines()
    assert line.startswith(f"error: {folder / 'asks.py/.cache'}")


def test_an_interrupted_measurement_leaves_the_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cpu_profile(TINY)
    file.parent.mkdir(parents=True)
    file.write_text("earlier")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.profile.command.measure", interrupt)
    ended = command("profile", "cpu", cwd=folder)
    left = ended.returncode, file.read_text(), len([*file.parent.iterdir()])
    assert left == (130, "earlier", 1), ended


@pytest.mark.long
def test_a_replay_predicts_with_the_cpu_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("profile", "cpu", cwd=folder).returncode == 0
    run(folder, ASKS, "decisions=true", "output=a")
    monkeypatch.setenv("HOME", str(folder / "elsewhere"))  # another machine, which has measured nothing
    done = command("replay", "a", cwd=folder)
    assert done.returncode == 0 and done.stdout.startswith("a: Asks makes the same"), done
    copy(PROFILES / "h200.json", folder / "a/profile.json")
    assert command("replay", "a", cwd=folder).returncode == 1, "other predictions, other plans"
    (folder / "a/profile.json").unlink()
    done = command("replay", "a", cwd=folder)
    assert done.returncode == 1 and "view.cost: this machine's CPU was not measured with model=tiny; " in done.stdout


def test_another_machines_profile_is_announced(folder: Path) -> None:
    printed = run(folder, ASKS, "hardware=h200", "output=a")
    assert f"view.cost=h200 (predictions are for NVIDIA H200, 141 GB, this is {cpu_name()})" in printed
    assert predicted(folder / "a") == {on_h200()}
    assert summary(folder / "a")["about"]["execution"]["predictions"]["hardware"] == "NVIDIA H200, 141 GB"
    assert "view.cost predicts with profile h200 (" in printed
    assert "view.cost" not in run(folder, "policy=orca"), "with its own measurements there is nothing to say"
    assert "view.cost predicts" not in run(folder, "policy=orca", "hardware=h200"), "which asks for no prediction"


@pytest.mark.parametrize(("errors", "warns"), [([0.02, 0.05, 0.9], False), ([0.01, 0.25, 0.888], True)])
def test_a_disturbed_measurement_of_the_cpu_warns_and_states_its_error(
    errors: list[float], warns: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while other programs run: a median of 25%. One batch alone that is far off may be chance."""

    def measured(spec: ModelSpec, batches: object, limits: object, backend: str, output: str, report: object) -> object:
        copy(PROFILES / "h200.json", output)
        return Path(output), np.array(errors)

    monkeypatch.setattr(profile_command, "_measure_model", measured)
    done = command("profile", "cpu", cwd=folder)
    assert done.returncode == 0 and ("warning: predictions are 25.0% off (median); " in done.stdout) == warns
    off = f"{errors[1]:.1%} off (median), {errors[2]:.1%} at most"
    assert load_profile(str(cpu_profile(TINY))).error == f"3 batches of this measurement: {off}"


def test_measurements_hold_for_one_shape_of_a_model_and_one_number_of_threads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cpu_profile(TINY)
    assert cpu_profile(replace(TINY, seed=1)) == file, "the values of weights take no time"
    assert cpu_profile(replace(TINY, num_layers=4)) != file
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu_profile(TINY) != file


@pytest.mark.parametrize(
    ("card", "keys", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", (), "h100"),
        ("NVIDIA H200", (), "h200"),
        ("NVIDIA H100 PCIe", (), "h200"),  # another card, without a profile
        ("NVIDIA H100 80GB HBM3", ("hardware=h200",), "h200"),
        ("NVIDIA H100 80GB HBM3", ("experiment=fig9",), "a6000-llama-13b"),
        ("NVIDIA H100 80GB HBM3", ("backend=sim",), "h200"),
    ],
)
def test_policies_on_a_gpu_predict_with_its_own_profile(
    card: str, keys: tuple[str, ...], profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = SimpleNamespace(cuInit=lambda _: 0, cuDeviceGet=lambda device, _: 0)  # libcuda with one GPU
    driver.cuDeviceGetName = lambda text, size, device: setattr(text, "value", card.encode())
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda _: driver)
    settings = compose_run("backend=cuda", *keys) if "backend=sim" not in keys else compose_run(*keys)
    assert settings.hardware == settings.composed.keys["hardware"] == profile, "a replay reads the keys"
    assert ("hardware" in settings.chosen) == (not keys and card != "NVIDIA H100 PCIe")


def test_a_profile_of_the_gpu_without_links_leaves_predictions_of_several_to_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "profile_of_gpu", lambda: "h200-vllm")  # measured on one GPU
    assert compose_run("backend=cuda").hardware == "h200-vllm"
    assert compose_run("backend=cuda", "backend.tensor_parallel=2").hardware == "h200"
