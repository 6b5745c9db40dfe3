"""Each key of a workload changes its requests, or is refused where another key leaves it without effect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_agents import REQUESTS
from test_agents import workload as write_agents

from cbatch import CbatchError, ConfigError, WorkloadError
from cbatch.request import spec_of
from experiments.serve import serve
from experiments.settings.compose import compose_run
from experiments.settings.settings import Settings
from experiments.workloads import RecordedSessions, TraceReplay
from experiments.workloads.base import SamplingKeys

SIM = ("backend=sim", "model=tiny", "kv_tokens=100000", "model.max_positions=100000")
CHAT = "workload=chat workload.num_requests=12 workload.turns=3"
RATE = "_target_:experiments.workloads.GammaArrivals,rate"
MODES = [
    CHAT,
    f"{CHAT} workload.closed=false",
    f"{CHAT} workload.sessions=2",
    "workload=agents workload.path=agents.jsonl",
    f"workload=agents workload.path=agents.jsonl workload.sessions=null workload.arrivals={{{RATE}:0.1}}",
    "workload=prompts workload.path=prompts.jsonl workload.closed=true",
    "workload=trace workload.path=trace.csv workload.queued=true",
    "workload=open_loop workload.num_requests=9 workload.arrivals={_target_:experiments.workloads.AllAtOnce}",
]
OTHER = dict(
    pair.split(" ", 1)
    for pair in (
        *("max_new_tokens 5", "tiers {a:{share:0.5,priority:3},b:{share:0.5}}", "slo {ttft:1}", "timeout 1e-4"),
        *("prediction {error:0.5}", "pad_outputs 4", "num_requests 5", "sampling.temperature 0.7"),
        *("sessions 1", "steady true", "arrivals.rate 3", "arrivals.cv 2", f"arrivals {{{RATE}:0.3}}"),
        *("turns 2", "system 64", "pause 1", "lengths.min_length 200", "rate_scale 2", "speed 2", "start 1"),
        *("length_scale 0.5", "pause_scale 2", "max_pause 0.5", "order recorded", "num_sessions 1", "max_length 20"),
        "too_long drop workload.max_length=20",
    )
)
"""Another value of each key, which changes some request of each of `MODES` that reads the key."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_agents(tmp_path, REQUESTS)
    first = json.loads(Path("agents.jsonl").read_text().splitlines()[0])
    lines = (json.dumps({**first, "id": f"{n}", "tool_tokens": n}) + "\n" for n in range(9))
    Path("agents.jsonl").write_text("".join(lines))
    Path("prompts.jsonl").write_text("".join(f'{{"token_ids": {[*range(n + 1)]}}}\n' for n in range(9)))
    rows = "".join(f"{n},{12 + n},{5 + n}\n" for n in range(9))
    Path("trace.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{rows}")


def served(settings: Settings) -> list[Any]:
    requests = serve(settings, log=lambda _: None, bar=False).record.requests
    return [(spec_of(request), request.arrival_time) for request in requests]


def keys_of(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in section.items():
        yield prefix + key
        yield from keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else ()


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_key_changes_requests_or_is_refused(mode: str, files: None) -> None:
    usual = compose_run(*SIM, *mode.split())
    before, changed = served(usual), 0
    for key in {*keys_of(dict(usual.composed.keys["workload"]))} & OTHER.keys():
        words = [word for word in mode.split() if not word.startswith(f"workload.{key}=")]
        try:
            after = served(compose_run(*SIM, *words, *f"workload.{key}={OTHER[key]}".split()))
        except CbatchError:
            continue
        assert after != before, key
        changed += 1
    assert changed >= 6, "or values are refused that change nothing"


@pytest.mark.parametrize(
    "given", ["workload=chat workload.sessions=2 workload.arrivals.rate=3", "workload=chat(sessions=2,arrivals.rate=3)"]
)
def test_arrivals_beside_a_number_of_sessions_are_refused(given: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^workload\.arrivals\.rate: .* workload\.sessions=2, .*; leave it out, or give workload\.sessions=null$",
    ):
        compose_run(*given.split())
    compose_run("workload=agents", "workload.path=x", "workload.arrivals=null")  # the default, which says nothing else


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"sampling": SamplingKeys(temperature=1), "pad_outputs": 4},
            r"workload\.sampling, workload\.pad_outputs: .* leave them out",
        ),
        ({"queued": True, "speed": 2.0}, r"workload\.speed: .* leave it out"),
    ],
)
def test_a_recorded_run_keeps_its_sampling_and_its_lengths(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(WorkloadError, match=problem):
        TraceReplay(path="decisions.jsonl.gz", format="decisions", **keys)


def test_recorded_sessions_refuse_the_keys_of_drawn_requests() -> None:
    with pytest.raises(WorkloadError, match=r"workload\.max_new_tokens, workload\.timeout: .*; leave them out"):
        RecordedSessions(path="decisions.jsonl.gz", max_new_tokens=4, timeout=1.0, seed=3)
