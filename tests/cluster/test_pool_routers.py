"""Routers of pools: the cluster's router chooses a pool, the pool's own one of its replicas. Assignments are by hand."""

from pathlib import Path
from typing import Any

import pytest
from schedules import UnitCost

from cbatch import CbatchError, Limits, PolicyError, Request, Server
from cbatch.cluster import ClusterView, LeastLoaded, Moves, PoolRouters, ReplicatedServer, Role, RoundRobin, Router
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from cbatch.sim.roofline import Affine
from experiments.api import serve, simulate
from experiments.settings.compose import compose_sweep
from experiments.settings.settings import read_settings
from policies.evictions import LRU
from policies.orca import Orca
from policies.routers import BoundedLoads

POOLS = ["small", "large", "large"]


class ByLength:
    """Prompts of more than 20 tokens to the large pool, by its first replica."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        return 1 if request.num_prompt_tokens > 20 else 0

    def on_end(self, request: Request) -> None:
        self.ended.append(request.id)


class Told(LeastLoaded):
    """Keeps what it sees of its pool, and the requests whose ends it was told."""

    def __init__(self) -> None:
        super().__init__(tokens=True)
        self.seen: set[tuple[Any, ...]] = set()
        self.ended: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        pools = tuple(replica.pool for replica in view)
        self.seen.add((pools, tuple(view.fitting(request)), view.now == request.arrival_time, view.stage))
        return super().choose(request, view)

    def on_end(self, request: Request) -> None:
        self.ended.append(request.id)


class Unwanted:
    def choose(self, request: Request, view: ClusterView) -> int:
        raise AssertionError("one pool alone can serve the request")


def cluster_of(
    router: Router, prompts: list[int], pools: list[str] = POOLS, late: dict[int, float] | None = None, **options: Any
) -> Any:
    """Requests of two new tokens, 0.01 s apart unless `late` has their seconds; an iteration takes a second."""
    parts = Limits(4, 400, 400), UnitCost(), KVSize(400, 1)
    servers = [Server(SimExecutor(UnitCost()), *parts, prefix_cache=LRU()) for _ in pools]
    at = {**{id_: 0.01 * id_ for id_ in range(len(prompts))}, **(late or {})}
    requests = [Request(id_, prompt, 2, arrival_time=at[id_]) for id_, prompt in enumerate(prompts)]
    return ReplicatedServer(servers, router, pools, **options).engine(Orca(), requests)


def test_a_pools_router_chooses_inside_the_pool() -> None:
    """Outstanding tokens, 2 more than the prompt, of replicas 1 and 2 before each request of the large pool, with reports a second old:

    0 and 0: the prompt of 100 to 1; 102 and 0: 30 to 2; 102 and 32: 40 to 2; 102 and 74: 90 to 2; 102 and 166: 25 to 1.
    """
    router = PoolRouters(ByLength(), {"large": Told()})
    cluster = cluster_of(router, [100, 30, 5, 40, 8, 90, 25], staleness=1.0)
    cluster.run()
    assert cluster.replica_of == {0: 1, 1: 2, 2: 0, 3: 2, 4: 0, 5: 2, 6: 1}
    own = cluster.router.of_pools["large"]
    assert own.seen == {(("large", "large"), (0, 1), True, Role.PREFILL)}, "its replicas alone, numbered from 0"


def test_routers_are_told_the_ends_of_the_requests_they_were_asked_for() -> None:
    """The first three have ended when the last is routed at 10 s; of these the large pool served 0 and 2."""
    cluster = cluster_of(PoolRouters(ByLength(), {"large": Told()}), [30, 5, 40, 50], late={3: 10.0})
    cluster.run()
    assert sorted(cluster.router.router.ended) == [0, 1, 2] and sorted(cluster.router.of_pools["large"].ended) == [0, 2]


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_prefillers_and_decoders_have_routers_of_their_own(push: bool) -> None:
    """Prefillers 0 and 1 in turn. Decoders 2 and 3 by tokens: 12, then 42 beside none, then 22 beside 12, then 7 beside 34."""
    routers = PoolRouters(Unwanted(), {"p": RoundRobin(), "d": LeastLoaded(tokens=True)})
    roles = [Role.PREFILL] * 2 + [Role.DECODE] * 2
    moves, pools = Moves(1, Affine(0.0, 0.001), push), ["p", "p", "d", "d"]
    cluster = cluster_of(routers, [10, 40, 20, 5], pools, roles=roles, moves=moves, staleness=10.0)
    senders = {transfer.request: transfer.sender for transfer in cluster.run().transfers}
    assert senders == {0: 0, 1: 1, 2: 0, 3: 1} and cluster.replica_of == {0: 2, 1: 3, 2: 2, 3: 2}


def test_a_decode_pools_router_says_when_its_decoders_have_room() -> None:
    class Never(LeastLoaded):
        def accepts(self, room: object) -> bool:
            return False

    roles, moves = [Role.PREFILL, Role.DECODE, Role.DECODE], Moves(1, Affine(0.0, 0.0))
    routers = PoolRouters(RoundRobin(), {"d": Never()})
    cluster = cluster_of(routers, [10], ["p", "d", "d"], roles=roles, moves=moves)
    accepts = [engine.inbox.accepts for engine in cluster.engines]
    assert [getattr(each, "__self__", None) is cluster.router.of_pools["d"] for each in accepts] == [False, True, True]


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (
            2,
            r"router Fixed of pool large, request 0: choose\(\) returned 2; return an index of view.fitting\(request\)",
        ),
        (None, r"router Fixed of pool large, request 0: choose\(\) raised ZeroDivisionError: .*test_pool_routers.py"),
    ],
)
def test_a_pools_router_that_errs_is_named(chosen: int | None, says: str) -> None:
    class Fixed:
        def choose(self, request: Request, view: ClusterView) -> int:
            return chosen if chosen is not None else 1 // 0

    with pytest.raises(PolicyError, match=says):
        cluster_of(PoolRouters(ByLength(), {"large": Fixed()}), [50]).run()


def test_the_clusters_router_that_errs_is_named() -> None:
    class Outside(ByLength):
        def choose(self, request: Request, view: ClusterView) -> int:
            return 7

    with pytest.raises(PolicyError, match=r"router Outside, request 0: choose\(\) returned 7; .* from 0 to 2"):
        cluster_of(PoolRouters(Outside(), {"large": BoundedLoads()}), [50]).run()


def test_settings_give_each_pool_its_router() -> None:
    """Both pools in turn: the cluster's round robin names replicas 0, 1, 2, 0, ..., so one request in three goes to pool a."""
    pools = {"a": {}, "b": {"replicas": 2, "router": {"_target_": "cbatch.cluster.LeastLoaded", "tokens": True}}}
    run = simulate("orca", "open_loop", requests=9, pools=pools)
    assert [run.record.replica_of[id_] for id_ in range(0, 9, 3)] == [0, 0, 0]
    assert "router round_robin (b: least_loaded)" in str(run)
    assert run.summary["about"]["identity"]["backend.pools.b.router.tokens"] is True


def test_a_pools_router_is_an_axis_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and by import path with arguments."""
    monkeypatch.chdir(tmp_path)
    pools = "backend.pools={a: {}, b: {replicas: 2}}"
    routers = "+backend.pools.b.router=random,cbatch.cluster.LeastLoaded(tokens=true,false)"
    sweep = compose_sweep("backend=sim", pools, routers, "sweep=never")
    made = [read_settings(job).backend.routers["b"] for job in sweep.jobs]
    assert [getattr(router, "_tokens", None) for router in made] == [None, True, False]


@pytest.mark.parametrize(
    ("pools", "keys", "says"),
    [
        ({"a": {"router": "least_laoded"}}, {}, r"backend.pools.a.router=least_laoded: no such router; .*least_loaded"),
        ({"a": {"routr": "random"}}, {}, r"backend.pools.a.routr: .*router"),
        ({"a": {"router": {"_target_": "policies.routers.Dynamo", "rul": "old"}}}, {}, r"backend.pools.a.router.rul: .*rule"),
        ({"a": {"router": {"_target_": "cbatch.Limits", "max_batch": 1, "max_tokens": 1, "max_request_tokens": 1}}}, {},
         r"backend.pools.a.router: Limits has no method choose\(request, view\)"),
        ({"a": {"router": "random"}}, {"router": "policies.placements.Mooncake"},
         r"backend.pools.a.router: Mooncake chooses two replicas .*; leave out the pools' routers"),
        ({"a": {"router": {"_target_": "policies.placements.DistServe"}}}, {}, r"backend.pools.a.router: DistServe chooses"),
    ],
)  # fmt: skip
def test_routers_that_pools_cannot_have_are_refused(pools: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    with pytest.raises(CbatchError, match=says):
        simulate("orca", "open_loop", requests=4, pools={**pools, "b": {}}, **keys)


@pytest.mark.long
def test_pools_of_real_replicas_have_routers_of_their_own() -> None:
    """The cluster's takes 0, 1, 2 in turn, so that requests 0, 3 and 6 are of pool a; pool b's takes its replicas in turn."""
    pools = {"a": {}, "b": {"replicas": 2, "router": "round_robin"}}
    keys = {"backend": "cpu", "batch": 4, "kv_tokens": 4096, "min_length": 8, "max_length": 16}
    run = serve("orca", "open_loop", requests=7, rate=1000, pools=pools, **keys)
    assert [run.record.replica_of[id_] for id_ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
