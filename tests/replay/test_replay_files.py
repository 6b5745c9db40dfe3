"""Files of decisions, and the command that replays a run from its folder."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import QUICK, Ended, command
from contended import LIMITS, requests, simulated
from test_replay import ask, make, num_plans, record

from cbatch import SLO, Plan, Policy, PolicyError, Request, RequestSpec, View
from cbatch.arrivals import Listed
from cbatch.errors import ReplayError, ResultsError
from cbatch.replay.decisions import Recorded
from cbatch.request import spec_of
from experiments.settings import backends
from experiments.settings.groups import CONFIG_FOLDER
from experiments.store.decisions_file import DecisionsWriter, read_decisions, write_decisions
from experiments.store.run_folder import DECISIONS
from experiments.workloads import TraceReplay
from policies.orca import Orca


def write(path: Path, policy: Policy) -> None:
    engine, chosen = make(policy, simulated()), requests()
    engine.submit(chosen)
    with write_decisions(path, [engine], ["policy=orca", "chunk=8"]):
        engine.run()


def test_an_attribute_that_json_cannot_hold_is_an_error_in_one_line(tmp_path: Path) -> None:
    engine = make(Orca(), simulated())
    for value in ({1, 2}, iter(())):
        refused = pytest.raises(ResultsError, match=r"request 7: extra cannot be written as JSON .*decisions=false$")
        chosen = [Request(7, 4, 2, extra={"own": value})]
        engine.attach(Listed(chosen))
        with refused, write_decisions(tmp_path / "file", [engine], []):
            pass


def test_a_file_holds_all_that_following_needs(tmp_path: Path) -> None:
    """Also as far as it goes, if it was cut off."""
    write(path := tmp_path / "file", Orca())
    [file], recorded = read_decisions(path), record(make(Orca(), simulated()), requests())
    assert file.recorded == recorded and file.overrides == ["policy=orca", "chunk=8"] and not file.cut
    assert all(followed.same for followed in ask(Orca(), file.recorded, file.requests))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    [file] = read_decisions(path)
    heard = ask(Orca(), file.recorded, file.requests)
    assert file.cut
    assert 10 < len(heard) < num_plans(recorded) and all(followed.same for followed in heard)


def test_what_was_decided_before_a_failure_is_in_the_file(tmp_path: Path) -> None:
    class Failing(Orca):
        def plan(self, view: View) -> Plan:
            return super().plan(view) if view.iteration < 7 else 1 / 0  # type: ignore[return-value]

    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        write(tmp_path / "file", Failing())
    [file] = read_decisions(tmp_path / "file")
    heard = ask(Orca(), file.recorded, file.requests)
    assert heard[-1].recorded.iteration == 6 and all(followed.same for followed in heard)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file; record a run's decisions with decisions=true"),
        (b"hello", "cannot be read"),
        *(
            (gzip.compress(line + b"\n", mtime=0), "file")  # pytest-xdist needs the same ids in each process
            for line in (b"[]", b"{", b'{"plan": 3}', b'{"request": {"id": 0}}', b"3")
        ),
    ],
)
def test_files_that_hold_something_else_are_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content:
        path.write_bytes(content)
    with pytest.raises(ReplayError, match=says) as caught:
        read_decisions(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_without_its_command_line_is_refused(tmp_path: Path) -> None:
    write(path := tmp_path / "file", Orca())
    text = gzip.decompress(path.read_bytes()).replace(b'"overrides": ["policy=orca", "chunk=8"]', b'"overrides": null')
    path.write_bytes(gzip.compress(text))
    with pytest.raises(ReplayError, match=r"overrides.*record the run again"):
        read_decisions(path)


def test_recorded_requests_are_served_again_with_their_true_lengths(tmp_path: Path) -> None:
    """As vLLM's: its requests end by themselves, out of the order of their arrival, and one gets no token."""
    more: dict[str, Any] = {"client": "a", "session": "chat", "tier": "batch", "priority": -2, "stop_tokens": (1,)}
    more |= {"slo": SLO(1.0, 0.05, 4.0), "predicted_new_tokens": 7, "prefix_hashes": (11, 12)}
    specs = [RequestSpec(id_, 5 + 2 * id_, 30, arrival_time=time) for id_, time in ((1, 2.5), (2, 4.0))]
    specs = [RequestSpec(0, 5, 30, arrival_time=2.0, **more), *specs]
    writer = DecisionsWriter(tmp_path / DECISIONS)
    writer.begin(Recorded(LIMITS, 9, 4))
    for spec in specs:
        writer.request(spec)
    for id_, length in ((2, 30), (1, 0), (0, 11)):
        writer.finish(id_, length)
    writer.close()
    [file] = read_decisions(tmp_path / DECISIONS)
    assert [spec_of(request) for request in file.requests] == specs, "all that was asked for"
    first, last = TraceReplay(path=str(tmp_path / DECISIONS)).requests(None)
    assert (first.client, first.slo, first.max_new_tokens, first.arrival_time) == ("a", specs[0].slo, 30, 0.0)
    assert first.prefix_hashes == (11, 12)
    assert (last.num_prompt_tokens, last.arrival_time) == (9, 2.0)
    assert [spec_of(request).true_new_tokens for request in (first, last)] == [11, 30]


SENSITIVE = """
from cbatch import BatchShape
from policies.orca import Orca

class Sensitive(Orca):
    # pads by digits of a prediction: whatever changes it changes the plans
    def __init__(self, chunk=0):
        self.chunk = chunk

    def plan(self, view):
        plan = super().plan(view)
        if plan.requests:
            nanoseconds = 1e9 * view.cost.predict(BatchShape(((200, 1000), (30, 0)), 3, 900))
            plan.pad_to = sum(plan.num_tokens) + self.chunk + int(nanoseconds) % 97
        return plan
"""
OWN = "policy=sensitive.Sensitive"
BOTH = ("backend.tensor_parallel=2", "backend.pipeline_stages=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sensitive.py").write_text(SENSITIVE)
    monkeypatch.setattr(backends, "count_gpus", lambda: 0)  # backend=auto simulates
    return tmp_path


def replay_of(folder: Path, *settings: str) -> Ended:
    """Makes a run of these settings and replays it."""
    made = command("run", *settings, *QUICK, "decisions=true", "output=run", "timeline=off", cwd=folder)
    assert made.returncode == 0, made.stderr
    return command("replay", "run", cwd=folder)


@pytest.mark.parametrize(
    "settings",
    [
        ("backend=sim", "batch=6", *BOTH),
        ("backend=auto", "batch=20"),
        ("backend=sim", "hardware=a6000-llama-13b", "model=llama-13b"),
        ("backend=cpu", "hardware=h200", *BOTH),
    ],
    ids=" ".join,
)
def test_a_replay_predicts_as_the_run_did(folder: Path, settings: tuple[str, ...]) -> None:
    replayed = replay_of(folder, OWN, *settings)
    assert replayed.returncode == 0, replayed
    num_iterations = json.loads((folder / "run" / "summary.json").read_text())["run"]["iterations"]
    [num_plans] = re.findall(r" makes the same (\d+) plans\n", replayed.stdout)
    assert f"not iterations of the run: {int(num_plans) - num_iterations}\n" in replayed.stdout
    path = folder / "run" / "config.yaml"
    changed = yaml.safe_load(path.read_text())
    changed["model"]["num_layers"] *= 2
    path.write_text(yaml.safe_dump(changed))
    replayed = command("replay", "run", cwd=folder)
    assert replayed.returncode == 1 and "Sensitive decides differently at " in replayed.stdout, (
        "it notices other predictions"
    )


@pytest.mark.long
def test_a_replay_finds_the_settings_of_the_runs_config_dir(folder: Path) -> None:
    """Its own policy with other arguments, with another policy, and after the folder was moved."""
    own = folder / "my_conf"
    for group, name, text in (
        ("policy", "mine", "_target_: sensitive.Sensitive\nchunk: ${chunk}"),
        ("model", "small", (CONFIG_FOLDER / "model" / "tiny.yaml").read_text()),
        ("backend", "two", "_target_: experiments.settings.backends.Simulated\ntensor_parallel: 2"),
    ):
        (own / group).mkdir(parents=True)
        (own / group / f"{name}.yaml").write_text(text)
    settings = ("--config-dir", "my_conf", "policy=mine", "model=small", "backend=two")
    assert (replayed := replay_of(folder, *settings)).returncode == 0, replayed
    about = json.loads((folder / "run" / "summary.json").read_text())["about"]
    assert about["policy"] == f"Sensitive(chunk={about['chunk']})"
    for changed in ("policy=orca", "chunk=64"):
        assert (replayed := command("replay", "run", changed, cwd=folder)).returncode == 1, replayed
    assert command("replay", "run", "policy=mine", cwd=folder).returncode == 0
    own.rename(folder / "moved")
    refused = command("replay", "run", "chunk=64", cwd=folder)
    assert refused.stderr == f"error: --config-dir={own}: no such folder; give the one that holds your groups\n"
    assert command("replay", "--config-dir", "moved", "run", "chunk=64", cwd=folder).returncode == 1


@pytest.mark.long
def test_another_policy_leaves_out_the_arguments_of_the_recorded_one(folder: Path) -> None:
    """While an argument alone replaces that argument."""
    assert replay_of(folder, OWN, "+policy.chunk=3", "backend=sim").returncode == 0
    assert "Orca decides differently" in command("replay", "run", "policy=orca", cwd=folder).stdout
    assert command("replay", "run", "+policy.chunk=4", cwd=folder).returncode == 1
