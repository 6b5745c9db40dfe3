"""Prompts that begin alike, and how much of them a cache that evicts nothing holds."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbatch import CostFunction, KVSize, Limits, Request, Server, WorkloadError
from cbatch.sim import SimExecutor
from experiments.workloads import AllAtOnce, Chat, FixedLengths, GammaArrivals, PrefixGroups
from policies.evictions import LRU
from policies.orca import Orca

LENGTHS = FixedLengths(length=30, pd_ratio=2)  # 20 + 10 tokens
WORDS: Any = SimpleNamespace(size=100, stop_tokens=())


def found(requests: list[Request], block_size: int = 8) -> list[int]:
    cost = CostFunction(lambda shape: 0.01)
    server = Server(SimExecutor(cost), Limits(4, 5000, 2000), cost, KVSize(5000, block_size), prefix_cache=LRU())
    server.serve(Orca(), requests)
    return [request.num_cached_tokens for request in requests]


def test_a_group_shares_a_prefix() -> None:
    workload = PrefixGroups(num_requests=60, groups=3, prefix=64, arrivals=GammaArrivals(rate=0.1), lengths=LENGTHS)
    requests = list(workload.requests(None))
    assert {(each.num_prompt_tokens, each.max_new_tokens) for each in requests} == {(84, 10)}
    groups = [each.prefix_hashes for each in requests]
    assert sorted(Counter(groups)) == [(0,), (1,), (2,)] and min(Counter(groups).values()) > 10
    assert found(requests) == [64 * (group in groups[:place]) for place, group in enumerate(groups)]
    assert groups[:3] * 20 != groups, "at random, not in turn"
    prompts = [each.prompt or () for each in workload.requests(WORDS)]
    for (group, first), (other, second) in pairwise(zip(groups, prompts, strict=True)):
        assert (first[:64] == second[:64]) == (group == other) and first[64:] != second[64:]


@pytest.mark.parametrize(
    "workload",
    [
        PrefixGroups(num_requests=9, groups=3, prefix=64, arrivals=GammaArrivals(rate=0.1), lengths=LENGTHS),
        Chat(closed=False, num_requests=8, turns=4, system=16, pause=5.0, arrivals=AllAtOnce(), lengths=LENGTHS),
        Chat(num_requests=8, turns=4, system=16, pause=5.0, arrivals=AllAtOnce(), lengths=LENGTHS),
    ],
    ids=["groups", "chat", "closed"],
)
def test_another_seed_has_other_prefixes(workload: Any) -> None:
    drawn = [replace(workload, seed=seed).source(WORDS) for seed in (0, 1)]
    starts = [{tuple(each.prompt[:16]) for each in arrivals.due(0.0, 0)} for arrivals in drawn]
    assert starts[0] and not starts[0] & starts[1]


@pytest.mark.parametrize(
    "given",
    [{"sessions": 5}, {"steady": True}, {"sessions": 5, "steady": True}, {"too_long": "clip", "max_length": 90}],
)
def test_an_open_loop_of_chats_refuses_keys_that_it_does_not_read(given: dict[str, Any]) -> None:
    with pytest.raises(
        WorkloadError, match=r"not read by an open loop, workload\.closed=false; leave (it|them) out$"
    ) as raised:
        Chat(closed=False, arrivals=AllAtOnce(), lengths=LENGTHS, **given)
    assert all(f"workload.{name}" in str(raised.value) for name in given)


def test_a_turn_holds_the_turns_and_answers_before() -> None:
    """The first 16 + 30 k tokens of turn k were there before; the last of them was never in the cache."""
    workload = Chat(closed=False, num_requests=8, turns=4, system=16, pause=50.0, arrivals=AllAtOnce(), lengths=LENGTHS)
    requests = list(workload.requests(None))
    by_chat = [[each for each in requests if each.session == name] for name in ("0", "1")]
    for chat in by_chat:
        assert [each.num_prompt_tokens for each in chat] == [36, 66, 96, 126]
        assert (np.diff([each.arrival_time for each in chat]) > 1).all()
    found(requests)
    for number, chat in enumerate(by_chat):
        assert [each.num_cached_tokens for each in chat[1:]] == [(16 + 30 * turn - 1) // 8 * 8 for turn in (1, 2, 3)]
        assert chat[0].num_cached_tokens in (0, 16 * number)
    first, second = (
        each.prompt for each in list(workload.requests(WORDS)) if each.session == "1" and each.num_prompt_tokens < 90
    )
    assert first is not None and second is not None and second[: len(first)] == first
    assert {each.prompt[:16] == first[:16] for each in workload.requests(WORDS) if each.prompt} == {True}
