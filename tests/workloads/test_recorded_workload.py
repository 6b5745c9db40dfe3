"""A recorded run, served again, is the same run: its decisions file holds all that the clients asked for."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import message, outcome
from in_thread import in_thread
from tiny_models import save_model_of_words

from cbatch import SLO, FinishReason, Limits, RequestSpec, Sampling, WorkloadError
from cbatch.model.checkpoint import Vocabulary
from cbatch.replay.decisions import Recorded
from cbatch.request import spec_of
from experiments.run import main
from experiments.store.decisions_file import DecisionsWriter, read_decisions
from experiments.workloads import RecordedSessions, TraceReplay

MODEL = ("model.path=model", "batch=2", "prefix_cache=true", "block_size=4", "kv_tokens=4096", "decisions=true")
WORDS = [f"w{number}" for number in range(40)]


class Letters(Vocabulary):
    def __init__(self) -> None:
        self.size, self.stop_tokens = 100, (7,)


@st.composite
def specs(draw: st.DrawFn, with_prompts: bool) -> RequestSpec:
    prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))
    hashes, counts = draw(st.lists(st.integers(), max_size=3)), st.none() | st.integers(1, 50)
    names, seconds = st.none() | st.text(), st.none() | st.floats(1e-6, 1e6)
    return RequestSpec(
        0,
        len(prompt),
        draw(st.integers(1, 50)),
        true_new_tokens=draw(counts),
        timeout=draw(seconds),
        prompt=prompt if with_prompts else None,
        sampling=Sampling(
            draw(st.floats(0, 5)), draw(st.integers(0, 9)), draw(st.floats(0.01, 1)), draw(st.integers(0, 2**64 - 1))
        ),
        stop_tokens=tuple(draw(st.lists(st.integers(0, 99), max_size=2))),
        stop_strings=tuple(draw(st.lists(st.text(min_size=1), max_size=2))),
        client=draw(names),
        session=draw(names),
        tier=draw(names),
        priority=draw(st.integers(-9, 9)),
        slo=SLO(draw(seconds), draw(seconds), draw(seconds)),
        predicted_new_tokens=draw(counts),
        prefix_hashes=tuple(hashes),
        hash_block=draw(st.integers(1, 4)) if len(hashes) == 1 else 0,
        texts=tuple(draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9))))),
        turn=draw(st.none() | st.integers(0, 3)),
        pause=draw(seconds),
        follows=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
        salt=draw(st.text()),
        extra=draw(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans()))),
    )


@pytest.mark.long
@given(st.data(), st.booleans())
def test_every_field_of_a_request_comes_back(tmp_path_factory: Any, data: st.DataObject, with_prompts: bool) -> None:
    drawn = data.draw(st.lists(specs(with_prompts), min_size=1, max_size=4))
    times = sorted(data.draw(st.floats(0, 1e6)) for _ in drawn[1:])
    asked = [
        replace(spec, id=id_, arrival_time=time)
        for id_, (spec, time) in enumerate(zip(drawn, [0.0, *times], strict=True))
    ]
    iterations = {spec.id: data.draw(st.integers(1, 9)) for spec in asked[::2]}
    path = tmp_path_factory.getbasetemp() / "decisions.jsonl.gz"
    writer = DecisionsWriter(path)
    writer.begin(Recorded(Limits(2, 100, 100), 10, 4, iterations=iterations))
    for spec in asked:
        writer.request(spec)
    writer.close()
    for vocabulary in (None, *[Letters()] * with_prompts):
        arrivals = TraceReplay(path=str(path)).source(vocabulary)
        assert [spec_of(request) for request in arrivals.known] == asked
        assert arrivals.iterations == iterations
    filled = TraceReplay(path=str(path), slo=SLO(ttft=3.0)).requests(None)
    with pytest.raises(WorkloadError, match=r"pad_outputs: not read by a trace with format=decisions; leave it out$"):
        TraceReplay(path=str(path), pad_outputs=4).requests(None)
    assert [request.slo for request in filled] == [SLO(ttft=3.0) if spec.slo == SLO() else spec.slo for spec in asked]
    [file] = read_decisions(path)
    assert ([*map(spec_of, file.requests)], file.recorded.iterations) == (asked, iterations)


def record_server() -> None:
    """Two turns of a conversation, and a request that ends at a stop string; one goes on after the end token."""
    with in_thread(Path("first"), "policy=sarathi_serve", "backend=cpu", *MODEL) as server:
        first = {"prompt": " ".join(WORDS), "max_tokens": 30, "session": "s", "temperature": 0.9, "seed": 5}
        text = server.ask("/v1/completions", first).content["choices"][0]["text"]
        server.ask("/v1/completions", {**first, "prompt": f"{first['prompt']} {text} w3"})
        server.ask("/v1/completions", {**first, "ignore_eos": True, "stop": text.split()[1:2]})


def record_workload() -> None:
    lines = [
        {"prompt": " ".join(WORDS[: 30 + number]), "temperature": 0.9, "max_new_tokens": 30} for number in range(4)
    ]
    lines[1] |= {"stop": WORDS, "client": "ann", "arrival_time": 0.0}
    Path("prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    serve("first", "workload=prompts", "workload.path=prompts.jsonl", "backend=cpu")


def serve(folder: str, *arguments: str) -> str:
    ended = outcome(main, ["policy=sarathi_serve", *MODEL, *arguments, f"output={folder}"])
    assert not ended.complaint
    return ended.printed


@pytest.mark.long
@pytest.mark.parametrize("record", [record_server, record_workload])
def test_a_run_served_again_has_the_same_hits_and_outputs(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model ends outputs at any of half of its words; in simulation they end where the tokens ended them."""
    monkeypatch.chdir(tmp_path)
    save_model_of_words(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(0, 96, 9)]}))
    record()
    again = ("workload=recorded", "workload.path=first/decisions.jsonl.gz")
    serve(
        "second", *again, "workload.speed=0.5", "backend=cpu"
    )  # a turn arrives after the one before has ended, as it did
    printed = serve("simulated", *again, "backend=sim", "hardware=h100")
    first, second, simulated = (requests_of(folder) for folder in ("first", "second", "simulated"))
    pd.testing.assert_frame_equal(first, second)
    assert first.output_tokens.tolist() == simulated.output_tokens.tolist()
    assert first.output_tokens.lt(30).any() and first.cached_tokens.any() and simulated.cached_tokens.any()
    assert Path("first/outputs.jsonl").read_text() == Path("second/outputs.jsonl").read_text()
    assert "output lengths available" not in printed
    assert "give the model of the recorded run" in message(
        lambda: TraceReplay(path="first/decisions.jsonl.gz").requests(Few())
    )


@pytest.mark.long
def test_a_recorded_conversation_waits_for_its_own_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same answers, the run is the same."""
    monkeypatch.chdir(tmp_path)
    save_model_of_words(tmp_path / "model")
    record_server()
    again = ("workload=recorded_sessions", "workload.path=first/decisions.jsonl.gz")
    serve("second", *again, "backend=cpu")
    serve("simulated", *again, "backend=sim", "hardware=h100")
    assert Path("first/outputs.jsonl").read_text() == Path("second/outputs.jsonl").read_text()
    first, second, simulated = (requests_of(folder) for folder in ("first", "second", "simulated"))
    pd.testing.assert_frame_equal(first, second)
    assert simulated.prompt_tokens.tolist() == first.prompt_tokens.tolist()
    waits(tmp_path)


def waits(folder: Path) -> None:
    """A turn begins with the prompt before and the answer that it got in this run, whatever the recorded one was."""
    workload, vocabulary = RecordedSessions(path=str(folder / "first/decisions.jsonl.gz")), Letters()
    arrivals = workload.source(vocabulary)
    [asked] = [each for each in arrivals.due(inf, 0) if each.id == 0]
    asked.finish_reason, asked.finished_at, asked.output = FinishReason.LENGTH, 1e3, [5, 0, 6]  # 0 has no text
    arrivals.ended(asked)
    [turn] = [each for each in arrivals.due(inf, 0) if each.id == 1]
    first, second, *_ = [spec_of(each) for file in read_decisions(Path(workload.path)) for each in file.requests]
    assert [*(turn.prompt or ())] == [*(first.prompt or ()), 5, 6, *(second.prompt or ())[-1:]]
    assert turn.follows == (0,) and turn.arrival_time == pytest.approx(1e3 + (turn.pause or 0.0))


class Few(Letters):
    def __init__(self) -> None:
        self.size, self.stop_tokens = 20, ()


def requests_of(folder: str) -> pd.DataFrame:
    """Returns the columns of requests.csv that do not depend on the clock."""
    rows = pd.read_csv(f"{folder}/requests.csv").sort_values("id", ignore_index=True)
    return rows[["id", "session", "client", "prompt_tokens", "output_tokens", "cached_tokens", "finish_reason"]]
