"""Measuring other engines: the same work as ours, how its speed is stated, and what is written of transformers, which serves itself."""

import csv
import gc
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from transformers import AutoConfig

from cbatch import CbatchError, Request
from cbatch.model.checkpoint import Vocabulary
from experiments.settings.compose import compose_run
from experiments.settings.presets import load_spec
from reproduction.bench.__main__ import BENCHMARKS
from reproduction.bench.peers import measure
from reproduction.bench.peers.cases import CASES, Case, requests_of, speed
from reproduction.bench.peers.transformers_engine import TransformersEngine


@pytest.mark.parametrize(("name", "benchmark"), [("trace-128-2048", "trace"), ("pd-256", "pd")])
def test_peers_serve_the_requests_that_our_benchmark_serves(name: str, benchmark: str, tmp_path: Path) -> None:
    generator, path = np.random.default_rng(7), tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        times = [f"2023-11-16 18:{row // 60:02}:{row % 60:02}.0000000" for row in range(600)]
        writer.writerows([time, *generator.integers(1, 60, 2).tolist()] for time in times)
    case, preset = CASES[name], BENCHMARKS[benchmark].presets["settings"].split()
    settings = compose_run(*preset, *([f"workload.path={path}"] if benchmark == "trace" else []))
    spec = load_spec(case.model)
    ours, theirs = settings.workload.requests(Vocabulary(spec)), requests_of(case, spec, str(path))
    assert [(each.prompt, each.max_new_tokens) for each in theirs] == [
        *((each.prompt, each.max_new_tokens) for each in ours)
    ]
    assert (settings.model.name, settings.batch) == (case.model, case.batch)


def test_lengths_are_those_that_the_works_name() -> None:
    lengths = {
        name: {(len(each.prompt or ()), each.max_new_tokens) for each in requests_of(case, load_spec(case.model))}
        for name, case in CASES.items()
        if case.work != "trace"
    }
    pd = {(956, 68)}  # 1024 / (1 + 14) = 68.3
    decodes = {"decode-2048": {(256, 2048)}, "decode-8192": {(256, 8192)}}
    assert lengths == {**decodes, "one": {(32, 512)}, "pd-256": pd, "pd-512": pd}
    with pytest.raises(CbatchError, match="give the trace's file"):
        requests_of(CASES["trace-128-8192"], load_spec("llama-3.1-8b"))


def test_the_checkpoint_without_weights_has_the_models_shape(tmp_path: Path) -> None:
    spec = load_spec("llama-3.1-8b")
    measure.write_checkpoint(spec, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    config = AutoConfig.from_pretrained(tmp_path)
    shape = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": False,
    }
    assert {name: getattr(config, name) for name in shape} == shape
    assert config.rope_parameters["rope_theta"] == spec.rope_theta


@pytest.mark.parametrize(("name", "value"), [("decode-2048", 3e3 / 2048), ("one", 512 / 3), ("pd-256", 144 * 1024 / 3)])
def test_the_speed_of_what_took_3_seconds(name: str, value: float) -> None:
    """Milliseconds per iteration, output tokens/s, and prompt and output tokens/s."""
    case = CASES[name]
    assert speed(case, requests_of(case, load_spec(case.model)), 3.0) == pytest.approx(value)


def test_transformers_serves_each_request_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at a time, on a CPU. By default the cache would take most of the memory. A stopped engine is an error."""
    outputs, started = (4, 1, 9, 2, 6), list[TransformersEngine]()
    requests = [Request(id_, 5 + id_, new, prompt=[7] * (5 + id_)) for id_, new in enumerate(outputs)]

    def start(*arguments: Any) -> TransformersEngine:
        started.append(TransformersEngine(*arguments))
        return started[0]

    small = partial(transformers.ContinuousBatchingConfig, num_blocks=16, block_size=16)
    monkeypatch.setattr("transformers.ContinuousBatchingConfig", small)  # of the module that is imported then
    monkeypatch.setitem(measure.PEERS, "transformers", measure.PEERS["transformers"]._replace(start=start))
    monkeypatch.setitem(CASES, "tiny", Case("decode", "tiny", batch=3, budget=32, new=4))
    monkeypatch.setattr(measure, "requests_of", lambda *_: requests)
    monkeypatch.setattr(measure, "graphics_card", lambda: ("NVIDIA H200", "580.159"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(gc, "collect", lambda: 0)  # at each end of a manager, of all that the tests before have left
    measure.main("transformers", "tiny", repeats=2, folder=str(tmp_path))  # or says which request got too few
    file = json.loads((tmp_path / "h200/peers/transformers-tiny.json").read_text())
    assert file["row"] == f"transformers {transformers.__version__}, SDPA, sync"
    assert (file["prompt_tokens"], file["output_tokens"]) == (5 + 6 + 7 + 8 + 9, sum(outputs))
    assert file["engine"]["arguments"] == {
        "max_batch_tokens": 32,
        "max_requests_per_batch": 3,
        "allow_block_sharing": False,
    }
    with pytest.raises(CbatchError, match="the manager of transformers has stopped"):
        started[0].serve(requests)
