"""The paged model against `transformers`' own, for every family, and models that cannot be built."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from poison import poisoned
from schedules import UnitCost
from tiny_models import CPU, LLAMA, TIE, plain_model
from torch._dynamo.utils import counters

from cbatch import Engine, Limits, Request
from cbatch.errors import CapacityError, ConfigError, ModelError
from cbatch.kv import KVSize
from cbatch.model import Layers, ModelSpec
from cbatch.runtime import cpu
from cbatch.runtime.gpu.memory import kv_tokens_that_fit
from cbatch.runtime.options import Options
from cbatch.runtime.weights import load_model
from experiments.settings.presets import load_spec
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

NANOGPT = replace(LLAMA, name="tiny-nanogpt", family="nanogpt", num_kv_heads=4, intermediate_size=128)
SPECS = [replace(LLAMA, family=family) for family in ("llama", "mistral", "qwen2", "qwen3")]
SPECS += [replace(LLAMA, num_heads=4, num_kv_heads=1, head_dim=12, tied_embeddings=True), NANOGPT]
LIMITS = Limits(max_batch=4, max_tokens=16, max_request_tokens=64)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.family}-{spec.head_dim}")
def test_every_family_gives_the_tokens_of_generate(spec: ModelSpec, num_stages: int) -> None:
    model = plain_model(spec, CPU)
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(spec.vocab_size, (1, length), generator=random) for length in (1, 5, 13, 30)]
    requests = [Request(id_, p.shape[1], 12, prompt=p[0].tolist()) for id_, p in enumerate(prompts)]
    limits = replace(LIMITS, num_stages=num_stages)
    executor = poisoned(cpu.build, spec, limits, KVSize(12, 8))
    engine = Engine(SarathiServe(Fixed(7)), executor, limits, UnitCost(), num_blocks=12, block_size=8)
    engine.submit(requests)
    engine.run()
    executor.close()
    for request, prompt in zip(requests, prompts, strict=True):
        made = model.generate(
            prompt, max_new_tokens=12, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
        best = torch.cat(made.scores).topk(2, dim=-1).values
        assert float((best[:, 0] - best[:, 1]).min()) > TIE
        assert request.output == made.sequences[0, prompt.shape[1] :].tolist()


def test_compiled_layers_give_the_same_tokens_and_are_compiled_once(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """For one token, for one other number of them, and for any: no third layer, chunk or batch compiles anything.

    By default the compiler runs each graph it has captured as it is, which needs no C++ compiler.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=pytestconfig.getoption("--compiler")))
    torch.compiler.reset()
    counters.clear()
    spec = replace(LLAMA, num_layers=3)
    outputs, graphs = [], []
    for compiled in (False, True):
        executor = cpu.build(spec, LIMITS, KVSize(24, 8), Options(compiled=compiled))
        for lengths in ((1, 5, 13, 30), (4, 9), (22, 2, 17)):
            engine = Engine(SarathiServe(Fixed(7)), executor, LIMITS, UnitCost(), num_blocks=24, block_size=8)
            requests = [Request(id_, length, 8, prompt=list(range(length))) for id_, length in enumerate(lengths)]
            engine.submit(requests)
            engine.run()
            outputs.append([request.output for request in requests])
            graphs.append(counters["stats"]["unique_graphs"] - sum(graphs))
        executor.close()
    assert outputs[:3] == outputs[3:]
    assert graphs[:3] == [0, 0, 0]
    assert graphs[3] > 0
    assert graphs[4:] == [0, 0]


def test_a_layer_of_nanogpt_has_12_h_squared_weights() -> None:
    weights = load_model(NANOGPT, CPU).named_parameters()
    layer = sum(weight.numel() for name, weight in weights if ".layers.0." in name and weight.dim() == 2)
    assert layer == 12 * NANOGPT.hidden_size**2


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.family}-{spec.head_dim}")
def test_the_shape_counts_the_weights(spec: ModelSpec) -> None:
    """`num_parameters` leaves out norms and biases, and nothing else."""
    matrices = sum(weight.numel() for weight in load_model(spec, CPU).parameters() if weight.dim() == 2)
    assert matrices == spec.num_parameters


def test_weights_follow_from_the_seed_and_leave_the_process_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (load_model(replace(LLAMA, seed=seed), CPU).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_kv_cache_is_what_weights_and_iterations_leave_of_a_gpu() -> None:
    """70B in 16 bits on a card with 139 GB free: the weights leave no room for an iteration; with 188 GB there is some."""
    spec, limits = load_spec("llama-2-70b"), Limits(18, 8192, 1024)
    remedy = (
        "with more GPUs raise backend.tensor_parallel or backend.pipeline_stages, else choose a smaller model, or simulate several GPUs with "
        "backend=sim backend.tensor_parallel=N"
    )
    whole = [Layers(0, 80, 80)]
    with pytest.raises(
        CapacityError, match=rf"needs 138\.0 GB for weights.*139\.0 GB of GPU memory are free; {remedy}"
    ):
        kv_tokens_that_fit(spec, limits, whole, [int(139e9)])
    assert 0 < kv_tokens_that_fit(spec, limits, whole, [int(188e9)]) * spec.kv_bytes_per_token < 50e9


def test_what_cannot_be_built_is_one_line() -> None:
    refused: list[tuple[ModelSpec, Limits, int, type[Exception], str]] = [
        (replace(LLAMA, num_heads=3, num_kv_heads=3), LIMITS, 8, ModelError, "transformers refuses its shape"),
        (replace(NANOGPT, num_kv_heads=2), LIMITS, 8, ModelError, "as many kv heads as heads"),
        (
            LLAMA,
            replace(LIMITS, max_request_tokens=513),
            8,
            ConfigError,
            "max_request_tokens=513 exceeds the 512 positions",
        ),
        (
            LLAMA,
            LIMITS,
            10**10,
            CapacityError,
            r"needs 0.0 GB for weights and \d+.* GB for the KV cache.*lower kv_tokens",
        ),
    ]
    for spec, limits, num_blocks, error, message in refused:
        with pytest.raises(error, match=message) as caught:
            cpu.build(spec, limits, KVSize(num_blocks, 8))
        assert not re.search("\n", str(caught.value))
