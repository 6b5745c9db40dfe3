"""`bench pipeline` and `bench tensor` on a CPU: their requests, figures and files."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cbatch import ConfigError, Limits
from cbatch.runtime.options import Options
from experiments.settings.backends import Cpu, Simulated
from experiments.settings.presets import load_spec
from experiments.settings.servers import real_server
from reproduction.bench import pipeline, tensor
from reproduction.bench.__main__ import main as bench


def test_lengths_are_those_that_peers_served() -> None:
    """192 requests of 1K to 4K tokens, ten prompt tokens to one of output, short ones more often."""
    lengths = pipeline.zipf_lengths(192)
    totals = [prompt + new for prompt, new in lengths]
    assert len(lengths) == 192 and 1024 <= min(totals) < 1100 and 3900 < max(totals) < 4096
    assert all(prompt == 10 * total // 11 for (prompt, _), total in zip(lengths, totals, strict=True))
    assert sorted(totals)[96] < (1024 + 4096) / 2
    assert lengths == pipeline.zipf_lengths(192)
    requests = pipeline.make_requests(lengths[:3], 96)
    assert [(request.num_prompt_tokens, request.max_new_tokens) for request in requests] == lengths[:3]


def test_the_warm_up_has_an_iteration_of_every_kind() -> None:
    """What they allocate and compile, a run that is measured does not: the largest one, and a long prompt beside decodes."""
    spec = load_spec("llama-13b")
    limits = Limits(16, 32768, pipeline.LONGEST)
    server = pipeline.server_on(Simulated(), spec, limits, Options(), "h200")
    steps: list[tuple[int, int]] = []

    def serve(*arguments: Any) -> None:
        record = server.serve(*arguments)
        steps.extend((step.num_prefill_tokens, step.num_decode_tokens) for step in record.steps)

    pipeline.warm_up(SimpleNamespace(limits=limits, serve=serve), spec)  # type: ignore[arg-type]
    assert max(prompts for prompts, _ in steps) > 0.9 * 32768
    assert any(prompts > 2048 and decodes > 8 for prompts, decodes in steps)
    assert any(not prompts for prompts, _ in steps)


def as_if_on_gpus(monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType) -> None:
    """The benchmark serves short requests on the CPU."""

    def server(*arguments: Any) -> Any:
        made = real_server(*arguments)
        made.executor.iteration = SimpleNamespace(num_eager=0)
        return made

    monkeypatch.setattr(benchmark, "Cuda", Cpu)
    monkeypatch.setattr(pipeline, "real_server", server)
    monkeypatch.setattr(benchmark, "load_spec", lambda name: load_spec("tiny"))
    for module in (benchmark, pipeline):
        monkeypatch.setattr(module, "release_memory", lambda: None)
    monkeypatch.setattr(pipeline, "SHORTEST", 70)
    monkeypatch.setattr(pipeline, "LONGEST", 84)
    monkeypatch.setattr(benchmark, "LONGEST", 84)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(pipeline, "choose_devices", lambda *numbers: None)


def test_it_compares_stages_and_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_if_on_gpus(monkeypatch, pipeline)
    pipeline.main(layers=(1, 1), batch=2, requests=4, policies="orca;sarathi, 256", folder=str(tmp_path))
    found = json.loads((tmp_path / "h200-x2" / "pipeline.json").read_text())
    assert (found["hardware"], found["layers"]) == ("NVIDIA H200 x2", [1, 1])
    names = ["orca", "sarathi, 256 tokens"]
    assert [(number, list(policies)) for number, policies in found["figures"].items()] == [("2", names), ("1", names)]
    for number, policies in found["figures"].items():
        for figures in policies.values():
            assert figures["tokens_per_second"]["median"] > 0
            assert len(figures["stages"]) == (2 if number == "2" else 0)
            assert all(sum(shares.values()) == pytest.approx(1) for shares in figures["stages"])
            bubbles = [shares["pb1"] + shares["pb2"] + shares["pb3"] for shares in figures["stages"]]
            assert figures["bubble_share"] == pytest.approx(sum(bubbles) / 2 if bubbles else 0, abs=0.02)
    lines = capsys.readouterr().out
    assert "tiny, 2 GPUs, 4 requests in flight, 4 in all" in lines and "tiny, 1 GPU, 2 requests in flight" in lines


def test_the_same_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole prompts leave a stage idle where chunks keep it busy; without a GPU, nothing is measured."""
    options = {"requests": 24, "batch": 4, "policies": "orca;sarathi, 256", "folder": str(tmp_path)}
    pipeline.main(hardware="h200", name="pipeline-simulated", **options)
    found = json.loads((tmp_path / "h200-x2" / "pipeline-simulated.json").read_text())["figures"]
    orca, sarathi = found["2"].values()
    assert orca["bubble_share"] > 1.5 * sarathi["bubble_share"] > 0
    assert sarathi["tokens_per_second"]["median"] > orca["tokens_per_second"]["median"]
    assert found["1"]["orca"]["bubble_share"] == 0 and found["1"]["orca"]["stages"] == []
    assert orca["eager"] is None and "eager" not in capsys.readouterr().out  # not known, rather than none
    with pytest.raises(ConfigError, match="layers= is for real stages"):
        pipeline.main(hardware="h200", layers=(21, 19), **options)


def test_ranks_serve_both_kinds_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_if_on_gpus(monkeypatch, tensor)
    monkeypatch.setattr(tensor, "WARM_UP_TOKENS", 2)
    small = {"batch": 2, "requests": 3, "prompt": 4, "new": 5, "folder": str(tmp_path)}
    tensor.main(ranks=(2, 1), policies="orca;sarathi_serve, 384", **small)
    found = json.loads((tmp_path / "h200-x2" / "tensor.json").read_text())["figures"]
    kinds = ["llama-13b, orca", "llama-13b, sarathi_serve, 384 tokens", "llama-3.1-8b, 4 + 5"]
    assert [(number, list(figures)) for number, figures in found.items()] == [("2", kinds), ("1", kinds)]
    assert all(of[kinds[2]]["iterations"] == 5 for of in found.values())
    assert "2 GPUs, llama-3.1-8b, 4 + 5" in capsys.readouterr().out
    tensor.main(hardware="h200", work=("decode",), name="tensor-simulated", **small)
    simulated = json.loads((tmp_path / "h200-x2" / "tensor-simulated.json").read_text())
    assert simulated["decode_model"] == "llama-3.1-8b" and "model" not in simulated  # which serves the other work
    found |= simulated["figures"]
    for of in found.values():  # real or simulated: prompts and outputs count
        seconds = of[kinds[2]]["ms_per_iteration"]["median"] * of[kinds[2]]["iterations"] / 1e3
        assert of[kinds[2]]["tokens_per_second"]["median"] == pytest.approx(2 * (4 + 5) / seconds)
    assert bench(["tensor", "hardware=h200", "work=decode,prompts"]) == 2
    assert capsys.readouterr().err == "error: tensor: work=prompts: give requests or decode\n"
