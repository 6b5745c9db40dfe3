"""What a router is shown of prefixes: what replicas report as cached, and what it has sent itself."""

from collections.abc import Callable, Sequence

import pytest
from schedules import UnitCost

from cbatch import CachedBlock, CostFunction, Engine, KVSize, Limits, Request, Server
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


class Notes(RoundRobin):
    """Notes the tokens that the replica caches of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        self.seen.append(view[0].cached_tokens(request))
        return super().choose(request, view)


def alone(blocks: Sequence[tuple[int, ...]], on_host: int, eviction: LRU) -> tuple[list[Request], list[int]]:
    """Serves prompts of these blocks by themselves on a GPU of four blocks. Returns them, and the cached tokens that the router sees."""
    cost, router = CostFunction(UnitCost().predict), Notes()
    server = Server(SimExecutor(cost), Limits(1, 100, 100), cost, KVSize(4, 4, on_host), False, prefix_cache=eviction)
    requests = [
        Request(index, 4 * len(each), 1, arrival_time=50.0 * index, prefix_hashes=each, hash_block=4)
        for index, each in enumerate(blocks)
    ]
    cluster = Cluster([server.engine(Orca())], router)
    cluster.attach(Listed(requests))
    cluster.run()
    return requests, router.seen


def test_blocks_in_host_memory_do_not_count() -> None:
    """The second prompt takes all four blocks: the first one's two full blocks go to host memory, where the third request finds the first."""
    requests, seen = alone([(1, 2), (5, 6, 7, 8), (1, 2), (1, 2)], 10, LRU())
    assert [(each.num_cached_tokens, each.num_host_tokens) for each in requests] == [(0, 0), (0, 0), (4, 4), (4, 0)]
    assert seen == [0, 0, 0, 4]


class KeepsNoFirst(LRU):
    """Keeps in host memory what follows a first block, and so loses all of it with that block."""

    def keeps(self, block: CachedBlock, now: float) -> bool:
        return block.start > 0


def test_a_report_names_all_that_is_lost_at_once() -> None:
    """Host memory has 60 blocks that follow the same first one, 15 times as many as the GPU has blocks, when that one is evicted."""
    blocks = [*((1, 10 + index) for index in range(60)), (5, 6, 7, 8), (1, 10)]
    requests, seen = alone(blocks, 100, KeepsNoFirst())
    assert seen == [0, *[4] * 59, 0, 0]
    assert requests[-1].num_cached_tokens == 0


def test_without_a_reader_no_change_is_logged() -> None:
    cluster = Cluster([cached(), cached()], RoundRobin())
    cluster.attach(Listed(asked()))
    cluster.run()
    for engine in cluster.engines:
        assert engine.state.cache is not None and engine.state.cache.pool.changes._hashes is None
