"""A recorded run can be followed: the same views come up again, and any policy may say what it would have planned."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from commands import QUICK, Ended, command
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests, simulated
from tiny_models import LLAMA, greedy_references, make_executor

from cbatch import Engine, Executor, FinishReason, Plan, Policy, PolicyError, Request, View
from cbatch.errors import ReplayError, ResultsError
from cbatch.replay.counterfactual import STOP_TOKEN, Answer, Comparison, Recorded, replay
from cbatch.replay.decisions import Decided, Decision, Seen, StepEnd, record_decisions
from experiments.settings import backends
from experiments.settings.error_lines import CONFIG_FOLDER
from experiments.store.decisions_file import read_decisions, write_decisions
from policies.orca import Orca
from policies.prefill_first import PrefillFirst


def make(policy: Policy, executor: Executor, asynchronous: bool = True) -> Engine:
    size = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    return Engine(policy, executor, LIMITS, LinearCost(), **size, asynchronous=asynchronous)


def record(policy: Policy, executor: Executor, chosen: list[Request], asynchronous: bool = True) -> Recorded:
    engine = make(policy, executor, asynchronous)
    events: list[Decision | StepEnd] = []
    engine.submit(chosen)
    with record_decisions(engine, events.append) as recording:
        engine.run()
    assert engine.policy is policy and engine.executor is executor
    return Recorded(LIMITS, NUM_BLOCKS, BLOCK, 1, asynchronous, events, recording.take_times())


def ask(policy: Policy, recorded: Recorded, chosen: list[Request]) -> list[Comparison]:
    heard: list[Comparison] = []
    replay(recorded, chosen, policy, LinearCost(), heard.append)
    return heard


def num_plans(recorded: Recorded) -> int:
    return sum(isinstance(event, Decision) for event in recorded.events)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["orca", "sarathi_pd_aware", "vllm_v1_cost", "mlfq", "past_future"])
def test_a_policy_says_the_same_again(name: str, asynchronous: bool) -> None:
    recorded = record(POLICIES[name](), simulated(), requests(), asynchronous)
    heard = ask(POLICIES[name](), recorded, requests())
    assert len(heard) == num_plans(recorded) > 50
    assert all(followed.same for followed in heard)


@pytest.mark.parametrize("field", Decided._fields)
def test_plans_that_differ_in_anything_but_their_note_are_not_the_same(field: str) -> None:
    others = Decided(((0, 2),), (4,), ((5, "why"),), ((0, 8),), 16, 3.0, "note")
    plan = Decided(((0, 1),))
    recorded = Decision(7, Seen(0.0, 0, (), (), 9, 0), plan, ())
    compared = Comparison(recorded, Answer(plan._replace(**{field: getattr(others, field)}), ""))
    assert (compared.same, compared.same_but_reserves) == (field == "note", field == "reserve")


def test_a_run_of_real_tokens_is_followed_without_them() -> None:
    """End-of-sequence tokens shorten requests by surprise; where they came is all that is kept of the tokens."""
    references = greedy_references(LLAMA)[:12]

    def ask_for(stop_tokens: list[tuple[int, ...]]) -> list[Request]:
        return [
            reference.request(id_, 16, stop, arrival_iteration=id_)
            for id_, (reference, stop) in enumerate(zip(references, stop_tokens, strict=True))
        ]

    served = ask_for([(reference.output[id_],) for id_, reference in enumerate(references)])
    with closing(make_executor(LLAMA, LIMITS, NUM_BLOCKS, BLOCK)) as executor:
        recorded = record(PrefillFirst(), executor, served)
    followed_requests = ask_for([(STOP_TOKEN,)] * 12)
    heard = ask(PrefillFirst(), recorded, followed_requests)
    assert len(heard) == num_plans(recorded)
    assert all(followed.same for followed in heard)
    assert [request.finish_reason for request in followed_requests] == [request.finish_reason for request in served]
    assert [request.num_output_tokens for request in followed_requests] == [len(request.output) for request in served]
    assert sum(request.finish_reason is FinishReason.STOP for request in served) > 6


def test_a_policy_that_fails_or_breaks_a_rule_is_heard_and_the_run_goes_on() -> None:
    class Moody(Orca):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            if view.iteration == 3:
                raise ZeroDivisionError("mood")
            if view.iteration == 5:
                plan.num_tokens[0] = 10_000
            return plan

    recorded = record(Orca(), simulated(), requests())
    heard = ask(Moody(), recorded, requests())
    problems = {followed.recorded.iteration: followed.answer.problem for followed in heard if not followed.same}
    assert problems.keys() == {3, 5}
    assert problems[3] == "plan() raised ZeroDivisionError: mood"
    assert problems[5].startswith("policy Moody, iteration 5, request")
    assert len(heard) == num_plans(recorded)


def test_requests_that_are_not_those_of_the_run_are_noticed() -> None:
    recorded = record(Orca(), simulated(), requests())
    others = requests()
    others[3] = Request(
        3, others[3].num_prompt_tokens + 1, others[3].max_new_tokens, arrival_time=others[3].arrival_time
    )
    with pytest.raises(ReplayError, match="the view's running was "):
        ask(Orca(), recorded, others)


def write(path: Path, policy: Policy) -> None:
    engine, chosen = make(policy, simulated()), requests()
    engine.submit(chosen)
    with write_decisions(path, engine, chosen, ["policy=orca", "chunk=8"]):
        engine.run()


def test_an_attribute_that_json_cannot_hold_is_an_error_in_one_line(tmp_path: Path) -> None:
    engine = make(Orca(), simulated())
    for value in ({1, 2}, iter(())):
        refused = pytest.raises(ResultsError, match=r"request 7: extra cannot be written as JSON .*decisions=false$")
        chosen = [Request(7, 4, 2, extra={"own": value})]
        with refused, write_decisions(tmp_path / "file", engine, chosen, []):
            pass


def test_a_file_holds_all_that_following_needs(tmp_path: Path) -> None:
    """Also as far as it goes, if it was cut off."""
    write(path := tmp_path / "file", Orca())
    file, recorded = read_decisions(path), record(Orca(), simulated(), requests())
    assert file.recorded == recorded and file.overrides == ["policy=orca", "chunk=8"]
    assert all(followed.same for followed in ask(Orca(), file.recorded, file.requests))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    file = read_decisions(path)
    heard = ask(Orca(), file.recorded, file.requests)
    assert 10 < len(heard) < num_plans(recorded) and all(followed.same for followed in heard)


def test_what_was_decided_before_a_failure_is_in_the_file(tmp_path: Path) -> None:
    class Failing(Orca):
        def plan(self, view: View) -> Plan:
            return super().plan(view) if view.iteration < 7 else 1 / 0  # type: ignore[return-value]

    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        write(tmp_path / "file", Failing())
    file = read_decisions(tmp_path / "file")
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
OWN = ("policy=external", "policy._target_=sensitive.Sensitive")
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
        ("backend=cpu", "hardware=h200", "workload.num_requests=4", "workload.length=50", *BOTH),
    ],
    ids=" ".join,
)
def test_a_replay_predicts_as_the_run_did(folder: Path, settings: tuple[str, ...]) -> None:
    replayed = replay_of(folder, *OWN, *settings)
    assert replayed.returncode == 0, replayed
    path = folder / "run" / "config.yaml"
    changed = yaml.safe_load(path.read_text())
    changed["model"]["num_layers"] *= 2
    path.write_text(yaml.safe_dump(changed))
    replayed = command("replay", "run", cwd=folder)
    assert replayed.returncode == 1 and "Sensitive decides otherwise at " in replayed.stdout, (
        "it notices other predictions"
    )


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
