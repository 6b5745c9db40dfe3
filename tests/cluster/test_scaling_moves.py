"""Replicas that come and go while requests move between them: none closes before what is bound for it is over."""

import threading
import time
from functools import partial
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_cluster import asked, run
from test_live_cluster import replica as live_replica
from test_scaling import Scripted, ToLatest
from test_transfers import replica
from tiny_models import LLAMA, greedy_references

from cbatch import Plan, Request, View
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, LiveCluster, Moves, Role, Route, Scaling
from cbatch.cluster.transfers import Copier
from cbatch.runtime.transfers import HostCopy, copy_blocks
from cbatch.sim.roofline import Affine
from policies.evictions import LRU
from policies.orca import Orca

PREFILL, DECODE = [Role.PREFILL] * 3, [Role.DECODE] * 3
POOLS = [*["p"] * 3, *["d"] * 3]


class Ahead:
    """Chooses the latest ready replica of each role at the arrival."""

    def choose(self, request: Request, view: ClusterView) -> Route:
        return Route(*(view.fitting(request, role)[-1] for role in (Role.PREFILL, Role.DECODE)))


class AheadWithCopy(Ahead):
    """The first ready prefiller sends what it has cached, and may have begun to drain by then."""

    def choose(self, request: Request, view: ClusterView) -> Route:
        return super().choose(request, view)._replace(copy=view.fitting(request, Role.PREFILL)[0])


def serve(
    requests: list[Request], script: list[dict[str, int]], moves: Moves, router: Any, blocks: int = 100, **scaling: Any
) -> Cluster:
    how: Any = {"tick": 1.0, "start_seconds": 0.0, "down_after": 0.0, **scaling}
    engines = [replica(max_tokens=60, num_blocks=blocks) for _ in POOLS]
    parts: Any = {"roles": [*PREFILL, *DECODE], "moves": moves, "scaling": Scaling(Scripted(script), **how)}
    cluster = Cluster(engines, router, POOLS, **parts)
    cluster.attach(Listed(requests))
    record = cluster.run()
    spans = [(number, step.started, step.ended) for step, number in zip(record.steps, record.replicas, strict=True)]
    for transfer in record.transfers:
        spans += [(end, transfer.started, transfer.ended) for end in (transfer.sender, transfer.receiver)]
    for number, started, ended in spans:
        lives = [life for life in record.lives if life.replica == number]
        assert any(life.ready <= started and ended <= life.closed for life in lives), (number, started, ended, lives)
    return cluster


def closed(cluster: Cluster, number: int) -> list[float]:
    return [life.closed for life in cluster.record.lives if life.replica == number]


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(("true_tokens", "over"), [(None, 12.0), (1, 1.0)])
def test_a_decoder_waits_for_the_request_bound_for_it(push: bool, true_tokens: int | None, over: float) -> None:
    """Chosen at the arrival, it drains from 0.5 s on. The prompt takes until 1 s, its blocks until 9 s, three decodes until 12 s.

    Or the request ends with its first token at 1 s.
    """
    requests = [Request(0, 8, 4, true_new_tokens=true_tokens), Request(1, 1, 1, arrival_time=20.0)]
    moves = Moves(1, Affine(0.0, 1.0), push=push)
    cluster = serve(requests, [{"p": 1, "d": 2}, {"p": 1, "d": 1}], moves, Ahead(), tick=0.5)
    assert closed(cluster, 4) == [over]


def test_a_decoder_that_drains_is_not_chosen_at_the_end_of_a_prefill() -> None:
    """The second decoder drains at 0.5 s, before the prompt has been computed at 1 s."""
    requests = [Request(0, 8, 4), Request(1, 1, 1, arrival_time=20.0)]
    cluster = serve(requests, [{"p": 1, "d": 2}, {"p": 1, "d": 1}], Moves(1, Affine(0.0, 1.0)), ToLatest(), tick=0.5)
    assert cluster.replica_of[0] == 3 and closed(cluster, 4) == [0.5]


def test_a_prefiller_waits_for_prompts_without_room_at_the_decoder() -> None:
    """Pushed: the decoder has room for one request until 11 s. A prefiller that drains at 2 s then computes the second prompt."""
    requests = [Request(0, 50, 11), Request(1, 50, 2), Request(2, 1, 1, arrival_time=40.0)]
    moves = Moves(1, Affine(0.0, 0.0), push=True)
    cluster = serve(requests, [{"p": 2, "d": 1}, {"p": 1, "d": 1}], moves, Ahead(), 80, tick=2.0)
    assert closed(cluster, 1) == [12.0]


class FromSecond:
    """The second prefiller computes the first prompt; the first one computes the others, with what the second has cached."""

    def choose(self, request: Request, view: ClusterView) -> Route:
        return Route(1, 3) if request.id == 0 else Route(0, 3, 1 if request.id == 1 else None)


@pytest.mark.parametrize(("timeout", "over"), [(None, 30.0), (9.5, 10.0)])
def test_a_prefiller_waits_until_its_prefix_is_copied(timeout: float | None, over: float) -> None:
    """Pushed: the decoder has room for the second prompt at 30 s, when the first request ends. The second prefiller drains from 2 s on.

    If the client leaves at 10 s, nothing is copied.
    """
    same: Any = {"prefix_hashes": (1,), "hash_block": 20}
    requests = [Request(0, 20, 30, **same), Request(1, 60, 2, arrival_time=0.5, timeout=timeout, **same)]
    moves, script = Moves(1, Affine(0.0, 0.0), push=True), [{"p": 2, "d": 1}, {"p": 1, "d": 1}]
    cluster = serve([*requests, Request(2, 1, 1, arrival_time=90.0)], script, moves, FromSecond(), 80, tick=2.0)
    assert len(cluster.record.transfers) == (3 if timeout is None else 1)
    assert closed(cluster, 1) == [over]


class UntilFirst:
    """Two prefillers until a request has arrived."""

    def wanted(self, view: ClusterView) -> dict[str, int]:
        return {"p": 1 if view.num_arrived else 2, "d": 1}


class UntilHalf:
    """Two prefillers until half of the requests have arrived."""

    def wanted(self, view: ClusterView) -> dict[str, int]:
        return {"p": 2 if view.num_arrived < 4 else 1, "d": 1}


def slowly(sender: Any, receiver: Any) -> Copier:
    """Copies take 0.3 s."""

    def copy(pairs: Any) -> int:
        time.sleep(0.3)
        return copy_blocks(sender.caches, receiver.caches, pairs)

    return lambda pairs: HostCopy(partial(copy, pairs), receiver.follow)


@pytest.mark.parametrize("router", [Ahead, ToLatest])
def test_a_live_prefiller_drains_until_its_blocks_have_been_read(router: Any) -> None:
    """Later prompts go to the other prefiller."""
    moves = Moves(0, Affine(0.0, 0.0), connect=slowly)
    roles, how = [Role.PREFILL] * 2 + [Role.DECODE], Scaling(UntilHalf(), tick=0.05, start_seconds=0.0, down_after=0.0)
    engines = [live_replica(Orca(), LRU()) for _ in roles]
    cluster = LiveCluster(engines, router(), ["p", "p", "d"], roles=roles, moves=moves, scaling=how)
    requests = asked(0, 0, 0, 0.1, 0.4, 2.0)
    run(cluster, requests)
    (life,) = (life for life in cluster.record.lives if life.replica == 1)
    sent = [transfer.ended for transfer in cluster.record.transfers if transfer.sender == 1]
    assert sent and max(sent) <= life.closed < inf
    assert [request.output for request in requests] == [each.output for each in greedy_references(LLAMA)[:6]]


class Opens(Orca):
    """Plans no request before the event is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def plan(self, view: View) -> Plan:
        assert not view.waiting or self.event.wait(10.0), "the prefiller closes meanwhile"
        return super().plan(view)


@pytest.mark.long
def test_a_live_prefiller_closes_when_its_blocks_have_been_read() -> None:
    """Not when the request is over, which is decoded only after that."""
    moves = Moves(0, Affine(0.0, 0.0), connect=slowly)
    roles = [Role.PREFILL] * 2 + [Role.DECODE]
    how = Scaling(UntilFirst(), tick=0.05, start_seconds=0.0, down_after=0.0)
    closed = threading.Event()
    engines = [live_replica(policy, LRU()) for policy in (Orca(), Orca(), Opens(closed))]
    cluster = LiveCluster(engines, ToLatest(), ["p", "p", "d"], roles=roles, moves=moves, scaling=how)
    cluster.attach(Listed(asked(*[0.0] * 6)[-1:]))  # of more than a block

    def look(_: Any) -> None:
        if cluster.fleet is not None and cluster.fleet.lives[1].closed < inf:
            closed.set()

    try:
        cluster.run(look)
    finally:
        cluster.executor.close()


counts = st.fixed_dictionaries({"p": st.integers(1, 3), "d": st.integers(1, 3)})
times = st.integers(0, 20).map(lambda n: n / 4)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    script=st.lists(counts, min_size=1, max_size=20),
    sizes=st.lists(st.tuples(times, st.integers(1, 40), st.integers(1, 20), st.booleans()), min_size=1, max_size=25),
    router=st.sampled_from([Ahead, AheadWithCopy, LeastLoaded]),
    how=st.tuples(
        st.sampled_from([0.0, 0.3]),
        st.sampled_from([0.0, 0.05, 0.5]),
        st.booleans(),
        st.sampled_from([inf, 2.0]),
        st.sampled_from([None, None, 6.0]),
    ),
)
def test_no_replica_closes_before_what_is_bound_for_it(
    script: list[dict[str, int]], sizes: list[tuple[float, int, int, bool]], router: Any, how: Any
) -> None:
    """Iterations and transfers lie in lives of their replicas; both orders of allocation, leases, clients that leave."""
    latency, seconds, push, lease, timeout = how
    requests = [
        Request(id_, prompt, new, arrival_time=at, true_new_tokens=1 if stops else None, timeout=timeout)
        for id_, (at, prompt, new, stops) in enumerate(sorted(sizes))
    ]
    requests.append(Request(len(requests), 1, 1, arrival_time=500.0))  # long after all others
    moves = Moves(1, Affine(latency, seconds), push=push, lease=lease)
    cluster = serve(requests, script, moves, router(), 64, tick=0.7, start_seconds=1.0)
    assert all(request.finish_reason is not None for request in requests)
    assert all(life.closed < inf for life in cluster.record.lives if life.draining < 450)
