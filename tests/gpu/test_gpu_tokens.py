"""On the GPU as on the CPU: with any policy, loop and graphs, each request gets the tokens that it gets alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz_policy import FuzzPolicy
from gpu_models import BLOCK_SIZE, CUDA, LIMITS, TINY_LLAMA, TINY_NANOGPT, TINY_QWEN3, with_same_weights
from poison import poisoned
from schedules import UnitCost
from tiny_models import LONGEST_OUTPUT, Reference, greedy_references, plain_model, sampled_references

from cbatch import Limits, Policy, Server
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.request import Sampling
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options
from policies.chunking import Fixed, TileAligned
from policies.orca import Orca
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

POLICIES: dict[str, Callable[[], Policy]] = {
    "request_level": RequestLevel,
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi": lambda: Sarathi(TileAligned(32)),
    "sarathi_serve": lambda: SarathiServe(Fixed(7)),
    "fuzz": lambda: FuzzPolicy(seed=3),
}
AMPLE, SCARCE = 32, 7  # blocks of KV cache; the second leads to preemptions
KV = KVSize(AMPLE, BLOCK_SIZE)


def expected_of(references: list[Reference]) -> list[list[int]]:
    return [reference.expected(1 + index % LONGEST_OUTPUT) for index, reference in enumerate(references)]


def serve(
    executor: gpu.GpuExecutor,
    policy: Policy,
    references: list[Reference],
    num_blocks: int,
    *,
    asynchronous: bool,
    limits: Limits = LIMITS,
) -> tuple[list[list[int]], int]:
    """Tokens of each request, and the number of preemptions."""
    requests = [
        reference.request(index, 1 + index % LONGEST_OUTPUT, arrival_iteration=index // 2)
        for index, reference in enumerate(references)
    ]
    Server(executor, limits, UnitCost(), KVSize(num_blocks, BLOCK_SIZE), asynchronous).serve(policy, requests)
    return [request.output for request in requests], sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("graphs", ["off", "decode", "all"])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_every_policy_gives_the_tokens_of_generate(spec: ModelSpec, graphs: str, checkpoints: Path) -> None:
    references = greedy_references(spec)
    expected = expected_of(references)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), LIMITS, KV, Options(graphs=graphs))
    for name, make in POLICIES.items():
        for asynchronous in (False, True):
            for num_blocks in (AMPLE, SCARCE):
                tokens, preemptions = serve(executor, make(), references, num_blocks, asynchronous=asynchronous)
                assert tokens == expected, f"{name}, asynchronous={asynchronous}, {num_blocks} blocks"
                if num_blocks == SCARCE and name in ("prefill_first", "sarathi_serve"):
                    assert preemptions > 0
    if graphs == "all":
        assert executor.iteration.num_eager == 0
    if graphs == "off":
        assert executor.iteration.num_replayed == 0


@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_sampled_tokens_do_not_depend_on_the_batch(spec: ModelSpec, graphs: str, checkpoints: Path) -> None:
    references = sampled_references(spec)
    expected = expected_of(references)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), LIMITS, KV, Options(graphs=graphs))
    for make in (Orca, POLICIES["sarathi"], POLICIES["fuzz"]):
        for asynchronous in (False, True):
            assert serve(executor, make(), references, AMPLE, asynchronous=asynchronous)[0] == expected


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_a_last_layer_of_sampled_rows_changes_no_token(graphs: str, checkpoints: Path) -> None:
    references = greedy_references(TINY_QWEN3)
    options = Options(graphs=graphs, last_layer="sampled")  # type: ignore[arg-type]
    executor = poisoned(gpu.build, with_same_weights(TINY_QWEN3, checkpoints), LIMITS, KV, options)
    for name in ("orca", "sarathi", "fuzz"):
        tokens, _ = serve(executor, POLICIES[name](), references, SCARCE, asynchronous=True)
        assert tokens == expected_of(references), name


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_a_model_that_is_not_fused(graphs: str) -> None:
    references = generated(TINY_NANOGPT, 1, 5, 17, 40)
    executor = poisoned(gpu.build, TINY_NANOGPT, LIMITS, KV, Options(graphs=graphs))
    expected = [reference.expected(1 + index) for index, reference in enumerate(references)]
    assert serve(executor, POLICIES["sarathi"](), references, AMPLE, asynchronous=True)[0] == expected


def generated(spec: ModelSpec, *lengths: int) -> list[Reference]:
    """Random prompts of these lengths, with the tokens of `generate`."""
    weights = plain_model(spec, CUDA)
    references = []
    for length in lengths:
        prompt = torch.randint(0, spec.vocab_size, (1, length), device=CUDA)
        tokens = weights.generate(prompt, max_new_tokens=LONGEST_OUTPUT, do_sample=False)[0].tolist()
        references.append(Reference(tokens[:length], Sampling(), tokens[length:]))
    return references


def test_more_chunks_than_a_graph_takes_at_exactly_its_size(checkpoints: Path) -> None:
    spec = with_same_weights(TINY_LLAMA, checkpoints)
    limits = Limits(max_batch=8, max_tokens=64, max_request_tokens=BLOCK_SIZE, tile=32)
    references = generated(spec, *[8] * 8)
    executor = poisoned(gpu.build, spec, limits, KV)
    requests = [reference.request(index, 5) for index, reference in enumerate(references)]
    Server(executor, limits, UnitCost(), KV).serve(Orca(), requests)
    assert [request.output for request in requests] == [reference.expected(5) for reference in references]
    assert executor.iteration.num_eager == 1


def test_an_iteration_beyond_the_graphs_runs_and_is_counted(checkpoints: Path) -> None:
    limits = Limits(LIMITS.max_batch, LIMITS.max_tokens, LIMITS.max_request_tokens, tile=32, graph_sizes=(16,))
    spec = with_same_weights(TINY_LLAMA, checkpoints)
    executor = gpu.build(spec, limits, KV)
    references = greedy_references(TINY_LLAMA)[-4:]
    tokens, _ = serve(executor, Orca(), references, AMPLE, asynchronous=True)
    assert tokens == [reference.expected(1 + index) for index, reference in enumerate(references)]
    assert executor.iteration.num_eager > 0
    assert executor.iteration.num_replayed > 0
    torch.cuda.synchronize()
