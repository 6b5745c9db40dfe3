"""Models: compiled layers, the number and the seed of weights, and shapes that cannot be built."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from schedules import UnitCost
from tiny_models import CPU, LLAMA
from torch._dynamo.utils import counters

from cbatch import Engine, Limits, Request
from cbatch.errors import CapacityError, ConfigError, ModelError
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.runtime import cpu
from cbatch.runtime.options import Options
from cbatch.runtime.weights import load_model
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

NANOGPT = replace(LLAMA, name="tiny-nanogpt", family="nanogpt", num_kv_heads=4, intermediate_size=128)
SPECS = [replace(LLAMA, family=family) for family in ("llama", "mistral", "qwen2", "qwen3")]
SPECS += [replace(LLAMA, num_heads=4, num_kv_heads=1, head_dim=12, tied_embeddings=True), NANOGPT]
LIMITS = Limits(max_batch=4, max_tokens=16, max_request_tokens=64)


@pytest.mark.long
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


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.family}-{spec.head_dim}")
def test_the_shape_counts_the_weights(spec: ModelSpec) -> None:
    """`weight_bytes` leaves out norms and biases, and nothing else."""
    matrices = sum(weight.nbytes for weight in load_model(spec, CPU).parameters() if weight.dim() == 2)
    assert matrices == spec.weight_bytes


def test_weights_follow_from_the_seed_and_leave_the_process_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (load_model(replace(LLAMA, seed=seed), CPU).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("spec", "limits", "num_blocks", "error", "message"),
    [
        (replace(LLAMA, num_heads=3, num_kv_heads=3), LIMITS, 8, ModelError, "transformers refuses its shape"),
        (replace(NANOGPT, num_kv_heads=2), LIMITS, 8, ModelError, "as many kv heads as heads"),
        (LLAMA, replace(LIMITS, max_request_tokens=513), 8, ConfigError, "max_request_tokens=513 exceeds the 512 pos"),
        (
            LLAMA,
            LIMITS,
            10**10,
            CapacityError,
            r"needs 0.0 GB for weights and \d+.* GB for the KV cache.*lower kv_tokens",
        ),
    ],
)
def test_what_cannot_be_built_is_one_line(
    spec: ModelSpec, limits: Limits, num_blocks: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        cpu.build(spec, limits, KVSize(num_blocks, 8))
    assert "\n" not in str(caught.value)
