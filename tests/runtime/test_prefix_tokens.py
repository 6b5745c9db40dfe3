"""With a prefix cache, requests that share prompts and answers get the tokens of `generate`, at every depth of the pipeline.

Evicted blocks are lost, or go to host memory; streams go on in any order, and every access to KV blocks and slots is checked for races.
"""

import random
from typing import Any

import pytest
from any_order import any_order
from fuzz_policy import FuzzPolicy
from rig import Ask, build, threads
from tiny_models import DEEP, LLAMA, LONGEST_OUTPUT, QWEN3, greedy_references

from cbatch.model import ModelSpec
from policies.evictions import LRU


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "num_stages", "num_ranks", "asynchronous"),
    [
        (LLAMA, 1, 1, False),
        (LLAMA, 1, 1, True),
        (QWEN3, 1, 1, True),
        (LLAMA, 2, 1, True),
        (DEEP, 4, 1, True),
        (LLAMA, 1, 2, True),
    ],
)
def test_shared_prompts_and_answers(spec: ModelSpec, num_stages: int, num_ranks: int, asynchronous: bool) -> None:
    found = again = evicted = copied = accepted = 0
    for seed in range(4):
        numbers, references = random.Random(seed), greedy_references(spec)
        shared = numbers.sample(range(len(references)), 3)
        asks = [
            Ask(
                numbers.choice(shared),
                max_new_tokens=LONGEST_OUTPUT - answered,
                stop_at=numbers.choice([None, None, *range(LONGEST_OUTPUT - answered)]),
                arrival_iteration=3 * id_,
                answered=answered,
            )
            for id_, answered in enumerate(numbers.choice((0, numbers.randint(1, 15))) for _ in range(10))
        ]
        rig = build(
            any_order(numbers, num_stages) if seed % 2 else threads(num_stages),
            FuzzPolicy(seed),
            asks,
            references,
            spec=spec,
            asynchronous=asynchronous,
            num_stages=num_stages,
            num_ranks=num_ranks,
            num_blocks=numbers.choice((15, 24, 200)) if seed < 2 else 15,
            block_size=numbers.choice((4, 5)),
            poison=True,
            check=True,
            prefix_cache=LRU(),
            num_host_blocks=(0, 0, 4, 60)[seed],
            max_drafts=seed,
        )
        rig.run()
        found += sum(request.num_cached_tokens for request in rig.requests)
        again += sum(request.num_cached_again for request in rig.requests)
        accepted += sum(step.num_accepted for step in rig.engine.record.steps)
        pool: Any = rig.engine.state.pool
        evicted += pool.num_evicted
        copied += pool.host.num_back
    assert found and again and evicted and copied and accepted
