"""Requests that move between replicas on GPUs, or on one: tokens are those of `generate`, no block leaks, and copies are fast."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import serve_apart
from gpu_models import LARGE, LIMITS, TINY_LLAMA, TWO_GPUS, with_same_weights
from poison import poisoned
from test_gpu_tokens import AMPLE, KV, SCARCE
from test_moves import Pair, random_moves

from cbatch import FinishReason, KVSize
from cbatch.cluster.transfers import Copier, Copy
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.gpu.transfers import PROGRAMS, BlockCopier, launcher
from cbatch.runtime.options import Options

DEVICES = [pytest.param((0, 0), id="one GPU"), pytest.param((0, 1), id="two GPUs", marks=TWO_GPUS)]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scattered_blocks_arrive_as_they_were(dtype: str, devices: tuple[int, int]) -> None:
    """In caches of unequal sizes, several times; other blocks stay."""
    spec = replace(TINY_LLAMA, dtype=dtype)
    sizes = KVSize(60, 16), KVSize(41, 16)
    there, here = (
        PagedCache(spec, size, torch.device("cuda", each)) for size, each in zip(sizes, devices, strict=True)
    )
    copies = BlockCopier([[there]], [[here]])
    for number in (1, 30, 40):
        there.both.normal_()
        there.texts.random_()
        for part in (here.both, here.texts):
            part.zero_()
        for device in devices:
            torch.cuda.synchronize(device)
        source, target = torch.randperm(60)[:number], torch.randperm(41)[:number]
        num_bytes, _ = copies((source.numpy(), target.numpy())).wait()
        assert num_bytes == number * 16 * spec.kv_bytes_per_token
        for old, new in ((there.keys, here.keys), (there.values, here.values), (there.texts[None], here.texts[None])):
            assert torch.equal(old[:, source].cpu(), new[:, target].cpu())
            new[:, target] = 0
            assert not new.any()


@pytest.mark.alone
@pytest.mark.parametrize("devices", DEVICES)
def test_copies_are_as_fast_as_a_plain_one(devices: tuple[int, int]) -> None:
    """Scattered blocks of an 8B model, 8,192 tokens, against the same bytes in one piece: at most 15% longer, on one GPU with more programs."""
    there, here = (PagedCache(LARGE, KVSize(96, 128), torch.device("cuda", each)) for each in devices)
    stream = BlockCopier([[there]], [[here]])._streams[0]
    pairs = torch.stack([torch.randperm(96)[:64] for _ in range(2)]).int().pin_memory()
    shape = 64 * 128 * LARGE.kv_bytes_per_token // 2
    plain = [torch.empty(shape, dtype=torch.int16, device=cache.keys.device) for cache in (there, here)]

    def seconds(copy: Callable[[], object]) -> float:
        times = list[float]()
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # hides the launch
                begin.record()
                copy()
                end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    launch = launcher(there, here, PROGRAMS if devices[1] else 128)
    scattered = seconds(lambda: launch(pairs.data_ptr(), 64, stream.cuda_stream))
    assert scattered <= seconds(lambda: plain[1].copy_(plain[0], non_blocking=True)) / 0.85


@pytest.fixture(scope="module", params=DEVICES)
def devices(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


@pytest.fixture(scope="module", params=["off", "all"])
def executors(request: pytest.FixtureRequest, devices: tuple[int, int], checkpoints: Path) -> Iterator[list[Any]]:
    """Two executors, each on its GPU."""
    spec, built = with_same_weights(TINY_LLAMA, checkpoints), []
    for device in devices:
        with torch.cuda.device(device):
            built.append(poisoned(gpu.build, spec, LIMITS, KV, Options(graphs=request.param)))
    yield built
    for executor in built:
        executor.close()


def test_random_moves_keep_tokens_and_blocks(executors: list[Any]) -> None:
    """The schedules of the CPU's test: moves in both directions at any time, beside iterations in flight on both replicas."""
    ways = {
        (one, other): BlockCopier(one.caches, other.caches)
        for one in executors
        for other in executors
        if one is not other
    }

    class GpuPair(Pair):
        spec, size, limits, fewest, most = TINY_LLAMA, KV.block_size, LIMITS, SCARCE, AMPLE

        def executors(self, num_blocks: int) -> list[Any]:
            for executor in executors:
                executor.restart()
            return executors

        def copy(self, sender: Any, receiver: Any, pairs: Any) -> None:
            if len(pairs[0]):
                ways[sender, receiver](pairs).wait()

        def close(self) -> None:
            pass

    for seed in range(25):
        random_moves(seed, GpuPair)


def connect(sender: Any, receiver: Any, late: int = 0) -> Copier:
    """late: cycles for which each copy waits before it begins."""
    copies = BlockCopier(sender.caches, receiver.caches, receiver.follow)

    def copy(pairs: Any) -> Copy:
        with torch.cuda.stream(copies._streams[0]):
            torch.cuda._sleep(late)
        return copies(pairs)

    return copy


SMALL = KVSize(SCARCE, KV.block_size)


@pytest.mark.parametrize("layerwise", [False, True])
def test_prompts_here_and_outputs_there_have_the_tokens_of_generate(executors: list[Any], layerwise: bool) -> None:
    """Clients leave at any time, leases end, copies overlap iterations of both replicas; some copies come 5 ms late."""
    records = []
    for seed in range(24):
        for executor in executors:
            for cache in executor.caches[0]:
                cache.keys.zero_()
                torch.cuda.synchronize(cache.keys.device)
        late = partial(connect, late=10_000_000 * (seed % 2))
        records.append(serve_apart(executors, TINY_LLAMA, LIMITS, SMALL, late, seed, layerwise=layerwise).record)
    reasons = [request.finish_reason for record in records for request in record.requests]
    assert reasons.count(FinishReason.CANCELLED) > 20
    transfers = [transfer for record in records for transfer in record.transfers]
    assert len(transfers) > 100 and any(transfer.hidden for transfer in transfers)
    if layerwise:
        assert sum(transfer.hidden == 1 for transfer in transfers) > 20


def test_a_copy_without_a_wait_gives_wrong_tokens(executors: list[Any]) -> None:
    """So the test above would notice: the decoder's iterations do not wait, and the copy begins 50 ms late."""

    def hasty(sender: Any, receiver: Any) -> Copier:
        copies = BlockCopier(sender.caches, receiver.caches)
        receiver.caches[0][0].both.zero_()

        def copy(pairs: Any) -> Copy:
            with torch.cuda.stream(copies._streams[0]):
                torch.cuda._sleep(100_000_000)
            return copies(pairs)

        return copy

    with pytest.raises(AssertionError):
        serve_apart(executors, TINY_LLAMA, LIMITS, SMALL, hasty, 0, timeouts=False)
    for cache in (executor.caches[0][0] for executor in executors):
        torch.cuda.synchronize(cache.keys.device)
