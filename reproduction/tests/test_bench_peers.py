"""Measuring other engines: the same work as ours, what is written, A fake engine stands in."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from places import ROOT
from transformers import AutoConfig

from cbatch import CbatchError
from cbatch.model.checkpoint import Vocabulary
from experiments.settings.compose import compose_run
from experiments.settings.presets import load_spec
from reproduction.bench.__main__ import BENCHMARKS
from reproduction.bench.peers import __main__ as command
from reproduction.bench.peers import measure, vllm_engine
from reproduction.bench.peers.cases import CASES, requests_of


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """A trace of 600 rows in Azure's format."""
    generator = np.random.default_rng(7)
    path = tmp_path / "trace.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        for row in range(600):
            writer.writerow(
                [f"2023-11-16 18:{row // 60:02}:{row % 60:02}.0000000", *generator.integers(1, 60, 2).tolist()]
            )
    return path


@pytest.mark.parametrize(("name", "benchmark"), [("trace-128-2048", "trace"), ("pd-256", "pd")])
def test_peers_serve_the_requests_that_our_benchmark_serves(name: str, benchmark: str, trace_file: Path) -> None:
    case, preset = CASES[name], BENCHMARKS[benchmark].presets["settings"].split()
    settings = compose_run(*preset, *([f"workload.path={trace_file}"] if benchmark == "trace" else []))
    spec = load_spec(case.model)
    ours = settings.workload.requests(Vocabulary(spec))
    theirs = requests_of(case, spec, str(trace_file))
    assert [(each.prompt, each.max_new_tokens) for each in theirs] == [
        (each.prompt, each.max_new_tokens) for each in ours
    ]
    assert (settings.model.name, settings.batch) == (case.model, case.batch)


def test_lengths_are_those_that_the_works_name(trace_file: Path) -> None:
    spec = load_spec("llama-3.1-8b")
    with trace_file.open() as file:
        recorded = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    replayed = requests_of(CASES["trace-128-8192"], spec, str(trace_file))
    assert [(len(request.prompt or ()), request.max_new_tokens) for request in replayed] == recorded[:512]
    lengths = {
        name: {
            (len(request.prompt or ()), request.max_new_tokens) for request in requests_of(case, load_spec(case.model))
        }
        for name, case in CASES.items()
        if case.work != "trace"
    }
    assert lengths == {
        "decode-2048": {(256, 2048)},
        "decode-8192": {(256, 8192)},
        "one": {(32, 512)},
        "pd-256": {(956, 68)},  # 1024 / (1 + 14) = 68.3
        "pd-512": {(956, 68)},
    }
    assert len(requests_of(CASES["pd-512"], load_spec("llama-13b"))) == 144
    decodes = requests_of(CASES["decode-2048"], spec)
    assert [request.prompt for request in decodes] == np.random.default_rng(0).integers(0, 128256, (32, 256)).tolist()
    with pytest.raises(CbatchError, match="give the trace's file"):
        requests_of(CASES["trace-128-8192"], spec)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-2-7b", "llama-13b"])
def test_the_checkpoint_without_weights_has_the_models_shape(model: str, tmp_path: Path) -> None:
    spec = load_spec(model)
    measure.write_checkpoint(spec, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert (written["model_type"], written["dtype"]) == ("llama", "bfloat16")
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
    """`vllm` as far as the script uses it; each request gets `short` tokens fewer than it asks for."""

    def __init__(self, short: int = 0) -> None:
        super().__init__("vllm")
        self.short = short
        self.arguments: dict[str, Any] = {}
        self.generated: list[list[tuple[int, int]]] = []
        self.closed = 0

    def LLM(self, model: str, **arguments: Any) -> Any:  # noqa: N802
        assert json.loads((Path(model) / "config.json").read_text())["model_type"] == "llama"
        self.arguments = arguments
        scheduler = SimpleNamespace(async_scheduling=True)
        engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=self._shut_down),
            vllm_config=SimpleNamespace(scheduler_config=scheduler),
        )
        return SimpleNamespace(generate=self._generate, llm_engine=engine)

    def SamplingParams(self, *, max_tokens: int, **settings: Any) -> Any:  # noqa: N802
        assert settings == {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        return SimpleNamespace(max_tokens=max_tokens)

    def _generate(self, prompts: list[Any], sampling: list[Any], use_tqdm: bool) -> list[Any]:
        asked = [parameters.max_tokens for parameters in sampling]
        self.generated.append(
            [(len(prompt["prompt_token_ids"]), new) for prompt, new in zip(prompts, asked, strict=True)]
        )
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * (new - self.short))]) for new in asked]

    def _shut_down(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """Its warm-up takes 1 second, its runs 4, 2 and 3."""
    module = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(measure, "graphics_card", lambda: ("NVIDIA H200", "580.159"))
    monkeypatch.setattr(measure.metadata, "version", lambda package: "0.22.1")
    clock = iter([0, 1, 10, 14, 20, 22, 30, 33])
    monkeypatch.setattr(vllm_engine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return module


VALUES = {"decode-2048": 3 / 2048 * 1e3, "one": 512 / 3, "pd-256": 144 * 1024 / 3}


@pytest.mark.parametrize("name", VALUES)
def test_the_script_drives_vllm_and_writes_what_it_measured(
    name: str, fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["vllm", f"cases={name}", f"folder={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["peers", *options])
    monkeypatch.setenv("CBATCH_COMMIT", "abc")
    assert command.main(options) == 0
    file = json.loads((tmp_path / f"h200/peers/vllm-{name}.json").read_text())
    assert file["figures"]["value"] == pytest.approx(
        {
            "median": VALUES[name],
            "min": file["figures"]["value"]["min"],
            "max": file["figures"]["value"]["max"],
            "repeats": 3,
        }
    )
    assert file["figures"]["seconds"] == {"median": 3, "min": 2, "max": 4, "repeats": 3}
    assert file["command"] == f"python -m reproduction.bench.peers vllm cases={name}"
    assert (file["commit"], file["driver"], file["hardware"]) == ("abc", "580.159", "NVIDIA H200")
    assert {"python", "torch"} <= file["versions"].keys()
    assert file["engine"]["async_scheduling"] is True
    case = CASES[name]
    sizes = [
        (request.num_prompt_tokens, request.max_new_tokens) for request in requests_of(case, load_spec(case.model))
    ]
    warm_up, *runs = fake.generated
    assert runs == [sizes] * 3
    assert warm_up == [(prompt, 16) for prompt, _ in sizes[: case.batch]]
    assert fake.arguments["max_num_seqs"] == case.batch
    assert fake.arguments["max_num_batched_tokens"] == case.budget
    assert fake.arguments["max_model_len"] == sum(sizes[0])
    assert fake.arguments["enable_prefix_caching"] is False
    assert fake.closed == 1
    assert file["row"] in capsys.readouterr().out


def test_an_engine_that_did_less_work_is_an_error(fake: FakeVllm, tmp_path: Path, capsys: Any) -> None:
    fake.short = 1
    assert command.main(["vllm", "cases=one", f"folder={tmp_path}"]) == 2
    assert "1 of 1 requests" in capsys.readouterr().err
    assert fake.closed == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["other"], "engine other is unknown; known: vllm, transformers"),
        (["vllm", "cases=five"], "cases=five: no case begins with it"),
        (["vllm", "case=one"], "case=one: give key=value with one of cases"),
        (["vllm", "repeats=0"], "give a whole number, at least 1"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(options: list[str], message: str, capsys: Any) -> None:
    assert command.main(options) == 2
    assert message in capsys.readouterr().err
    assert command.chosen("trace-128,one") == ["trace-128-2048", "trace-128-8192", "one"]
    assert command.chosen("") == list(CASES)


def test_the_package_needs_no_hydra_and_leaves_transformers_for_later() -> None:
    code = "import sys, reproduction.bench.peers.__main__; print({'hydra', 'omegaconf', 'triton', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
