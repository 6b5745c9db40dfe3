"""Two stages on two GPUs: peer stores, equal bits in bfloat16, and clocks that agree; tokens are in `test_gpu_tokens`."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from gpu_models import BLOCK_SIZE, LARGE, SLICE, TWO_GPUS
from schedules import UnitCost

from cbatch import Limits, Request, Server
from cbatch.errors import CapacityError
from cbatch.kv import KVSize
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.gpu.devices import CudaClock, choose_devices
from cbatch.runtime.gpu.peers import send
from cbatch.runtime.options import Options
from policies.chunking import TileAligned
from policies.sarathi import Sarathi

pytestmark = TWO_GPUS


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("here", [0, 1])
def test_what_leaves_a_stage_arrives_on_the_other_gpu(here: int, captured: bool) -> None:
    devices = [device for [device] in choose_devices(2)]
    mine, other = devices[here], devices[1 - here]
    with torch.cuda.device(mine):
        stream = torch.cuda.Stream()
        parts = torch.randn(3, 33, 4096, device=mine).bfloat16()
        values = torch.randn(33, 4096, device=mine).bfloat16()
        logits = torch.randn(33, 32000, device=mine)
        hidden = torch.zeros(40, 4096, device=other)
        tokens = torch.full((40,), -1, dtype=torch.int32, device=other)

        for device in devices:
            torch.cuda.synchronize(device)  # `stream` does not wait for what fills these buffers

        def leave() -> None:
            send(values, hidden[:33], parts=parts)
            argmax(logits, tokens[:33])

        with torch.cuda.stream(stream):
            leave()
            stream.synchronize()
            if captured:
                hidden.zero_()
                tokens.fill_(-1)
                torch.cuda.synchronize(other)
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                leave()
                graph.capture_end()
                graph.replay()
                stream.synchronize()
    total = values.float()
    for part in parts:
        total = total + part.float()
    assert torch.equal(hidden[:33].cpu(), total.cpu()) and not hidden[33:].any()
    assert torch.equal(tokens[:33].cpu().long(), logits.argmax(-1).cpu()) and bool((tokens[33:] == -1).all())
    with torch.cuda.device(mine):
        send(torch.full((1,), 7, dtype=torch.int32, device=mine), tokens[39:])  # a batch of one: a single drawn token
        torch.cuda.synchronize(mine)
    assert tokens[38:].tolist() == [-1, 7]


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_two_gpus_compute_the_bits_of_one(sizes: tuple[int, int]) -> None:
    """Every iteration has the shape of the same graph on one GPU and on two, so rounding is the same."""
    outputs = []
    for num_stages in (1, 2):
        limits = Limits(8, 512, 512, num_stages=num_stages, graph_sizes=(256,))
        options = Options(layers=sizes if num_stages == 2 else None)
        executor = gpu.build(SLICE, limits, KVSize(80, 128), options)
        random = torch.Generator().manual_seed(3)
        prompts = [torch.randint(32000, (length,), generator=random).tolist() for length in (1, 40, 130, 257, 300)]
        requests = [Request(id_, len(prompt), 40, prompt=prompt) for id_, prompt in enumerate(prompts)]
        for request in requests:  # one at a time: the same shapes in both
            Server(executor, limits, UnitCost(), KVSize(80, 128), False).serve(Sarathi(TileAligned(128)), [request])
        outputs.append([request.output for request in requests])
        executor.close()
        del executor
    assert outputs[0] == outputs[1]
    assert len({token for output in outputs[0] for token in output}) > 10


def test_both_gpus_work_at_the_same_time() -> None:
    """Two iterations in flight take turns in the stages: each is in one while the other is in the other."""
    limits = Limits(8, 1024, 1024, num_stages=2)
    executor = gpu.build(replace(SLICE, num_layers=24), limits, KVSize(200, 128))
    requests = [Request(id_, 600, 60, prompt=[id_ + 1] * 600) for id_ in range(16)]
    record = Server(executor, limits, UnitCost(), KVSize(200, 128)).serve(Sarathi(TileAligned(256)), requests)
    executor.close()
    steps = record.steps[10:-10]
    overlapping = sum(later.started < step.ended for step, later in pairwise(steps))
    assert overlapping > 0.9 * len(steps)


@pytest.mark.alone
def test_clocks_agree_on_the_time_of_an_event() -> None:
    """Compares two clocks of one GPU, and clocks of two GPUs: an event that waits for another GPU's is not earlier."""
    [here], [there] = choose_devices(2)
    streams = [torch.cuda.Stream(device) for device in (here, there)]
    clocks = [CudaClock(here), CudaClock(here), CudaClock(there)]
    events = [torch.cuda.Event(enable_timing=True) for _ in streams]
    events[0].record(streams[0])
    streams[1].wait_event(events[0])
    events[1].record(streams[1])
    events[1].synchronize()
    first, again, after = (clock.time_of(event) for clock, event in zip(clocks, (events[0], *events), strict=True))
    assert abs(again - first) < 5e-5 and -5e-5 < after - first < 5e-4


def test_a_gpu_short_of_memory_is_named() -> None:
    with pytest.raises(CapacityError, match=r"^stage 0 of model llama-3.1-8b needs .* lower kv_tokens to \d+$"):
        gpu.build(LARGE, Limits(32, 8192, 4096, num_stages=2), KVSize(200_000, 128))
    assert gpu.kv_tokens_beside(LARGE, Limits(32, 8192, 4096, num_stages=2)) > BLOCK_SIZE
