"""Policies see vLLM's prefix cache through the attributes of this project's: compared with vLLM's own KV cache manager."""

import random
from typing import Any

import pytest
from fuzz_policy import FuzzPolicy
from test_vllm_fuzz import Clients, run
from vllm_rig import Rig

from cbatch import Limits, Plan, Policy, Request, View
from cbatch.vllm import Adapter
from policies.chunking import Fixed
from policies.dlpm import DLPM
from policies.prefix_order import PrefixOrder


class Comparing(FuzzPolicy):
    """At random plans; compares what it sees of waiting requests with what vLLM would find for them."""

    rig: Any
    num_found = num_shared = 0

    def plan(self, view: View) -> Plan:
        manager = self.rig.scheduler.kv_cache_manager
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        assert view.kv.num_cached == sum(block.block_hash is not None for block in free)
        for request in view.waiting:
            source: Any = request.source  # type: ignore[attr-defined]
            blocks, num_tokens, *_ = manager.get_computed_blocks(source)
            shared = sum(block.ref_cnt > 0 for block in blocks.blocks[0])
            names = view.kv.block_hashes(request)
            assert (request.num_computed, request.num_ready) == (num_tokens, source.num_tokens - num_tokens)
            assert view.kv.num_shared(request) == shared and len(names) == source.num_tokens // view.kv.block_size
            assert view.kv.num_gained([], [request]) == 0
            self.num_found, self.num_shared = self.num_found + num_tokens, self.num_shared + shared
        return super().plan(view)


def rig_of(policy: Policy, numbers: random.Random, num_blocks: int, asynchronous: bool) -> Rig:
    limits = Limits(numbers.randint(2, 6), numbers.randint(8, 64), 60)
    return Rig(Adapter(policy), limits, num_blocks, 4, asynchronous=asynchronous, prefix_cache=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_policy_sees_what_vllm_finds(asynchronous: bool, num_runs: int, draw: int) -> None:
    found = shared = 0
    for seed in range(draw, draw + num_runs):
        numbers = random.Random(seed)
        policy = Comparing(seed, preempts=numbers.choice((0, 0.05, 0.2)))
        policy.rig = rig = rig_of(policy, numbers, numbers.randint(16, 40), asynchronous)
        run(rig, Clients(numbers))
        found, shared = found + policy.num_found, shared + policy.num_shared
    assert num_runs < 5 or (found and shared)


def first_served(policy: Policy, prompts: dict[int, list[int]], clients: dict[int, str]) -> list[int]:
    """Serves request 0 to its end, then the others, which arrive together, one at a time; returns the order of their first tokens."""
    rig = Rig(Adapter(policy), Limits(1, 64, 60), 40, 4, prefix_cache=True)
    order: dict[int, None] = {}
    for ids in ([0], [id_ for id_ in prompts if id_]):
        for id_ in ids:
            request = Request(id_, len(prompts[id_]), 1, prompt=prompts[id_], client=clients.get(id_))
            rig.scheduler.add_request(rig.request(request))
        while rig.scheduler.has_requests():
            outputs = rig.step()
            order |= {int(output.request_id): None for group in outputs.values() for output in group.outputs}
    return [id_ for id_ in order if id_]


def test_orders_by_prefix_work_in_vllm() -> None:
    """0 leaves 16 tokens of s: 3 finds all of them, 2 a half, 1 nothing. In 4 blocks more, 0's client has spent its deficit."""
    s = list(range(100, 116))
    prompts = {0: [*s, 1], 1: list(range(200, 220)), 2: [*s[:8], *range(300, 312)], 3: [*s, *range(400, 404)]}
    assert first_served(PrefixOrder(Fixed(64)), prompts, {}) == [3, 2, 1]
    assert first_served(PrefixOrder(Fixed(64), "spf"), prompts, {}) == [3, 2, 1]
    poor = DLPM(Fixed(64), quantum=8)  # the first admission costs client a 17 tokens
    assert first_served(poor, prompts, {0: "a", 1: "b", 2: "a", 3: "a"}) == [1, 3, 2]
    assert first_served(DLPM(Fixed(64), quantum=1e6), prompts, {0: "a", 1: "b", 2: "a", 3: "a"}) == [3, 2, 1]
