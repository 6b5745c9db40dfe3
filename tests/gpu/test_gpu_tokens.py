"""On GPUs as on the CPU: with any policy, loop, graphs, stages and ranks, each request gets the tokens that it gets alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_policy import FuzzPolicy
from gpu_models import BLOCK_SIZE, CUDA, LIMITS, TINY_LLAMA, TINY_NANOGPT, TINY_QWEN3, with_same_weights
from poison import poisoned
from races import check_races
from schedules import UnitCost
from tiny_models import LONGEST_OUTPUT, Reference, greedy_references, plain_model, sampled_references

from cbatch import Limits, Policy, Server
from cbatch.arrivals import Listed
from cbatch.kv import Copies, KVSize
from cbatch.model import ModelSpec
from cbatch.request_spec import Sampling
from cbatch.runtime import host_memory
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options
from policies.chunking import Fixed, TileAligned
from policies.evictions import LRU
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
    requests = [each.request(index, 1 + index % LONGEST_OUTPUT) for index, each in enumerate(references)]
    arrivals = Listed(requests, {index: index // 2 for index in range(len(requests))})
    Server(executor, limits, UnitCost(), KVSize(num_blocks, BLOCK_SIZE), asynchronous).serve(policy, arrivals)
    return [request.output for request in requests], sum(request.num_preemptions for request in requests)


def needing(num_gpus: int, *values: object) -> Any:
    """Values of a parameter for which a machine needs that many GPUs."""
    few = torch.cuda.device_count() < num_gpus
    return pytest.param(*values, marks=pytest.mark.skipif(few, reason=f"needs {num_gpus} GPUs"), id=f"{values}")


LAYOUTS = [needing(stages * ranks, stages, ranks) for stages, ranks in ((1, 1), (2, 1), (1, 2), (2, 2))]


@pytest.mark.alone  # compares times of events
@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_that_find_their_prompts_get_the_tokens_of_generate(
    asynchronous: bool, num_stages: int, num_ranks: int, checkpoints: Path
) -> None:
    """Whether or not evicted blocks go to host memory, which is tiny or holds all; no access to a block or slot is a race."""
    references = [reference for reference in greedy_references(TINY_LLAMA) if len(reference.prompt) > BLOCK_SIZE]
    limits, options = replace(LIMITS, num_stages=num_stages), Options(tensor_parallel=num_ranks)
    kv, copied = KV._replace(num_host_blocks=64), 0
    executor = check_races(poisoned(gpu.build, with_same_weights(TINY_LLAMA, checkpoints), limits, kv, options))
    for name, make in POLICIES.items():
        for num_blocks, on_host in ((AMPLE, 0), (SCARCE, 0), (SCARCE, 3), (SCARCE, 64)):
            requests = [references[index % 3].request(index, 1 + index % LONGEST_OUTPUT) for index in range(24)]
            size = KVSize(num_blocks, BLOCK_SIZE, on_host)
            server = Server(executor, limits, UnitCost(), size, asynchronous, prefix_cache=LRU())
            record = server.serve(make(), Listed(requests, {index: 2 * index for index in range(24)}))
            expected = [references[index % 3].expected(1 + index % LONGEST_OUTPUT) for index in range(24)]
            what = f"{name}, {num_blocks} blocks, {on_host} in host memory"
            assert [request.output for request in requests] == expected, what
            assert sum(request.num_cached_tokens for request in requests) > 12 * BLOCK_SIZE
            copied += sum(each.num_back for each in record.blocks)
            late = [each.ended - record.steps[each.iteration].started for each in record.blocks]
            assert max(late, default=0.0) <= 1e-4, what
    executor.close()
    assert copied


@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_blocks_come_back_from_pinned_memory_as_they_were(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scattered blocks, a few at once and in pieces of few slots, copied out, overwritten and copied back to other blocks."""
    monkeypatch.setattr(host_memory, "AT_ONCE", at_once)
    monkeypatch.setattr(host_memory, "PIECE", 1 << 20)
    cache = PagedCache(TINY_LLAMA, KVSize(60, BLOCK_SIZE, 40), CUDA)
    parts = cache.keys, cache.values
    for part in parts:
        part.normal_()
    before = [part.clone() for part in parts]
    blocks = host_memory.HostBlocks(cache)
    assert all(piece.is_pinned() for piece in blocks._pieces)
    slots = torch.randperm(40).tolist()
    blocks.copy(Copies(out=[(2 * place, slot) for place, slot in enumerate(slots[:30])]))
    for part in parts:
        part.zero_()
    blocks.copy(Copies(back=[(2 * place + 1, slot) for place, slot in enumerate(slots[:30])]))
    for part, first in zip(parts, before, strict=True):
        assert torch.equal(part[:, 1:60:2], first[:, 0:60:2]) and not part[:, 0:60:2].any()


@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("graphs", ["off", "decode", "all"])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_every_policy_gives_the_tokens_of_generate(
    spec: ModelSpec, graphs: Any, num_stages: int, num_ranks: int, checkpoints: Path
) -> None:
    """The second model has one key-value head, which both ranks have."""
    references = greedy_references(spec)
    limits, options = replace(LIMITS, num_stages=num_stages), Options(graphs=graphs, tensor_parallel=num_ranks)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), limits, KV, options)
    for name, make in POLICIES.items():
        for asynchronous in (False, True):
            for num_blocks in (AMPLE, SCARCE):
                tokens, preemptions = serve(
                    executor, make(), references, num_blocks, asynchronous=asynchronous, limits=limits
                )
                what = f"{name}, asynchronous={asynchronous}, {num_blocks} blocks"
                assert tokens == expected_of(references), what
                if num_stages == 1 and num_blocks == SCARCE and name in ("prefill_first", "sarathi_serve"):
                    assert preemptions > 0, what
    executor.close()
    assert (executor.iteration.num_eager == 0) == (graphs == "all")
    assert (executor.iteration.num_replayed == 0) == (graphs == "off")


@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("make_references", [sampled_references, greedy_references])
def test_no_access_is_a_race(
    make_references: Callable[[ModelSpec], list[Reference]],
    graphs: Any,
    num_stages: int,
    num_ranks: int,
    checkpoints: Path,
) -> None:
    spec = TINY_LLAMA if make_references is sampled_references else TINY_QWEN3
    limits = replace(LIMITS, num_stages=num_stages)
    options = Options(graphs=graphs, tensor_parallel=num_ranks)
    executor = check_races(gpu.build(with_same_weights(spec, checkpoints), limits, KV, options))
    references = make_references(spec)
    for name in ("orca", "sarathi", "fuzz"):
        for asynchronous in (False, True):
            tokens, _ = serve(executor, POLICIES[name](), references, SCARCE, asynchronous=asynchronous, limits=limits)
            assert tokens == expected_of(references), name
    executor.close()


@pytest.mark.parametrize("num_stages", [needing(1, 1), needing(2, 2)])
@pytest.mark.parametrize("graphs", ["off", "all"])
def test_a_model_that_is_not_fused(graphs: Any, num_stages: int) -> None:
    references, limits = generated(TINY_NANOGPT, 1, 5, 17, 40), replace(LIMITS, num_stages=num_stages)
    executor = poisoned(gpu.build, TINY_NANOGPT, limits, KV, Options(graphs=graphs))
    tokens, _ = serve(executor, POLICIES["sarathi"](), references, AMPLE, asynchronous=True, limits=limits)
    executor.close()
    assert tokens == expected_of(references)


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
    assert tokens == expected_of(references)
    assert executor.iteration.num_eager > 0
    assert executor.iteration.num_replayed > 0
    torch.cuda.synchronize()
