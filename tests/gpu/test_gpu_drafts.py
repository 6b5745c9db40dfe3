"""On GPUs, with drafts, of which some are wrong, each request gets the tokens that it gets alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_models import BLOCK_SIZE, LIMITS, TINY_LLAMA, TINY_QWEN3, with_same_weights
from guesses import Guesses, Speculating
from poison import poisoned
from schedules import UnitCost
from test_gpu_tokens import AMPLE, LAYOUTS, POLICIES, SCARCE, expected_of
from tiny_models import LONGEST_OUTPUT, greedy_references, sampled_references

from cbatch import Server
from cbatch.arrivals import Listed
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.options import Options


@pytest.mark.parametrize(("num_stages", "num_ranks"), LAYOUTS)
@pytest.mark.parametrize("graphs", ["off", "all"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("spec", [TINY_LLAMA, TINY_QWEN3], ids=lambda spec: spec.name)
def test_every_policy_with_drafts_gives_the_same_tokens(
    spec: ModelSpec, sampled: bool, graphs: Any, num_stages: int, num_ranks: int, checkpoints: Path
) -> None:
    """Greedy and drawn tokens; with graphs, every iteration replays one."""
    references = sampled_references(spec) if sampled else greedy_references(spec)
    limits = replace(LIMITS, num_stages=num_stages, max_drafts=3)
    options = Options(graphs=graphs, tensor_parallel=num_ranks)
    size = KVSize(AMPLE, BLOCK_SIZE)
    executor = poisoned(gpu.build, with_same_weights(spec, checkpoints), limits, size, options)
    num_drafts = num_accepted = 0
    for name, make in POLICIES.items():
        for asynchronous, num_blocks in ((False, AMPLE), (True, AMPLE), (True, SCARCE)):
            requests = [each.request(index, 1 + index % LONGEST_OUTPUT) for index, each in enumerate(references)]
            kv, drafter = KVSize(num_blocks, BLOCK_SIZE), Guesses(references)
            policy = make() if name == "fuzz" else Speculating(make())
            server = Server(executor, limits, UnitCost(), kv, asynchronous, drafter=drafter)
            record = server.serve(policy, Listed(requests, {index: index // 2 for index in range(len(requests))}))
            what = f"{name}, asynchronous={asynchronous}, {num_blocks} blocks"
            assert [request.output for request in requests] == expected_of(references), what
            num_drafts += sum(step.num_drafts for step in record.steps)
            num_accepted += sum(step.num_accepted for step in record.steps)
    executor.close()
    assert num_drafts > num_accepted > 100
    assert (executor.iteration.num_eager == 0) == (graphs == "all")
