"""Replicas that come and go: the phases of their lives, what they are paid for, and that no request is lost."""

import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command, summary
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import make_engine
from test_live_cluster import asked, replica
from test_transfers import replica as cached
from tiny_models import LLAMA, greedy_references

from cbatch import FinishReason, Limits, Request, RunRecord, StepRecord
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, LiveCluster, Phase, Scaling
from cbatch.errors import ConfigError, PolicyError
from cbatch.record import Life
from cbatch.results.gathered import Gathered
from cbatch.results.replicas import COLUMNS, rows_of
from experiments.api import simulate
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.store.tables import read_replicas, read_requests
from policies.orca import Orca

POOLS = ("a", "a", "b", "a", "b")


class Scripted:
    """Wants what the script says at each tick, and after its end what it wanted last; notes what it is shown."""

    def __init__(self, script: Sequence[Mapping[str, int] | int]) -> None:
        self.script, self.seen = [*script], list[tuple[float, list[Phase], list[int]]]()

    def wanted(self, view: ClusterView) -> Mapping[str, int] | int:
        self.seen.append((view.now, [part.phase for part in view], [part.num_unfinished for part in view]))
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


class Notes(LeastLoaded):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, list[Phase], list[int]]] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        ready = [place for place, part in enumerate(view) if part.phase is Phase.READY]
        assert view.fitting(request) == ready
        self.seen.append((view.now, [part.phase for part in view], [part.num_unfinished for part in view]))
        return super().choose(request, view)


class ToLatest:
    """Notes the tokens that it believes cached."""

    def __init__(self) -> None:
        self.cached: list[int] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        latest = view.fitting(request)[-1]
        self.cached.append(view[latest].cached_tokens(request))
        return latest


def cluster_of(
    pools: Sequence[str], script: Sequence[Mapping[str, int] | int], staleness: float = 0.0, **scaling: Any
) -> Cluster:
    engines = [make_engine(Orca(), Limits(2, 100, 100), num_blocks=100) for _ in pools]
    how = {"tick": 4.0, "start_seconds": 3.0, "down_after": 0.0, **scaling}
    return Cluster(engines, Notes(), pools, staleness, Scaling(Scripted(script), **how))


def serve(cluster: Cluster, arrivals: Sequence[tuple[float, int]]) -> list[Request]:
    """arrivals: time and output tokens, one second each."""
    requests = [Request(id_, 4, tokens, arrival_time=time) for id_, (time, tokens) in enumerate(arrivals)]
    cluster.attach(Listed(requests))
    cluster.run()
    return requests


counts = st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.integers(0, 3)})


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(counts, min_size=1, max_size=12),
    arrivals=st.lists(st.tuples(st.integers(0, 120).map(lambda n: n / 2), st.integers(1, 12)), min_size=1, max_size=40),
    staleness=st.sampled_from([0.0, 5.0]),
    how=st.fixed_dictionaries(
        {
            "start_seconds": st.sampled_from([0.0, 3.0, 9.0]),
            "up_after": st.sampled_from([0.0, 8.0]),
            "down_after": st.sampled_from([0.0, 8.0]),
            "least": st.integers(1, 2),
        }
    ),
)
def test_lives_are_whole_and_no_request_is_lost(
    script: list[Mapping[str, int]], arrivals: list[tuple[float, int]], staleness: float, how: dict[str, Any]
) -> None:
    """Each request is served to its end, in one life of its replica: sent while it is ready, over before it closes."""
    cluster, again = (cluster_of(POOLS, script, staleness, **how) for _ in range(2))
    requests = serve(cluster, sorted(arrivals))
    lives = cluster.record.lives
    for life in lives:
        assert life.ready in (life.asked + how["start_seconds"], life.asked, inf)
        assert life.ready <= life.draining <= life.closed or (life.ready == life.draining == inf)
    for place in range(len(POOLS)):
        own = [life for life in lives if life.replica == place]
        assert all(before.closed <= after.asked for before, after in pairwise(own))
    for request in requests:
        assert request.num_output_tokens == request.max_new_tokens and request.finished_at is not None
        (life,) = (
            life
            for life in lives
            if life.replica == cluster.replica_of[request.id] and life.ready <= request.arrival_time < life.draining
        )
        assert request.finished_at <= life.closed
    assert isinstance(cluster.router, Notes)
    for _, phases, _ in cluster.router.seen:
        for pool, most in (("a", 3), ("b", 2)):
            num_ready = sum(phase is Phase.READY for phase, name in zip(phases, POOLS, strict=True) if name == pool)
            assert min(how["least"], most) <= num_ready <= most
    serve(again, sorted(arrivals))
    assert again.record.lives == lives and again.record.steps == cluster.record.steps


def test_a_life_by_hand() -> None:
    """Ticks at 4, 8, ...; a start takes 3 s. Replica 1 ends at 19 the request that it was sent at 8, and closes then."""
    cluster = cluster_of(["", ""], [1, 2, 2, 1, 1, 2, 1])
    serve(cluster, [(0.0, 30), (1.0, 30), (8.0, 11), (20.5, 2), (23.0, 1), (40.0, 1)])
    lives = [(life.replica, life.asked, life.ready, life.draining, life.closed) for life in cluster.record.lives]
    assert lives == [(0, 0.0, 0.0, inf, inf), (1, 4.0, 7.0, 12.0, 19.0), (1, 20.0, 23.0, 24.0, 24.0)]
    assert cluster.replica_of == {0: 0, 1: 0, 2: 1, 3: 0, 4: 1, 5: 0}


def test_an_unfinished_start_is_given_up_first() -> None:
    """At 8 s the replica that was asked for at 4 s goes, although the older one is as idle; it was never ready."""
    cluster = cluster_of(["", ""], [1, 2, 1], start_seconds=10.0)
    serve(cluster, [(0.0, 1), (20.0, 1)])
    (_, given_up) = cluster.record.lives
    assert (given_up.asked, given_up.ready, given_up.draining, given_up.closed) == (4.0, inf, inf, 8.0)


def test_stabilisation_delays_as_published() -> None:
    """Load rises at 0 s, tick of 30 s, stabilised for 240 s, loaded in 240 s: ready at 510 s."""
    cluster = cluster_of(["", ""], [1, 2], tick=30.0, start_seconds=240.0, up_after=240.0)
    serve(cluster, [(0.0, 1), (600.0, 1)])
    assert [(life.asked, life.ready) for life in cluster.record.lives] == [(0.0, 0.0), (270.0, 510.0)]
    down = cluster_of(["", ""], [2, 1, 2, 1], tick=30.0, down_after=240.0)
    serve(down, [(0.0, 1), (600.0, 1)])
    assert [life.draining for life in down.record.lives] == [inf, 330.0], "60 s is the last time that two were wanted"


def test_a_replica_starts_with_an_empty_prefix_cache() -> None:
    """Replica 1 serves a prompt twice, closes at 4 s and is ready again at 11 s; a router that follows its cache is told so."""
    requests = [
        Request(id_, 8, 1, arrival_time=at, prefix_hashes=(1,), hash_block=8) for id_, at in enumerate((0, 2, 12, 14))
    ]
    scaling = Scaling(Scripted([2, 1, 2]), tick=4.0, start_seconds=3.0, down_after=0.0)
    cluster = Cluster([cached(), cached()], router := ToLatest(), scaling=scaling)
    cluster.attach(Listed(requests))
    cluster.run()
    assert [cluster.replica_of[request.id] for request in requests] == [1, 1, 1, 1]
    assert [request.num_cached_tokens for request in requests] == router.cached == [0, 7, 0, 7]


def test_a_router_with_old_reports_sends_nothing_to_what_drains() -> None:
    """At 4.5 s the router still counts the request that ended at 3 s on replica 1, which has drained and closed at 4 s."""
    cluster = cluster_of(["", ""], [2, 1], staleness=5.0)
    serve(cluster, [(0.0, 30), (1.0, 2), (4.5, 1), (9.0, 1)])
    assert isinstance(cluster.router, Notes)
    seen = {at: (phases[1], unfinished[1]) for at, phases, unfinished in cluster.router.seen}
    assert seen[4.5] == (Phase.CLOSED, 1) and seen[9.0] == (Phase.CLOSED, 0)
    assert cluster.replica_of == {0: 0, 1: 1, 2: 0, 3: 0}
    assert cluster.record.lives[1].closed == 4.0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (2, r"autoscaler Scripted, 0 s: wanted\(\) returned 2; return .* of each pool, as in {'a': 1, 'b': 1}"),
        ({"a": 1}, r"wanted\(\) returned {'a': 1}; return .* of each pool, as in {'a': 1, 'b': 1}"),
        ({"a": 1, "b": 1.5}, r"wanted\(\) returned {'a': 1, 'b': 1.5}.*whole, at least 0"),
        ({"a": 1, "b": -1}, r"wanted\(\) returned {'a': 1, 'b': -1}.*whole, at least 0"),
        ({"a": 1, "b": True}, r"wanted\(\) returned {'a': 1, 'b': True}.*whole, at least 0"),
    ],
)
def test_answers_that_are_no_numbers_of_replicas_are_named(answer: Any, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        cluster_of(["a", "b"], [answer])


def test_scaling_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"autoscale: Orca has no method wanted\(view\)"):
        Scaling(Orca())  # type: ignore[arg-type]
    impossible: list[dict[str, Any]] = [{"tick": 0.0}, {"least": 0}]
    for keys in (*impossible, *({name: -1.0} for name in ("start_seconds", "up_after", "down_after"))):
        with pytest.raises(ConfigError, match="need tick above 0"):
            Scaling(Scripted([1]), **keys)
    stated = {"tick": 15.0, "start_seconds": 240.0, "least": 1, "up_after": 0.0, "down_after": 300.0}  # docs/cluster.md
    scripted = Scripted([1])
    assert vars(Scaling(scripted)) == {"autoscaler": scripted, **stated} and Scaling(scripted, tick=0.5).tick == 0.5
    with pytest.raises(ConfigError, match="has no effect without an autoscaler"):
        assemble(compose_run("backend=sim", "backend.scaling={tick: 9}"))
    pools = ("backend=sim", "autoscale=fixed", "backend.pools={a: {replicas: 4}, b: {replicas: 3}}")
    assert compose_run(*pools, "backend.scaling={least: 3}").backend.scaling.least == 3
    with pytest.raises(ConfigError, match=r"backend.scaling.least=4: .* give at most 3"):
        compose_run(*pools, "backend.scaling={least: 4}")


class UntilHalf:
    """Two replicas from 0.1 s until half of the requests have arrived."""

    def wanted(self, view: ClusterView) -> int:
        return 2 if view.now > 0 and view.num_arrived < 4 else 1


def test_a_live_replica_starts_and_drains() -> None:
    """With real tokens: the second replica serves some requests in its life, and none outside."""
    requests = asked(0, 0.3, 0.35, 0.4, 0.6, 0.9, 1.2, 1.2)
    how = Scaling(UntilHalf(), tick=0.1, start_seconds=0.1, down_after=0.0)
    cluster = LiveCluster([replica(Orca()), replica(Orca())], ToLatest(), scaling=how)
    cluster.attach(Listed(requests))
    try:
        cluster.run()
    finally:
        cluster.executor.close()
    assert [request.output for request in requests] == [reference.output for reference in greedy_references(LLAMA)[:8]]
    life = next(life for life in cluster.record.lives if life.replica == 1)
    assert 0.1 <= life.asked < life.ready < life.draining <= life.closed < inf
    own = [request for request in requests if cluster.replica_of[request.id] == 1]
    assert own and all(life.ready <= request.arrival_time + 0.2 for request in own)
    assert max(request.finished_at or inf for request in own) <= life.closed


OWN = """
class Square:
    \"""Three replicas in every other 20 s.\"""

    def __init__(self, most=3):
        self.most = most

    def wanted(self, view):
        return self.most if view.now // 20 % 2 else 1
"""


class TwoSmall:
    """A large replica, and a small one beside which there is a second from 10 to 20 s."""

    def wanted(self, view: ClusterView) -> dict[str, int]:
        return {"large": 1, "small": 1 + (10 <= view.now < 20)}


@pytest.mark.long
def test_a_pool_says_how_many_of_its_replicas_ran() -> None:
    """One of three small replicas is paid for always, the second paid for about 10 s."""
    pools = {"large": {"batch": 64}, "small": {"replicas": 3}}
    scaling = {"tick": 10, "start_seconds": 0, "down_after": 0}
    run = simulate("orca", "open_loop", requests=200, rate=4, pools=pools, autoscale=TwoSmall(), scaling=scaling)
    figures, whole = run.summary["pools"], run.summary["replicas"]
    paid = {name: (pool["replicas"], pool["most_replicas"]) for name, pool in figures.items()}
    assert paid == {"large": (1, 1), "small": (3, 2)} and whole["most"] == 3
    small = figures["small"]["mean_replicas"]
    assert 10 <= (small - 1) * run.summary["run"]["counted_seconds"] < 14
    assert figures["large"]["mean_replicas"] + small == pytest.approx(whole["mean"])
    assert re.search(rf"pool small .* by at most 2 of 3 replicas, {small:.3g} on average: ", str(run))


def test_a_prompt_belongs_to_the_life_that_computed_it() -> None:
    """Replica 0 is there until 10 s and from 20 s on. It prefills 0 in its first life, 1 in its second, and ends 2 itself; replica 1 decodes."""
    times = {0: (7, 2, 5.0, 25.0), 1: (3, 2, 24.0, 26.0), 2: (2, 1, 6.0, 6.0)}  # prompt, output, first and last token
    record = RunRecord()
    for id_, (prompt, output, *tokens) in times.items():
        request = Request(id_, prompt, output)
        request.finish_reason, request.num_output_tokens = FinishReason.LENGTH, output
        request.admitted_at, request.token_times, request.finished_at = 0.0, (tokens[0], tokens[1]), tokens[1]
        record.requests.append(request)
    for at, replica_, id_ in ((5.0, 0, 0), (6.0, 0, 2), (24.0, 0, 1), (25.0, 1, 0), (26.0, 1, 1)):
        record.add_step(StepRecord(0, *[at] * 7, *[0] * 9, note=""), np.array([id_]))
        record.replicas.append(replica_)
    record.replica_of, record.prefilled_on = {0: 1, 1: 1, 2: 0}, {0: 0, 1: 0}
    record.lives = [Life(0, 0.0, 0.0, 9.0, 10.0), Life(1, 0.0, 0.0), Life(0, 20.0, 20.0)]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(Gathered(record), None, 2)]
    counts = [[row[name] for name in ("requests", "prompt_tokens", "output_tokens")] for row in rows]
    assert counts == [[1, 7 + 2, 1], [2, 0, 4], [0, 3, 0]]


def test_replicas_csv_has_the_cost_of_the_whole_run_and_the_summary_that_of_the_measured_part(tmp_path: Path) -> None:
    part = {"warmup_requests": 10, "drain_requests": 10}
    keys = {"requests": 40, "rate": 8, "replicas": 2, "price": 36, "metrics": part}
    run = simulate("orca", "open_loop", **keys, output=tmp_path / "run").summary
    assert run["cost"]["dollars"] == pytest.approx(2 * 36 / 3600 * run["run"]["counted_seconds"])
    whole = read_replicas(tmp_path / "run")
    assert whole["dollars"].sum() == pytest.approx(0.01 * whole["paid_seconds"].sum()) and whole["requests"].sum() == 40
    assert [*whole["paid_seconds"]] == pytest.approx([run["run"]["seconds"]] * 2)
    assert run["run"]["seconds"] > 1.2 * run["run"]["counted_seconds"]


@pytest.mark.long
def test_a_run_is_paid_for_what_was_there(tmp_path: Path) -> None:
    """Replica-seconds and money, counted again from the times at which replicas came and went; pooled, and by replica."""
    (tmp_path / "square.py").write_text(OWN)
    scaling = "{tick: 5, start_seconds: 10, down_after: 0}"
    work = ("workload=open_loop", "workload.num_requests=300", "workload.arrivals.rate=4", "price=3")
    keys = ("autoscale=square.Square(most=3)", "backend=sim", "backend.replicas=4", "backend.router=least_loaded")
    done = command("run", "policy=orca", *work, *keys, f"backend.scaling={scaling}", "output=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures, lives, requests = (
        summary(tmp_path / "run"),
        read_replicas(tmp_path / "run"),
        read_requests(tmp_path / "run"),
    )
    end, grid = requests["last_token"].max(), 0.01
    places = np.arange(grid / 2, end, grid)
    closed = lives["closed"].fillna(math.inf)
    paid = sum(
        ((places > asked) & (places < until)).sum() * grid for asked, until in zip(lives["asked"], closed, strict=True)
    )
    there = figures["replicas"]
    assert there["seconds"] == pytest.approx(paid, abs=grid * 2 * len(lives)) and there["most"] == 3
    assert there["mean"] == pytest.approx(there["seconds"] / figures["run"]["counted_seconds"])
    assert figures["cost"]["dollars"] == pytest.approx(3 * there["seconds"] / 3600)
    assert figures["cost"]["dollars_per_request"] == pytest.approx(figures["cost"]["dollars"] / 300)
    assert lives["dollars"].sum() == pytest.approx(figures["cost"]["dollars"])
    assert lives["requests"].sum() == 300 and lives["output_tokens"].sum() == requests["output_tokens"].sum()
    assert there["lives"] == len(lives) == 5 and {*lives["ready"] - lives["asked"]} == {0.0, 10.0}
    for life in lives.itertuples():
        own = requests[(requests["replica"] == life.replica) & (requests["arrival"] >= life.ready)]
        own = own[own["last_token"] <= (math.inf if math.isnan(life.closed) else life.closed)]
        assert len(own) == life.requests and (life.requests == 0) == math.isnan(life.dollars_per_request)
    assert "replica-seconds" in done.stdout
    lanes = json.loads(gzip.decompress((tmp_path / "run" / "timeline.json.gz").read_bytes()))["traceEvents"]
    spans = [(event["tid"], event["name"]) for event in lanes if event.get("pid") == 7 and event["ph"] == "X"]
    assert {name for _, name in spans} == {"starting", "ready", "draining"}
    refused = command("run", "policy=orca", *work, *keys[:2], cwd=tmp_path)
    assert refused.returncode == 2 and "autoscale: needs several replicas to start and stop" in refused.stderr
