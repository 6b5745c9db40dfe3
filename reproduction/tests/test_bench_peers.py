"""Measuring other engines: the same work as ours, and what is written. A fake vLLM stands in; transformers serves itself."""

import csv
import gc
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
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
from reproduction.bench.peers import measure, vllm_engine
from reproduction.bench.peers.cases import CASES, Case, requests_of
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


class FakeVllm(ModuleType):
    """`vllm` as far as the script uses it."""

    closed = 0

    def LLM(self, model: str, **arguments: Any) -> Any:  # noqa: N802
        self.arguments, self.generated = arguments, list[list[tuple[int, int]]]()
        config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
        engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shut_down), vllm_config=config)
        return SimpleNamespace(generate=self._generate, llm_engine=engine)

    def SamplingParams(self, *, max_tokens: int, **settings: Any) -> Any:  # noqa: N802
        assert settings == {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return SimpleNamespace(max_tokens=max_tokens)

    def _generate(self, prompts: list[Any], sampling: list[Any], use_tqdm: bool) -> list[Any]:
        pairs = zip(prompts, sampling, strict=True)
        self.generated.append([(len(prompt["prompt_token_ids"]), each.max_tokens) for prompt, each in pairs])
        outputs = (SimpleNamespace(token_ids=[0] * each.max_tokens) for each in sampling)
        return [SimpleNamespace(outputs=[output]) for output in outputs]

    def _shut_down(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """Its warm-up takes 1 second, its runs 4, 2 and 3."""
    monkeypatch.setitem(sys.modules, "vllm", module := FakeVllm("vllm"))
    monkeypatch.setattr(measure, "graphics_card", lambda: ("NVIDIA H200", "580.159"))
    monkeypatch.setattr(measure.metadata, "version", lambda package: "0.22.1")
    clock = iter([0, 1, 10, 14, 20, 22, 30, 33])
    monkeypatch.setattr(vllm_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return module


@pytest.mark.parametrize(("name", "value"), [("decode-2048", 3e3 / 2048), ("one", 512 / 3), ("pd-256", 144 * 1024 / 3)])
def test_vllm_serves_the_case_and_what_it_took_is_written(
    name: str, value: float, fake: FakeVllm, tmp_path: Path
) -> None:
    measure.main("vllm", name, folder=str(tmp_path))
    file = json.loads((tmp_path / f"h200/peers/vllm-{name}.json").read_text())
    assert file["figures"]["value"]["median"] == pytest.approx(value)
    assert file["figures"]["seconds"] == {"median": 3, "min": 2, "max": 4, "repeats": 3}
    assert (file["driver"], file["hardware"], file["engine"]["async_scheduling"]) == ("580.159", "NVIDIA H200", True)
    case = CASES[name]
    sizes = [(each.num_prompt_tokens, each.max_new_tokens) for each in requests_of(case, load_spec(case.model))]
    warm_up, *runs = fake.generated
    assert runs == [sizes] * 3 and warm_up == [(prompt, 16) for prompt, _ in sizes[: case.batch]]
    limits = {"max_num_seqs": case.batch, "max_num_batched_tokens": case.budget, "max_model_len": sum(sizes[0])}
    assert fake.arguments.items() >= (limits | {"enable_prefix_caching": False}).items() and fake.closed == 1


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
