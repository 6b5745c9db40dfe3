"""What a router is shown of prefixes: what replicas report as cached, and what it has sent itself."""

from collections.abc import Callable

import pytest
from schedules import UnitCost

from cbatch import Engine, KVSize, Limits, Request, Server
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, ReplicaView, RoundRobin
from cbatch.sim import SimExecutor
from policies.evictions import LRU
from policies.orca import Orca

HASHES = [(1, 2, 3), (1, 9), (1, 2, 3), (1, 2, 3, 4, 5), (1, 9, 7)]
TIMES = [0.0, 0.0, 1.0, 50.0, 60.0]


def cached() -> Engine:
    cost = UnitCost()
    server = Server(SimExecutor(cost), Limits(1, 100, 100), cost, KVSize(100, 4), False, prefix_cache=LRU())
    return server.engine(Orca())


def asked() -> list[Request]:
    """Returns requests of whole blocks of 4 tokens."""
    return [
        Request(index, 4 * len(blocks), 4, arrival_time=time, prefix_hashes=blocks, hash_block=4)
        for index, (blocks, time) in enumerate(zip(HASHES, TIMES, strict=True))
    ]


def show(read: Callable[[ReplicaView, Request], object], since: int = 0, staleness: float = 0.0) -> dict[int, object]:
    """Returns what a router reads from both replicas at each arrival from one on."""
    seen: dict[int, object] = {}

    class Notes(RoundRobin):
        def choose(self, request: Request, view: ClusterView) -> int:
            if request.id >= since:
                seen[request.id] = [read(replica, request) for replica in view]
            return super().choose(request, view)

    engines, requests = [cached(), cached()], asked()
    cluster = Cluster(engines, Notes(), staleness=staleness)
    cluster.attach(Listed(requests))
    cluster.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 8, 4, 4]
    return seen


def test_a_router_sees_what_each_replica_has_cached() -> None:
    """Requests 0 and 1 fill one cache each; the last two find their leading blocks of 4 tokens, and never the last token."""
    seen = show(lambda replica, request: (replica.cached_tokens(request), replica.prompt_tokens_left))
    assert seen[0] == [(0, 0), (0, 0)]
    assert seen[1] == [(0, 12), (0, 0)]  # routed, and not computed: nothing is cached
    assert seen[2] == [(8, 0), (4, 0)]
    assert seen[3] == [(12, 0), (4, 0)]
    assert seen[4] == [(4, 0), (8, 0)]


def test_reports_age_and_what_the_router_sent_does_not() -> None:
    """The router knows at once which blocks it has sent, and reads 55 s later that they are cached, and that the requests have ended."""
    seen = show(lambda replica, request: (replica.cached_tokens(request), replica.sent_tokens(request)), 0, 55.0)
    assert [seen[id_] for id_ in (1, 2, 3)] == [[(0, 4), (0, 0)], [(0, 8), (0, 4)], [(0, 12), (0, 4)]]
    assert seen[4] == [(4, 4), (8, 4)]  # request 1 ended within 5 s; 2 and 3 are unfinished, as far as is known


def test_blocks_that_several_prompts_share_count_once() -> None:
    """All stay unfinished. Replica 0 has blocks 1 2 3, from request 3 on also 1 9; replica 1 has 1 9, then 1 2 3."""
    assert show(lambda replica, request: replica.prompt_blocks_with(request), 0, 1000.0) == {
        0: [3, 3],
        1: [4, 2],
        2: [3, 4],
        3: [5, 6],
        4: [5, 7],
    }


@pytest.mark.parametrize("since", range(5))
def test_an_index_that_is_first_read_late_is_whole_after_a_report(since: int) -> None:
    """The first reading subscribes: the next report of a replica names all that it caches. Earlier reports name nothing."""
    seen = show(lambda replica, request: replica.cached_tokens(request), since)
    always = show(lambda replica, request: replica.cached_tokens(request))
    assert seen.pop(since) == [0, 0]
    later = {id_: values for id_, values in always.items() if id_ > since}
    assert seen == later if since < 2 else seen.keys() == later.keys()


def test_without_a_reader_no_change_is_logged() -> None:
    cluster = Cluster([cached(), cached()], RoundRobin())
    cluster.attach(Listed(asked()))
    cluster.run()
    for engine in cluster.engines:
        assert engine.state.cache is not None and engine.state.cache.pool.changes._hashes is None
