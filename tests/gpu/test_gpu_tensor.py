"""Two ranks on two GPUs: parts in each other's memory, and equal bits on both; tokens are in `test_gpu_tokens`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_models import BLOCK_SIZE, LARGE, LIMITS, SLICE, TINY_LLAMA, TINY_NANOGPT, TWO_GPUS, with_same_weights
from schedules import UnitCost
from test_gpu_tokens import KV, POLICIES, serve
from tiny_models import Reference, greedy_references

from cbatch import Limits, Request, Server
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.model import Layers, ModelSpec
from cbatch.runtime.fast import fused_model
from cbatch.runtime.fast.argmax import choose_share, search_share
from cbatch.runtime.fast.fused_model import exchanges_of
from cbatch.runtime.fast.fused_ops import add_norm
from cbatch.runtime.fast.linear import Product
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.gpu.devices import choose_devices, synchronize
from cbatch.runtime.gpu.exchange import Exchange
from cbatch.runtime.gpu.ranks import Steps, finish, lockstep
from cbatch.runtime.options import Options
from reproduction.bench.async_loop import kernel_shares

pytestmark = TWO_GPUS
RANKS = 2
TRACED = (16, 46)
"""Iterations whose kernels are traced."""
TWO = Options(tensor_parallel=RANKS)


def exchanges(spec: ModelSpec) -> list[Exchange]:
    [group] = choose_devices(1, RANKS)
    made = exchanges_of(spec, Limits(64, 512, 512), Layers(0, 1, 2), group)
    synchronize([group])
    for exchange in made:
        exchange.start()
    synchronize([group])
    return made


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("rows", [1, 32, 64, 300])
def test_both_ranks_normalise_the_same_sum(rows: int, captured: bool) -> None:
    """The ranks share the inputs of a product: few rows take the product's kernel, many the library's and a push."""
    made, inputs, width = exchanges(SLICE), 2048, SLICE.hidden_size
    random = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, generator=random).bfloat16() for size in ((rows, 2 * inputs), (width, 2 * inputs)))
    residual = torch.randn(rows, width, generator=random).bfloat16()
    devices = [exchange.arrived.device for exchange in made]
    outputs = [[residual.to(device) for _ in range(2)] for device in devices]

    def meet(rank: int) -> Steps[None]:
        """Both meetings of an iteration of one layer: the next iteration begins where this one did."""
        part, device = slice(rank * inputs, (rank + 1) * inputs), devices[rank]
        product = Product(weight[:, part].contiguous().to(device), 132, dependent=True)
        mine, norm = x[:, part].contiguous().to(device), torch.ones(width, device=device)
        yield
        for number in range(2):
            meeting = made[rank].meeting(number)
            parts = product(mine, meeting)
            yield
            add_norm(parts, outputs[rank][number], norm, 1e-5, dependent=True, meeting=meeting)

    finish(lockstep([meet(rank) for rank in range(RANKS)], [exchange.arrived for exchange in made]))
    synchronize([devices])
    if captured:
        graphs = [torch.cuda.CUDAGraph() for _ in devices]
        streams = [torch.cuda.Stream(device) for device in devices]
        for rank, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            steps = meet(rank)
            next(steps)
            synchronize([devices])
            with torch.cuda.stream(stream):
                graph.capture_begin()
                finish(steps)
                graph.capture_end()
        for _ in range(3):
            for stream, mine in zip(streams, outputs, strict=True):
                with torch.cuda.stream(stream):
                    for output in mine:
                        output.copy_(residual)
                    stream.synchronize()
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        synchronize([devices])
    whole = residual.double() + x.double() @ weight.double().T
    first, second = ([output.cpu() for output in mine] for mine in outputs)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert float((one.double() - whole).norm() / whole.norm()) < 0.01


def test_the_likeliest_token_of_all_shares_and_the_lowest_of_equals() -> None:
    made, rows = exchanges(SLICE), 5
    logits = torch.randn(rows, SLICE.vocab_size)
    logits[1, 77] = logits[1, 20000] = logits[1, 31999] = 9.0
    logits[2, 20000] = logits[2, 16000] = 9.0
    out = [torch.zeros(rows, dtype=torch.int32, device=exchange.arrived.device) for exchange in made]
    meetings = [exchange.meeting(0) for exchange in made]
    for exchange, meeting in zip(made, meetings, strict=True):
        share = logits[:, exchange.rank.share(SLICE.vocab_size)].contiguous().to(exchange.arrived.device)
        with torch.cuda.device(exchange.arrived.device):
            search_share(share, exchange, meeting)
    for exchange, meeting, tokens in zip(made, meetings, out, strict=True):
        with torch.cuda.device(exchange.arrived.device):
            choose_share(tokens, exchange, meeting)
    expected = logits.argmax(-1).tolist()
    assert expected[1:3] == [77, 16000]
    assert [tokens.tolist() for tokens in out] == [expected, expected]


def test_the_residual_stream_has_the_same_bits_on_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def noted(parts, residual, *arguments, **options):  # type: ignore[no-untyped-def]
        made = add_norm(parts, residual, *arguments, **options)
        seen[residual.device.index].append(residual.clone())
        return made

    limits = Limits(4, 256, 256, tile=32)
    executor = gpu.build(SLICE, limits, KVSize(64, BLOCK_SIZE), replace(TWO, graphs="off"))
    monkeypatch.setattr(fused_model, "add_norm", noted)
    references = [
        Reference(torch.randint(32000, (length,)).tolist(), greedy_references(TINY_LLAMA)[0].sampling, [])
        for length in (3, 90, 200)
    ]
    serve(executor, POLICIES["sarathi"](), references, 64, asynchronous=True, limits=limits)
    synchronize(choose_devices(1, RANKS))
    assert len(seen[0]) == len(seen[1]) > 50
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(seen[0], seen[1], strict=True))
    executor.close()


@pytest.mark.alone
def test_kernels_of_both_gpus_are_traced(checkpoints: Path) -> None:
    limits = Limits(4, 256, 128, tile=32)
    executor = gpu.build(with_same_weights(TINY_LLAMA, checkpoints), limits, KV, TWO)
    server = Server(executor, limits, UnitCost(), KV, True)
    shares = kernel_shares(server, [Request(id_, 20, 64, prompt=[id_ + 1] * 20) for id_ in range(4)], TRACED)
    executor.close()
    assert len(shares) == RANKS and all(0 < share <= 1 for share in shares)


def test_what_cannot_be_shared_out_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "free_memory", lambda device: int(120e9))  # other processes may have some of it
    with pytest.raises(ConfigError, match="on GPUs only the fused models can be split"):
        gpu.check_fits(TINY_NANOGPT, LIMITS, KV, TWO)
    with pytest.raises(ConfigError, match="tensor_parallel=3 does not divide the 4 attention heads of model=gpu-llama"):
        gpu.check_fits(TINY_LLAMA, LIMITS, KV, replace(TWO, tensor_parallel=3))
    huge = replace(LARGE, num_layers=4000)
    with pytest.raises(CapacityError, match=r"^each rank of model llama-3\.1-8b needs"):
        gpu.check_fits(huge, LIMITS, KV, TWO)
    assert gpu.kv_tokens_beside(LARGE, LIMITS, TWO) > 1.5 * gpu.kv_tokens_beside(LARGE, LIMITS)
