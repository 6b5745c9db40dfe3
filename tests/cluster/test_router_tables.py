"""All routers on small clusters: bursts of a cold prompt, one prefix for all prompts, wrong knowledge, and equal runs."""

import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from schedules import UnitCost

from cbatch import BatchShape, KVSize, Limits, Request, Server
from cbatch.cluster import Cluster, ClusterView, ReplicatedServer, RoundRobin, Router, Scaling
from cbatch.request import spec_of
from cbatch.sim import SimExecutor
from policies.evictions import LRU
from policies.orca import Orca
from policies.routers import ROUTERS, LlmD


class PerToken(UnitCost):
    """10 ms, and 1 ms per token."""

    def predict(self, shape: BatchShape) -> float:
        return 0.01 + 0.001 * shape.num_tokens


def serve(
    router: Router, requests: list[Request], kv: Sequence[int] = (4000,) * 4, staleness: float = 0.0, **options: Any
) -> Cluster:
    """kv: blocks of each replica."""
    cost = PerToken()
    servers = [
        Server(SimExecutor(cost), Limits(32, 9000, 9000), cost, KVSize(blocks, 16), False, prefix_cache=LRU())
        for blocks in kv
    ]
    cluster = ReplicatedServer(servers, router, staleness=staleness, **options).engine(Orca(), requests)
    cluster.run()
    return cluster


def shared(number: int, common: int, own: int, apart: float) -> list[Request]:
    """Returns prompts of some common blocks, then own ones, each in a session of its own; they arrive `apart` seconds apart."""
    hashes = [(*range(common), *range(1000 * id_, 1000 * id_ + own)) for id_ in range(1, number + 1)]
    return [
        Request(id_, 16 * len(ids), 8, arrival_time=apart * id_, session=f"{id_}", prefix_hashes=ids, hash_block=16)
        for id_, ids in enumerate(hashes)
    ]


COMPUTED = {
    "round_robin": (4, 4),
    "random": (3, 3),
    "least_loaded": (4, 4),
    "power_of_two": (4, 4),
    "bounded_loads": (3, 3),
    "session_hash": (2, 2),
    "cache_aware": (1, 1),
    "prefix_aware": (1, 1),
    "kv_aware": (1, 2),
    "load_aware": (4, 4),
    "dynamo": (1, 4),
    "llm_d": (1, 4),
    "preble": (1, 1),
    "lmetric": (1, 4),
    "shortest_ttft": (1, 4),
}
"""How often four equal cold prompts within 0.6 s are computed, by what the router reads: reports at once, or 1 s old."""


@pytest.mark.parametrize("name", ROUTERS)
def test_how_often_a_cold_burst_is_computed(name: str) -> None:
    """A replica reports a block when the iteration that computes it begins, 0.2 s before the next request.

    A router that computes them once follows prefixes, which a run's notes say are in vain without a prefix cache.
    """
    numbers = []
    for staleness in (0.0, 1.0):
        cluster = serve(ROUTERS[name](), shared(4, 62, 0, 0.2), staleness=staleness)
        numbers.append(sum(not request.num_cached_tokens for request in cluster.record.requests))
    assert (*numbers,) == COMPUTED[name]
    assert numbers[0] > 1 or "prefix_cache" in ROUTERS[name].depends_on  # type: ignore[attr-defined]


FLOODS = {"cache_aware", "prefix_aware", "kv_aware", "preble"}
"""Routers that send all prompts with one common prefix to one replica: the prefix outweighs loads, here below `balance_abs`."""


@pytest.mark.parametrize("name", ROUTERS)
def test_one_prefix_of_all_prompts(name: str) -> None:
    """40 prompts that share 60%, on four replicas: the mean TTFT of routers that see loads is at most 1.7 times round robin's."""
    ttfts, most = [], 0
    for router in (RoundRobin(), ROUTERS[name]()):
        cluster = serve(router, shared(40, 60, 40, 0.2))
        requests = cluster.record.requests
        ttfts.append(sum((request.first_token_at or 0.0) - request.arrival_time for request in requests))
        most = max(Counter(cluster.replica_of.values()).values())
    if name in FLOODS:
        assert most == 40 and ttfts[1] > 10 * ttfts[0]
    else:
        assert most <= 13 and ttfts[1] < (2.2 if name in ("random", "session_hash") else 1.7) * ttfts[0]


@pytest.mark.parametrize("name", ROUTERS)
def test_two_runs_are_equal(name: str) -> None:
    """Some requests arrive at one time, some end while others arrive; the KV cache is small enough to evict."""
    numbers = random.Random(1)
    times = sorted(numbers.choice((0.0, 0.5, numbers.uniform(0, 9))) for _ in range(60))
    requests = [replace(spec_of(each), arrival_time=at) for each, at in zip(shared(60, 6, 9, 0), times, strict=True)]

    def run() -> tuple[object, ...]:
        cluster = serve(ROUTERS[name](), [*map(Request.from_spec, requests)], (120,) * 3, 0.05)
        ends = [(request.id, request.finished_at, request.num_cached_tokens) for request in cluster.record.requests]
        return cluster.replica_of, ends, cluster.record.steps, cluster.record.replicas

    assert pickle.dumps(run()) == pickle.dumps(run())


class Pauses:
    """A second replica, but from 8 s to 16 s."""

    def wanted(self, view: ClusterView) -> int:
        return 1 if 8 <= view.now < 16 else 2


FOLLOWERS = {name: make for name, make in ROUTERS.items() if "prefix_cache" in getattr(make, "depends_on", ())}


@pytest.mark.parametrize("make", [*FOLLOWERS.values(), lambda: LlmD(approximate=True)])
def test_what_a_replica_had_before_it_started_again_does_not_count(make: Callable[[], Router]) -> None:
    """The first prompt fits the second replica only, which drains at 8 s with the 20 blocks that the last prompt asks for, and is back
    at 17 s without them. The first replica has 15 of them, from the prompt of 10 s: 240 of 352 tokens.
    """
    hashes = [(*range(20), *range(100, 120)), (*range(15), 200), (*range(20), 300, 301)]
    requests = [
        Request(id_, 16 * len(blocks), outputs, arrival_time=at, prefix_hashes=blocks, hash_block=16)
        for id_, (blocks, outputs, at) in enumerate(zip(hashes, (400, 8, 8), (0.0, 10.0, 20.0), strict=True))
    ]
    scaling = Scaling(Pauses(), tick=8.0, start_seconds=1.0, down_after=0.0)
    cluster = serve(make(), requests, (60, 4000), scaling=scaling)
    assert cluster.replica_of == {0: 1, 1: 0, 2: 0}
    assert [request.num_cached_tokens for request in requests] == [0, 0, 240]
    assert [(life.replica, life.ready) for life in cluster.record.lives] == [(0, 0.0), (1, 0.0), (1, 17.0)]
