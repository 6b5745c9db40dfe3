"""What a router is shown: all that replicas have reported by the time of the arrival, and nothing after it."""

import random
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
from small_cluster import make_cost

from cbatch import Limits, Policy, Request, Server, Step
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, ReplicaView, Role
from cbatch.cluster.reports import Report
from cbatch.cost import CostFunction
from cbatch.kv import KVSize
from cbatch.model.topology import Topology
from cbatch.sim.executor import SimExecutor
from cbatch.sim.measured import HostTime
from cbatch.sim.stages import Span
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe


class Shown(NamedTuple):
    """A replica's view, when a request was routed."""

    now: float
    request: int
    replica: int
    at: float
    num_unfinished: int
    outstanding_tokens: int
    num_waiting: int
    num_free: int
    prompt_tokens_left: int
    cached_tokens: int


class Notes(LeastLoaded):
    def __init__(self) -> None:
        self.shown: list[Shown] = []
        self.chosen: dict[int, int] = {}
        self.ended: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        names = Shown._fields[3:-1]
        for index, replica in enumerate(view):
            values = (*(getattr(replica, name) for name in names), replica.cached_tokens(request))
            self.shown.append(Shown(view.now, request.id, index, *values))
        self.chosen[request.id] = super().choose(request, view)
        return self.chosen[request.id]

    def on_end(self, request: Request) -> None:
        self.ended.append(request.id)


class Logging(SimExecutor):
    """Notes when each request had how many tokens computed, iterations in flight counted."""

    def restart(self) -> None:
        super().restart()
        self.computed: dict[int, list[tuple[float, int]]] = defaultdict(list)

    def launch(self, step: Step) -> Span:
        span = super().launch(step)
        for request, start, tokens in zip(step.requests, step.start.tolist(), step.num_tokens.tolist(), strict=True):
            self.computed[request.id].append((self.now(), start + tokens))
        return span


POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    "sarathi": lambda: Sarathi(Fixed(16)),
    "serve": lambda: SarathiServe(Fixed(16)),
}


def draw(seed: int) -> tuple[Callable[[], list[Request]], dict[str, Any]]:
    numbers = random.Random(seed)
    rate, number = numbers.choice((50, 400, 3000)), 120
    times = [0.0]
    for _ in range(number - 1):
        times.append(times[-1] + numbers.choice((0.0, numbers.expovariate(rate))))
    lengths = [(numbers.randint(4, 60), numbers.randint(1, 30), numbers.randrange(6)) for _ in times]

    def requests() -> list[Request]:
        return [
            Request(id_, prompt, new, arrival_time=time, prefix_hashes=(chat,) * (prompt >= 4), hash_block=4)
            for id_, (time, (prompt, new, chat)) in enumerate(zip(times, lengths, strict=True))
        ]

    return requests, {
        "replicas": numbers.choice((1, 2, 3, 8)),
        "stages": numbers.choice((1, 1, 2)),
        "asynchronous": numbers.random() < 0.7,
        "staleness": numbers.choice((0.0, 0.0, 0.02)),
        "host": numbers.choice((0.0, 1e-4, 2e-3)),
        "cached": numbers.random() < 0.5,
    }


def serve(policy: str, seed: int, kind: type[SimExecutor], leaps: bool) -> tuple[Cluster, Notes]:
    requests, how = draw(seed)
    cost = make_cost(Topology(1, how["stages"]))
    limits = Limits(4, 64, 128, tile=4, num_stages=how["stages"])
    cache = LRU() if how["cached"] else None
    servers = [
        Server(
            kind(cost, HostTime(how["host"])), limits, cost, KVSize(2000, 4), how["asynchronous"], prefix_cache=cache
        )
        for _ in range(how["replicas"])
    ]
    router = Notes()
    cluster = Cluster([server.engine(POLICIES[policy]()) for server in servers], router, staleness=how["staleness"])
    for engine in cluster.engines:
        engine.leaps = leaps
    cluster.attach(Listed(requests()))
    cluster.run()
    return cluster, router


@pytest.mark.parametrize(("policy", "seed"), [*zip(cycle(POLICIES), range(12))])
def test_no_view_holds_anything_after_its_time(policy: str, seed: int) -> None:
    """Counters are recounted from ends until then and launches before (arrivals precede launches at the same time); staleness ages both."""
    cluster, router = serve(policy, seed, Logging, leaps=False)
    requests, staleness = {request.id: request for request in cluster.record.requests}, draw(seed)[1]["staleness"]
    assert len(requests) == 120
    sent: dict[int, list[Request]] = defaultdict(list)
    for row in router.shown:
        until, here = row.now - staleness, sent[row.replica]
        assert row.at <= max(until, 0.0) and row.now == requests[row.request].arrival_time
        left = [request for request in here if request.finished_at is None or request.finished_at > until]
        logs = cluster.engines[row.replica].executor.computed
        computed = {
            request.id: max((tokens for at, tokens in logs[request.id] if at < until), default=0) for request in left
        }
        assert row.num_unfinished == len(left)
        assert row.num_waiting == sum(not tokens for tokens in computed.values())
        assert row.outstanding_tokens == sum(request.max_tokens - computed[request.id] for request in left)
        prompts = [(request.num_prompt_tokens, computed[request.id]) for request in left]
        most = sum(max(prompt - tokens, 0) for prompt, tokens in prompts)
        assert most - 4 * row.num_waiting <= row.prompt_tokens_left <= most, (
            "a waiting request may find its 4 shared tokens"
        )
        if row.replica == len(cluster.engines) - 1:
            sent[router.chosen[row.request]].append(requests[row.request])
    ends = [requests[id_].finished_at for id_ in router.ended]
    assert ends == sorted(ends) and len({*router.ended}) == len(ends)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "seed"), [*zip(cycle(POLICIES), range(12))])
def test_views_are_the_same_with_leaps(policy: str, seed: int) -> None:
    (leaping, seen), (plain, wanted) = (serve(policy, seed, SimExecutor, leaps) for leaps in (True, False))
    rows = (
        [row._replace(at=0.0) for row in router.shown] for router in (seen, wanted)
    )  # a leap reports launches alone
    assert next(rows) == next(rows) and leaping.record.steps == plain.record.steps


@pytest.mark.long
def test_a_cache_is_shown_once_its_blocks_are_reported() -> None:
    """Some views show cached blocks, and none more than the requests that were computed there before can have left."""
    hits = 0
    for seed in range(3):
        cluster, router = serve("orca", seed, Logging, leaps=False)
        requests = {request.id: request for request in cluster.record.requests}
        for row in router.shown:
            if row.cached_tokens:
                hits += 1
                logs, chat = cluster.engines[row.replica].executor.computed, requests[row.request].prefix_hashes
                before = [at for id_, log in logs.items() for at, _ in log if requests[id_].prefix_hashes == chat]
                assert row.cached_tokens == 4 and min(before) <= row.now
    assert hits > 30


def test_a_replica_is_shown_as_it_was_reported_and_as_it_was_sent() -> None:
    """10 blocks of 4 tokens. An iteration takes 1 s for each token of a prompt and 0.1 s for each token before it.

    The first request has 8 of 12 prompt tokens computed; the second shares these, and has 2 left. So 4 + 0.8 + 2 + 0.8 s are predicted.
    """
    cost = CostFunction(lambda shape: sum(tokens + 0.1 * context for tokens, context in shape.chunks))
    view = ReplicaView("", 10, 4, Limits(4, 64, 64), cost)
    cluster = ClusterView([view], 0.0)
    assert (cluster.num_arrived, cluster.least, cluster.stage) == (0, 1, Role.PREFILL)
    assert (view.at, view.kv_use, view.num_unfinished, view.predicted_wait) == (0, 0, 0, 0)
    first, second, third = (
        Request(id_, tokens, 8, prefix_hashes=(1, 2, 3), hash_block=4) for id_, tokens in enumerate((12, 10, 9))
    )
    view.send(first)
    assert view.prompt_blocks_with(second) == 4, "three of the first, and the part of one"
    cached = dict.fromkeys(view.block_hashes(first)[:2], True)
    view.post(Report(1.0, np.array([0]), np.array([8]), 0, 7, changed=cached))
    cluster.update(1.0)
    view.send(second)
    assert (view.at, view.kv_use, view.num_running, view.num_waiting) == (1, pytest.approx(0.3), 1, 1)
    assert view.prompts_left() == [(first, 4), (second, 2)] and view.predicted_wait == pytest.approx(7.6)
    cluster.bind(third, 0)
    assert view.num_unfinished == 3 and view.prompt_tokens_left == 6, "its prompt is computed elsewhere"
    cluster.unbind(third)
    for at, ended in ((2.0, [(0, 5), (1, 2)]), (3.0, [(2, 3)])):
        view.post(Report(at, np.array([], int), np.array([], int), 0, 10, ended))
    assert [request.id for request in cluster.update(3.0)] == [0, 1, 2]
    assert (view.num_ended, view.ended_prompt_tokens, view.ended_output_tokens) == (3, 22, 10), "12 and 10"
    assert cluster.fitting(Request(3, 30, 11)) == [0] and cluster.fitting(Request(4, 30, 12)) == [], "41 tokens fit"


def test_a_prompt_counts_where_it_was_computed() -> None:
    """The prefiller's first request is continued by the decoder, as is one of the decoder's own by the prefiller; its second ends there."""
    none, limits = np.array([], int), Limits(4, 64, 64)
    cluster = ClusterView([ReplicaView(role, 10, 4, limits, CostFunction(lambda _: 1.0)) for role in ("p", "d")], 0.0)
    prefiller, decoder = cluster
    moved, kept, back = Request(0, 9, 3), Request(1, 5, 1), Request(2, 4, 2)
    for view, request in ((prefiller, moved), (prefiller, kept), (decoder, back)):
        view.send(request)
    cluster.bind(moved, 1)
    cluster.bind(kept, 1)  # with push a decoder is chosen at the arrival
    prefiller.post(Report(1.0, none, none, 0, 10, ended=[(1, 1)], left=[0]))
    cluster.unbind(moved)
    cluster.update(1.0)
    assert [(view.num_unfinished, view.ended_prompt_tokens) for view in cluster] == [(0, 14), (2, 0)]
    cluster.bind(back, 0)
    cluster.unbind(back)
    decoder.post(Report(2.0, none, none, 0, 10, ended=[(0, 3)], left=[2]))
    prefiller.post(Report(3.0, none, none, 0, 10, ended=[(2, 2)]))
    cluster.update(3.0)
    counts = [(view.num_ended, view.ended_prompt_tokens, view.ended_output_tokens) for view in cluster]
    assert counts == [(2, 14, 3), (1, 4, 3)], "of 9, 5 and 4 prompt tokens"
