"""What vLLM's scheduler and its client measured, as runs that are simulated: figures by hand, and of a run that was simulated before."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from commands import command

from cbatch import BatchShape, Limits, RequestSpec
from cbatch.record import StepRecord
from cbatch.replay.decisions import Decided, Decision, Progress, Recorded, Seen, StepEnd
from cbatch.sim import ProfileCost, load_profile
from experiments.setup.presets import load_spec
from experiments.store.decisions_file import DecisionsWriter
from experiments.store.run_folder import DECISIONS
from reproduction.profiles.vllm_recordings import Stretch, stretches
from reproduction.validation.__main__ import main
from reproduction.validation.compare import simulate
from reproduction.validation.recorded import client_runs, read_runs
from reproduction.validation.runs import figures

FIRST, SECOND = (
    RequestSpec(0, 100, 3, arrival_time=10.0, extra={"waited": 0.5}),
    RequestSpec(1, 600, 2, arrival_time=10.02),
)
ITERATIONS = [  # computed tokens of the running requests; tokens; planned, launched, ended
    ({}, {0: 100}, (10.0, 10.001, 10.03)),
    ({0: 100}, {0: 1}, (10.01, 10.012, 10.08)),
    ({0: 101}, {0: 1, 1: 600}, (10.03, 10.031, 10.09)),
    ({1: 600}, {1: 1}, (10.081, 10.082, 10.1)),
]


def record(folder: Path, requests: Sequence[RequestSpec] = (FIRST, SECOND)) -> Path:
    """Writes the iterations. The third is launched for 49 ms, so that the tokens of the second wait."""
    folder.mkdir()
    with closing(DecisionsWriter(folder / DECISIONS)) as writer:
        writer.begin(Recorded(Limits(8, 2048, 4096), 100, 16))
        for spec in requests:
            writer.request(spec)
        for number, (computed, tokens, (planned, launched, ended)) in enumerate(ITERATIONS):
            running = tuple(Progress(id_, count, 1, 700, 1) for id_, count in computed.items())
            writer.event(Decision(number, Seen(planned, 0, 8, (), running, (), (), 90, 0), Decided((*tokens.items(),))))
            times = (planned, launched, ended, ended, ended, launched, ended)
            writer.event(StepEnd(StepRecord(number, *times, *[0] * 9, ""), (*tokens,), ()))
    return folder


def test_two_recorded_requests_by_hand(tmp_path: Path) -> None:
    """The first came half a second before the scheduler received it, and waited so long more for its first token."""
    (run,) = read_runs([record(tmp_path / "judged")], "llama-3.1-8b", capacity=4.0)
    found = {name: run.figures[f"{name} mean"] for name in ("TTFT", "TPOT", "end to end")}
    assert found == pytest.approx(
        {"TTFT": (0.53 + 0.07) / 2, "TPOT": (0.03 + 0.01) / 2, "end to end": (0.59 + 0.08) / 2}
    )
    assert run.columns["request.arrival"].tolist() == [0, 520_000]
    assert run.name == ("batch 8, 96%, policy=vllm_v1 chunk=2048", "policy=vllm_v1 chunk=2048")
    assert run.shapes()[2] == BatchShape(((600, 0),), 1, 102)


def test_a_launch_without_a_graph_joins_two_iterations(tmp_path: Path) -> None:
    together, alone = stretches(record(tmp_path / "judged") / DECISIONS)
    assert together[:2] == ((BatchShape((), 1, 101), BatchShape(((600, 0),), 1, 102)), pytest.approx(0.06))
    assert together.launch == pytest.approx(0.049) and alone == Stretch((BatchShape((), 1, 601),), pytest.approx(0.01))


def test_a_run_without_all_its_tokens_is_left_out(tmp_path: Path) -> None:
    later = RequestSpec(2, 50, 9, arrival_time=10.05)
    assert main(["recorded", f"measured={record(tmp_path / 'cut', (FIRST, SECOND, later))}"]) == 2


def test_repeats_and_other_requests_are_told_apart(tmp_path: Path) -> None:
    """Two recordings of the same requests, and one in which the first prompt is shorter."""
    others = (replace(FIRST, num_prompt_tokens=99), SECOND)
    folders = [record(tmp_path / name, requests) for name, requests in (("a", (FIRST, SECOND)), ("b", others))]
    runs = read_runs([*folders, folders[0]], "llama-3.1-8b", capacity=4.0)
    cases = [run.settings["case"].partition(", policy=vllm_v1 chunk=2048") for run in runs]
    assert [(load, more) for load, _, more in cases] == [
        ("batch 8, 96%", ""),
        ("batch 8, 96% (2)", ""),
        ("batch 8, 96%", ", again"),
    ]


def test_a_simulated_engine_is_found_again(tmp_path: Path) -> None:
    settings = "policy=vllm_v1 chunk=2048 batch=64 max_tokens=2048 backend=sim hardware=h200-vllm workload=open_loop"
    arrivals = "workload.num_requests=60 workload.arrivals.rate=15 tables=false decisions=true"
    assert command("run", *settings.split(), *arrivals.split(), "output=again", cwd=tmp_path).returncode == 0
    (run,) = read_runs([tmp_path / "again"], "llama-3.1-8b", capacity=20.0)
    summary = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert run.figures["TTFT mean"] == pytest.approx(summary["ttft_seconds"]["mean"])
    assert figures(simulate(run, load_profile("h200-vllm"))) == pytest.approx(run.figures, rel=1e-3)


def test_what_a_client_measured_is_simulated(tmp_path: Path) -> None:
    """One request: its way to the scheduler, a prompt of 100 tokens in one iteration, and two decodes."""
    client = {"mean_ttft_ms": 10.0, "p99_ttft_ms": 10.0, "mean_tpot_ms": 5.0, "p99_tpot_ms": 5.0}
    client["total_token_throughput"] = 5000.0
    about = {"hardware": "NVIDIA H200", "model": "llama-3.1-8b", "batch": 64, "budget": 2048, "slo": {"slo_ttft": 1.0}}
    kept = {**about, "figures": {"vllm": {"0.6": client}}, "requests": {"0.6": ["0.0000 100 3"]}}
    (tmp_path / "serving.json").write_text(json.dumps(kept))
    (run,) = client_runs(tmp_path / "serving.json")
    simulated = figures(simulate(run, load_profile("h200-vllm")))
    cost = ProfileCost(load_profile("h200-vllm"), load_spec("llama-3.1-8b"))
    prompt = cost.predict(BatchShape(((100, 0),)))
    ttft = cost.profile.host_time(True, cost.spec).server_seconds + prompt
    decodes = [cost.predict(BatchShape((), 1, context)) for context in (101, 102)]
    assert run.figures == {
        "TTFT mean": 0.01,
        "TTFT P99": 0.01,
        "TPOT mean": 0.005,
        "TPOT P99": 0.005,
        "throughput": 5000.0,
    }
    assert [simulated["TTFT mean"], simulated["TPOT mean"]] == pytest.approx([ttft, sum(decodes) / 2])
    assert simulated["throughput"] == pytest.approx(103 / (prompt + sum(decodes)))
