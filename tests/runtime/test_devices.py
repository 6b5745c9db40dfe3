"""How layers, memory and GPUs are divided among stages, ranks and replicas, and the errors, one line each."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_models import DEEP, LLAMA, QWEN3

from cbatch import Limits
from cbatch.drafts import ModelDrafter
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.model import Layers, split_layers
from cbatch.runtime import cpu
from cbatch.runtime.gpu.devices import check_number, choose_devices
from cbatch.runtime.gpu.memory import SPARE, check_memory, kv_tokens_that_fit, needs
from experiments.settings.backend import Pool
from experiments.settings.backends import Cuda
from experiments.setup.presets import load_spec


@pytest.mark.parametrize(
    ("num_stages", "sizes", "expected"),
    [
        (1, None, [(0, 4)]),
        (2, None, [(0, 2), (2, 4)]),
        (3, None, [(0, 2), (2, 3), (3, 4)]),
        (2, [3, 1], [(0, 3), (3, 4)]),
    ],
)
def test_layers_are_divided(num_stages: int, sizes: list[int] | None, expected: list[tuple[int, int]]) -> None:
    found = split_layers(DEEP, num_stages, sizes)
    assert [(part.first, part.end) for part in found] == expected
    assert [part.is_first for part in found] == [True] + [False] * (num_stages - 1)
    assert [part.is_last for part in found] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize(
    ("num_stages", "sizes", "message"),
    [
        (5, None, "backend.pipeline_stages=5 exceeds the 4 layers of model=tiny-deep; lower it to 4 or less"),
        (2, [4], r"backend.layers=\[4\]: give one number for each of the 2 stages \(backend.pipeline_stages\)"),
        (2, [4, 0], r"layers=\[4, 0\] must be numbers of at least 1 that sum to the 4 layers of model=tiny-deep"),
        (2, [2, 3], r"layers=\[2, 3\] must be numbers of at least 1 that sum to the 4 layers of model=tiny-deep"),
    ],
)
def test_layers_that_cannot_be_divided_so_are_refused(num_stages: int, sizes: list[int] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message}$"):
        split_layers(DEEP, num_stages, sizes)


# -- GPUs, as PyTorch reports them ------------------------------------------------------------------------------------

GPUs = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> GPUs:
    """Pretends that PyTorch finds GPUs of which some pairs (writer, owner) are not connected."""

    zeros = torch.zeros

    def pretend(number: int, *, unconnected: tuple[tuple[int, int], ...] = ()) -> None:
        reaches = lambda here, there: (here.index, there.index) not in unconnected  # noqa: E731
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
        monkeypatch.setattr(torch, "zeros", lambda *sizes, **_: zeros(*sizes))

    return pretend


@pytest.mark.parametrize(
    ("devices", "pools", "message"),
    [
        ([0], None, r"backend.devices=\[0\]: names 1 GPUs for 2 replicas; give one for each"),
        ([0, 2], None, r"backend.devices=\[0, 2\]: give numbers from 0 to 1"),
        ([1, 1], None, ""),
        ([0, 0, 1], {"p": Pool(replicas=2), "d": Pool()}, ""),
    ],
)
def test_replicas_are_placed_on_named_gpus(
    devices: list[int], pools: dict[str, Pool] | None, message: str, gpus: GPUs, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setattr("experiments.settings.backends.count_gpus", lambda: 2)
    backend = Cuda(devices=devices, replicas=1 if pools else 2, pools=pools)
    if message:
        with pytest.raises(ConfigError, match=f"{message}$"):
            backend.check_here()
        return
    backend.check_here()
    backend.check_number(3)
    assert [backend.place(number).idx for number in range(len(devices))] == devices  # type: ignore[attr-defined]


def test_stages_take_a_gpu_each(gpus: GPUs) -> None:
    gpus(3, unconnected=((0, 2), (2, 1)))
    assert choose_devices(1) == [[torch.device("cuda", 0)]]
    assert choose_devices(2) == [[torch.device("cuda", 0)], [torch.device("cuda", 1)]]
    assert len(choose_devices(3)) == 3  # stages 0 to 1, 1 to 2, and the tokens from 2 back to 0


def test_missing_gpus_and_links_are_one_line_with_the_remedy(gpus: GPUs) -> None:
    gpus(0)
    with pytest.raises(
        ConfigError, match=r"backend=cuda, but PyTorch finds no GPU; choose backend=cpu or backend=sim$"
    ):
        choose_devices()
    gpus(1)
    problem = "backend.pipeline_stages=2 needs 2 GPUs, and PyTorch finds 1"
    with pytest.raises(ConfigError, match=f"{problem}; lower it, or simulate the others with backend=sim$"):
        choose_devices(2)
    gpus(2, unconnected=((1, 0),))
    problem = "GPU 1 cannot access the memory of GPU 0, which backend.pipeline_stages=2 requires; choose GPUs that NVLink connects"
    with pytest.raises(ConfigError, match=rf"{problem} .*, or fewer GPUs$"):
        choose_devices(2)


def test_each_rank_of_each_stage_takes_a_gpu(gpus: GPUs) -> None:
    """Ranks reach those of their stage, and their own successor: (0, 1) and (2, 3) are stages of two ranks."""
    gpus(4, unconnected=((0, 3), (3, 0), (1, 2), (2, 1)))
    found = choose_devices(2, 2)
    assert [[device.index for device in group] for group in found] == [[0, 1], [2, 3]]
    with pytest.raises(
        ConfigError, match=r"^backend\.tensor_parallel=4 backend.pipeline_stages=2 needs 8 GPUs, and PyTorch finds 4;"
    ):
        choose_devices(2, 4)
    with pytest.raises(ConfigError, match=r"^backend\.tensor_parallel=2 backend\.replicas=3 needs 6 GPUs, and PyTorch"):
        check_number(1, 2, 3)
    gpus(2, unconnected=((1, 0),))
    problem = (
        r"GPU 1 cannot access the memory of GPU 0, which backend.tensor_parallel=2 requires; choose GPUs that NVLink"
    )
    with pytest.raises(ConfigError, match=problem):
        choose_devices(1, 2)


def test_each_stage_needs_the_memory_of_its_part() -> None:
    """Layers of 2 bytes per parameter; embedding and head of 96 x 32 each; two kv heads of 8 in every layer."""
    spec, limits = replace(DEEP, dtype="bfloat16"), Limits(4, 64, 64, num_stages=2)
    first, last = (needs(spec, limits, 100, part) for part in split_layers(spec, 2, [3, 1]))
    layer = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64)
    assert (first.weights, last.weights) == (3 * layer + 2 * 96 * 32, layer + 2 * 96 * 32)
    assert first.weights + last.weights == spec.weight_bytes
    assert (first.kv_cache, last.kv_cache) == (100 * 3 * 2 * 2 * 16, 100 * 2 * 2 * 16)
    logits, arriving = 3 * 4 * 96 * 4, 3 * 64 * 32 * 4
    assert last.activations - first.activations == logits + arriving
    tied = replace(spec, tied_embeddings=True)
    assert [part.weight_bytes(tied) for part in split_layers(tied, 2)] == [2 * layer + 2 * 96 * 32] * 2
    assert split_layers(tied, 1)[0].weight_bytes(tied) == tied.weight_bytes


def test_a_draft_model_is_whole_on_each_rank_of_the_first_stage() -> None:
    """Its weights, keys and values, and activations beside the target's share; other stages have none of it."""
    limits = Limits(4, 64, 64, num_stages=2, max_drafts=3)
    first, last = split_layers(DEEP, 2)
    alone = needs(QWEN3, limits, 100, Layers(0, 2, 2))
    for num_ranks in (1, 2):
        share = needs(DEEP, limits, 100, first, num_ranks)
        both = needs(DEEP, limits, 100, first, num_ranks, QWEN3)
        assert both == tuple(map(sum, zip(share, alone, strict=True)))
        assert needs(DEEP, limits, 100, last, num_ranks, QWEN3) == needs(DEEP, limits, 100, last, num_ranks)
    free = [int(sum(needs(DEEP, limits, 100, part, 1, QWEN3)) + SPARE) for part in (first, last)]
    assert kv_tokens_that_fit(DEEP, limits, [first, last], free, 1, QWEN3) == 100
    with pytest.raises(
        CapacityError, match=r"^stage 0 of model tiny-deep with draft model tiny-qwen3 needs .* to 100$"
    ):
        check_memory(DEEP, limits, 101, [first, last], free, 1, QWEN3)


def test_a_draft_model_that_cannot_serve_is_refused() -> None:
    """By its vocabulary, its positions, and the memory that it takes on the host."""
    limits, kv = Limits(2, 16, 100, max_drafts=3), KVSize(8, 8)
    for changes, problem in (
        ({"vocab_size": 95}, "the vocabulary of tiny-qwen3 has 95 tokens, but model=tiny-llama has 96; choose"),
        ({"max_positions": 99}, "max_request_tokens=100 exceeds the 99 positions of model tiny-qwen3"),
        ({"num_layers": 10**9}, "model tiny-llama needs"),
    ):
        with pytest.raises((ConfigError, CapacityError), match=problem):
            cpu.check_fits(LLAMA, limits, kv, drafter=ModelDrafter(replace(QWEN3, **changes)))
    cpu.check_fits(LLAMA, limits, kv, drafter=ModelDrafter(QWEN3))
    with pytest.raises(CapacityError, match=r"kv.host_tokens needs .* GB of host memory"):
        cpu.check_fits(LLAMA, limits, KVSize(8, 8, 10**6), drafter=ModelDrafter(replace(QWEN3, head_dim=10**7)))


def test_the_gpu_with_the_least_room_decides_and_is_named() -> None:
    spec, limits, layers = LLAMA, Limits(4, 64, 64, num_stages=2), split_layers(LLAMA, 2)
    beside = [int(sum(needs(spec, limits, 0, part)) + SPARE) for part in layers]
    per_token = spec.kv_bytes_per_token // 2
    free = [beside[0] + 500 * per_token, beside[1] + 300 * per_token]
    assert kv_tokens_that_fit(spec, limits, layers, free) == 300
    with pytest.raises(CapacityError, match=r"^stage 1 of model tiny-llama needs .*; lower kv_tokens to 300$"):
        check_memory(spec, limits, 400, layers, free)
    whole = [Layers(0, 2, 2)]
    with pytest.raises(CapacityError, match=r"^model tiny-llama needs .*; lower max_tokens and kv_tokens$"):
        check_memory(spec, limits, 10**6, whole, free[:1])


def test_random_weights_are_drawn_on_the_first_gpu() -> None:
    spec, limits = replace(LLAMA, hidden_size=4096, intermediate_size=10**6), Limits(1, 8, 64, num_stages=2)
    layers = split_layers(spec, 2)
    enough = int(sum(needs(spec, limits, 64, layers[0])) + SPARE) + 10**9
    with pytest.raises(CapacityError, match=r"GB while its random weights are drawn, but .*; choose a smaller model"):
        check_memory(spec, limits, 64, layers, [enough, enough])
    check_memory(replace(spec, path="somewhere"), limits, 64, layers, [enough, enough])


def test_a_model_that_fits_no_gpu_is_drawn_where_it_is_kept() -> None:
    """LLaMA-2-70B: 138 GB in all, 69 on each of two GPUs of 150 GB, by stages or by ranks."""
    spec = load_spec("llama-2-70b")
    for num_stages, num_ranks in ((2, 1), (1, 2)):
        limits = Limits(32, 8192, 4096, num_stages=num_stages)
        layers = split_layers(spec, num_stages)
        tokens = kv_tokens_that_fit(spec, limits, layers, [int(150e9)] * num_stages, num_ranks)
        assert 300_000 < tokens < 500_000


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


def test_all_replicas_share_a_machines_memory() -> None:
    limits, kv = Limits(4, 1024, 64), KVSize(1000, 16)
    cpu.check_fits(LLAMA, limits, kv, 2)
    with pytest.raises(
        CapacityError, match=r"^1000000 replicas of model tiny-llama need .*; lower backend\.replicas, "
    ):
        cpu.check_fits(LLAMA, limits, kv, 1_000_000)


def test_each_rank_needs_the_memory_of_its_share() -> None:
    """Two bytes a parameter; half of every matrix and of the head, all of the embedding; boxes for the other rank's parts."""
    spec, limits, [layers] = replace(LLAMA, dtype="bfloat16"), Limits(4, 1024, 64), split_layers(LLAMA, 1)
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    half = needs(spec, limits, 100, layers, 2)
    assert half.weights == 2 * (2 * layer // 2 + 96 * 32 + 48 * 32)
    tied = needs(replace(spec, tied_embeddings=True), limits, 100, layers, 2)
    assert tied.weights == half.weights  # the embedding, and a copy of the part that is the head
    assert half.kv_cache == needs(spec, limits, 100, layers).kv_cache // 2
    assert needs(spec, limits, 100, layers, 4).kv_cache == half.kv_cache  # as many heads: they are shared
    boxes = 2 * 1024 * 32 * 2
    assert half.activations > boxes
    beside = half.weights + half.activations + int(SPARE)
    free = [beside + 300 * half.kv_cache // 100]
    assert kv_tokens_that_fit(replace(spec, path="x"), limits, [layers], free, 2) == 300
    with pytest.raises(CapacityError, match=r"^each rank of model tiny-llama needs .*; lower kv_tokens to 300$"):
        check_memory(spec, limits, 400, [layers], free, 2)
