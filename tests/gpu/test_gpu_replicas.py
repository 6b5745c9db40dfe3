"""Replicas on GPUs of their own: the tokens of `generate`; and links, timed."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import LARGE, LIMITS, TINY_LLAMA, TWO_GPUS, with_same_weights
from schedules import UnitCost
from test_gpu_tokens import KV, POLICIES, expected_of
from tiny_models import LONGEST_OUTPUT, greedy_references

from cbatch import Server
from cbatch.cluster import LiveCluster, ReplicatedServer, RoundRobin
from cbatch.model import ModelSpec
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options
from cbatch.sim.interpolation import PiecewiseLinear
from experiments.profile.copies import MOVED, block_times
from experiments.profile.links import TOKENS, link_times

pytestmark = TWO_GPUS


def serve_by_replicas(spec: ModelSpec, options: Options, num_gpus: int) -> None:
    """Two replicas of `num_gpus` each: every request has its tokens, and both serve half of them at the same time."""
    references = greedy_references(TINY_LLAMA)
    with ExitStack() as opened:
        servers = []
        for replica in range(2):
            with torch.cuda.device(replica * num_gpus):
                executor = gpu.build(spec, LIMITS, KV, options)
            opened.callback(executor.close)
            assert executor.iteration.caches[0].keys.device.index == replica * num_gpus
            servers.append(Server(executor, LIMITS, UnitCost(), KV, True))
        for policy in ("prefill_first", "sarathi"):
            requests = [
                reference.request(index, 1 + index % LONGEST_OUTPUT) for index, reference in enumerate(references)
            ]
            cluster = ReplicatedServer(servers, RoundRobin(), cluster=LiveCluster).engine(POLICIES[policy](), requests)
            cluster.run()
            assert [request.output for request in requests] == expected_of(references), policy
            one, other = (engine.record.steps for engine in cluster.engines)
            assert abs(len(cluster.engines[0].record.requests) - len(requests) / 2) <= 0.5
            assert one[0].planned_at < other[-1].received_at and other[0].planned_at < one[-1].received_at


@pytest.mark.parametrize("graphs", ["off", "all"])
def test_replicas_serve_on_gpus_of_their_own(graphs: Any, checkpoints: Path) -> None:
    serve_by_replicas(with_same_weights(TINY_LLAMA, checkpoints), Options(graphs=graphs), 1)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
def test_replicas_of_two_ranks(checkpoints: Path) -> None:
    serve_by_replicas(with_same_weights(TINY_LLAMA, checkpoints), Options(tensor_parallel=2), 2)


@pytest.mark.alone
def test_links_are_timed() -> None:
    """Against the bytes of 16-bit hidden states: microseconds for a token, and more for as many as fill a GPU."""
    spec = replace(TINY_LLAMA, hidden_size=4096, dtype="bfloat16")
    links = link_times(spec, 2)
    for curve in (links.within_node, links.all_reduce[2]):
        assert isinstance(curve, PiecewiseLinear)
        assert list(curve.sizes) == [tokens * 8192 for tokens in TOKENS]
        assert 5e-7 < curve.seconds[0] < 1e-4 and 2e-4 < curve.seconds[-1] < 1e-2
    blocks = block_times(LARGE)
    assert list(blocks.sizes) == [number * 128 * LARGE.kv_bytes_per_token for number in MOVED]
    assert 1e-5 < blocks.seconds[0] < 5e-3 and blocks.sizes[-1] / blocks.seconds[-1] > 5e10
