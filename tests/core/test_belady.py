"""One at a time and in open loop no choice of blocks finds more than Belady's.

python -m pytest tests/core/test_belady.py --workloads=10000
"""

from functools import cache
from itertools import chain, combinations
from random import Random

import pytest
from contended import LinearCost
from test_prefix_cache import EVICTIONS

from cbatch import Eviction, Limits, Plan, Policy, Request, Server, View
from cbatch.kv import KVSize, blocks_for
from cbatch.sim.executor import SimExecutor
from policies.evictions import Belady
from policies.request_level import RequestLevel


class BlockByBlock:
    """One request at a time, which takes a block when its next token needs one."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        if not view.running and view.waiting:
            plan.add(view.waiting[0])
        return plan.build()


def draw(numbers: Random) -> list[Request]:
    """Prompts that repeat, cut or continue earlier prompts, some of them of sessions."""
    requests, texts = list[Request](), [[0]]
    for id_ in range(numbers.randint(5, 9)):
        text = numbers.choice(texts)
        prompt = text[: numbers.choice((numbers.randint(1, len(text)), len(text)))]
        texts.append((prompt + numbers.choices(range(2), k=numbers.choice((0, 1, 3))))[:10])
        fields = {"prompt": texts[-1], "session": numbers.choice(("a", "b", None))}
        requests.append(Request(id_, len(texts[-1]), numbers.choice((1, 1, 2, 4)), **fields))
    return requests


def most_found(requests: list[Request], kv: KVSize, whole: bool) -> int:
    """Tries every set of blocks that can outlive each request. whole: a request takes all its blocks at its admission."""
    num_blocks, size, _ = kv
    texts = [tuple(request.prompt or ()) for request in requests]
    findable = [[text[:end] for end in range(size, len(text), size)] for text in texts]

    @cache
    def best(index: int, cached: frozenset[tuple[int, ...]]) -> int:
        if index == len(texts):
            return 0
        text, ahead, num_found = texts[index], {*chain(*findable[index + 1 :])}, 0
        while num_found < len(findable[index]) and findable[index][num_found] in cached:
            num_found += 1
        held = {*findable[index][:num_found]}
        own = {text[:end] for end in range(size, len(text) + 1, size)}
        longest = requests[index].max_tokens
        room = num_blocks - blocks_for(longest if whole else longest - 1, size)
        room_of_prompt = room if whole else num_blocks - blocks_for(len(text), size)
        most, others = 0, sorted((cached & ahead) - own)
        for kept in chain.from_iterable(combinations(others, number) for number in range(min(room, len(others)) + 1)):
            before = {each[:end] for each in kept for end in range(size, len(each) + 1, size)}
            closed = (
                before <= {*kept} | own
            )  # only leaves are evicted, and its own blocks are computed after the first evictions
            if closed and len(before - held) <= room_of_prompt:
                most = max(most, best(index + 1, frozenset(kept) | own & ahead))
        return num_found * size + most

    return best(0, frozenset())


def tokens_found(requests: list[Request], kv: KVSize, policy: Policy, eviction: Eviction) -> int:
    limits = Limits(1, 40, 40)
    server = Server(SimExecutor(LinearCost()), limits, LinearCost(), kv, False, prefix_cache=eviction)
    server.engine(policy, requests).run()
    return sum(request.num_cached_tokens for request in requests)


@pytest.mark.long
@pytest.mark.parametrize("policy", [RequestLevel, BlockByBlock])
def test_no_choice_finds_more_than_belady(policy: type[Policy], num_workloads: int) -> None:
    num_above = 0
    for seed in range(max(num_workloads, 40)):
        longest = max(request.max_tokens for request in draw(Random(seed)))
        size = 1 + seed % 3
        kv = KVSize(blocks_for(longest, size) + seed % 5, size)
        found = [tokens_found(draw(Random(seed)), kv, policy(), make()) for make in (Belady, *EVICTIONS)]
        most = most_found(draw(Random(seed)), kv, policy is RequestLevel)
        assert found[0] == most >= max(found), f"workload {seed}"
        num_above += min(found) < most
    assert num_above > 1, "evictions differ"
