"""Replicas and routers: who gets which request, and one record of them all."""

import csv
import re
from operator import attrgetter
from pathlib import Path

import pytest
from commands import QUICK, command, summary
from schedules import make_engine

from cbatch import Engine, Limits, Plan, Policy, Request, RunRecord, View
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, Reject, RoundRobin, Router
from cbatch.errors import ConfigError, PolicyError, WorkloadError
from cbatch.results.metrics import collect_served
from experiments.settings.backends import Simulated
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.store.csv_tables import RunTables
from experiments.store.tables import read_requests, read_steps
from policies.orca import Orca
from policies.routers import ROUTERS


def replicas(number: int, batch: int = 1) -> list[Engine]:
    return [replica(Orca(), batch) for _ in range(number)]


def replica(policy: Policy, batch: int) -> Engine:
    return make_engine(policy, Limits(batch, 100, 100), num_blocks=100)


def serve(engines: list[Engine], requests: list[Request], router: Router) -> list[RunRecord]:
    cluster = Cluster(engines, router)
    cluster.attach(Listed(requests))
    cluster.run()
    return [engine.record for engine in engines]


def assigned(records: list[RunRecord]) -> list[list[int]]:
    return [sorted(request.id for request in record.requests) for record in records]


def test_least_loaded_sees_what_has_ended_by_the_time_of_arrival() -> None:
    """Request 0 takes 9 s, request 1 takes 2 s: those after 2 s all find the second replica free."""
    requests = [Request(0, 4, 9), Request(1, 4, 2), *(Request(2 + k, 4, 2, arrival_time=2.5 + 2 * k) for k in range(3))]
    records = serve(replicas(2), requests, LeastLoaded())
    assert assigned(records) == [[0], [1, 2, 3, 4]]
    assert [request.finished_at for request in records[1].requests] == [2.0, 4.5, 6.5, 8.5]


def test_requests_csv_says_when_each_request_ended_however(tmp_path: Path) -> None:
    """A replica serves one at a time, a token per second. 0 ends at 3 s; 1 is served until its client leaves at 5.5 s, which the plan at 6 s learns.

    2 waits until its client leaves at 2.5 s, before the plan at 3 s. 3 arrives at 4.25 s: the router refuses it then. 4 arrives at 6.5 s: the policy refuses it.
    """

    class Picky(Orca):
        def plan(self, view: View) -> Plan:
            if fourth := [request for request in view.waiting if request.id == 4]:
                plan = view.plan()
                plan.reject(fourth[0], "enough")
                return plan.build()
            return super().plan(view)

    class Refuses:
        def choose(self, request: Request, view: ClusterView) -> int | Reject:
            return Reject("no third") if request.id == 3 else 0

    requests = [Request(0, 4, 3), Request(1, 4, 9, timeout=5.5), Request(2, 4, 9, timeout=2.5)]
    cluster = Cluster([replica(Picky(), 1), *replicas(1)], Refuses())
    cluster.attach(Listed([*requests, Request(3, 4, 1, arrival_time=4.25), Request(4, 4, 1, arrival_time=6.5)]))
    record = cluster.run()
    with RunTables(tmp_path) as tables:
        tables.write(record, collect_served(record))
    with (tmp_path / "requests.csv").open() as file:
        ended = {row["id"]: (row["finish_reason"], row["last_token"], row["ended"]) for row in csv.DictReader(file)}
    assert ended == {
        "0": ("length", "3.0", "3.0"),
        "1": ("cancelled", "6.0", "6.0"),
        "2": ("cancelled", "", "3.0"),
        "3": ("rejected", "", "4.25"),
        "4": ("rejected", "", "6.5"),
    }


def test_a_replica_may_wait_for_requests_that_are_not_routed_yet() -> None:
    """Its policy plans nothing until two requests wait; alone with one at the end, it makes no progress."""

    class Pairs(Orca):
        def plan(self, view: View) -> Plan:
            return Plan() if len(view.waiting) == 1 else super().plan(view)

    def engines() -> list[Engine]:
        return [replica(Pairs(), 2), replica(Orca(), 2)]

    def requests(number: int) -> list[Request]:
        return [Request(index, 4, 2, arrival_time=2000.0 * index) for index in range(number)]

    records = serve(engines(), requests(4), RoundRobin())
    assert assigned(records) == [[0, 2], [1, 3]]
    assert [request.finished_at for request in records[0].requests] == [4002.0, 4002.0]
    with pytest.raises(PolicyError, match="Pairs, iteration 0: empty plan with 1 waiting"):
        serve(engines(), requests(2), RoundRobin())


@pytest.mark.parametrize("router", [make() for make in ROUTERS.values()])
def test_one_replica_serves_as_an_engine_alone_does(router: Router) -> None:
    def work() -> list[Request]:
        return [Request(index, 3 + index % 5, 1 + index % 4, arrival_time=0.7 * index) for index in range(20)]

    (alone,) = replicas(1, batch=3)
    alone.submit(work())
    (routed,) = serve(replicas(1, batch=3), work(), router)
    assert routed.steps == alone.run().steps


def test_a_merged_record_is_one_run() -> None:
    requests = [Request(index, 4, 1 + index, arrival_time=0.25 * index) for index in range(8)]
    engines = replicas(3)
    cluster = Cluster(engines, RoundRobin())
    cluster.attach(Listed(requests))
    left: list[int] = []  # as a progress bar sees it
    whole, records = cluster.run(lambda part: left.append(part.num_unfinished)), [engine.record for engine in engines]
    assert left == sorted(left, reverse=True) and set(left) == set(range(8))
    assert cluster.executor.now() == whole.steps[-1].ended
    assert [account.compute for engine in cluster.engines for account in engine.executor.accounts()] == [
        len(record.steps) for record in records
    ]
    assert [step.iteration for step in whole.steps] == list(range(sum(len(record.steps) for record in records)))
    received = [step.received_at for step in whole.steps]
    assert received == sorted(received)
    assert whole.replica_of == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2, 6: 0, 7: 1}
    assert [whole.replicas.count(number) for number in range(3)] == [len(record.steps) for record in records]
    receivers = zip(whole.receivers, whole.replicas, strict=True)
    assert {(id_, replica) for ids, replica in receivers for id_ in ids.tolist()} == {*whole.replica_of.items()}
    figures = collect_served(whole)
    assert (figures.output_tokens - figures.id).tolist() == [1] * 8
    ends = {request.id: request.finished_at for record in records for request in record.requests}
    assert dict(zip(figures.id.tolist(), figures.last_token.tolist(), strict=True)) == ends


def test_arrivals_by_iteration_and_unknown_routers_are_refused() -> None:
    for arrivals, says in (
        (Listed([Request(3, 4, 1)], {3: 2}), "requests arrive by iteration, which several replicas do not share"),
        (Listed([Request(4, 200, 1)]), r"request 4: 200 prompt \+ 1 new tokens exceed the 100 positions"),
    ):
        with pytest.raises(WorkloadError, match=says):
            Cluster(replicas(2), RoundRobin()).attach(arrivals)
    for router, says in (
        (
            "fewest",
            "router=fewest: no such router; known: bounded_loads, .*, least_loaded, .*; for yours give the import path",
        ),
        (Orca(), r"router: Orca has no method choose\(request, view\)"),
    ):
        with pytest.raises(ConfigError, match=says):
            Simulated(router=router)
    assert isinstance(Simulated(router="least_loaded").router, LeastLoaded)


class Looks:
    """Sends every request to the first replica; notes what both look like: their counters and the free blocks."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, ...]]] = []

    def choose(self, request: Request, view: ClusterView) -> int:
        counters = attrgetter("num_unfinished", "num_waiting", "outstanding_tokens", "num_free")
        self.seen.append([*map(counters, view)])
        return 0


def test_a_router_sees_queue_tokens_and_kv_cache_of_each_replica() -> None:
    """Iterations of one second, one request at a time, blocks of 4 tokens; the idle replica looks the same throughout."""
    arrivals = {0: (4, 3, 0.0), 1: (8, 2, 0.0), 2: (4, 1, 1.5), 3: (4, 1, 2.5), 4: (4, 1, 50.0)}
    router = Looks()
    requests = [Request(id_, prompt, new, arrival_time=time) for id_, (prompt, new, time) in arrivals.items()]
    serve(replicas(2), requests, router)
    assert [seen[1] for seen in router.seen] == [(0, 0, 0, 100)] * 5
    assert [seen[0] for seen in router.seen] == [
        (0, 0, 0, 100),
        (1, 1, 7, 100),  # sent at the same time, not admitted yet
        (2, 1, 2 + 10, 98),  # from 1 s on request 0 has computed 5 of its 7 tokens, in two blocks, one token in flight
        (3, 2, 1 + 10 + 5, 98),  # from 2 s on 6 tokens; the last one, in flight until 3 s, is never computed
        (0, 0, 0, 100),
    ]


@pytest.mark.parametrize("answer", [2, -1, 0.0, None, "first", True])
def test_a_router_that_returns_no_replica_is_named(answer: object) -> None:
    class Astray:
        def choose(self, request: Request, view: ClusterView) -> int:
            return answer  # type: ignore[return-value]

    message = f"router Astray, request 7: choose() returned {answer!r}; return the index of a replica, from 0 to 1"
    with pytest.raises(PolicyError, match=re.escape(message)):
        serve(replicas(2), [Request(7, 4, 1)], Astray())


ROUTER = """
import numpy as np

class Heaviest:
    def __init__(self, lightest=False):
        self.sign = 1 if lightest else -1

    def choose(self, request, replicas):  # a view is a sequence of replicas
        return np.argmin([self.sign * replica.outstanding_tokens for replica in replicas])

class Fails:
    def choose(self, request, replicas):
        return replicas[len(replicas)]
"""


def test_a_router_outside_the_repository_is_given_by_its_import_path(tmp_path: Path) -> None:
    """All at once: the heaviest replica keeps the first, and with it all others; the lightest takes turns, as lengths are equal."""
    (tmp_path / "my_router.py").write_text(ROUTER)

    def used(*keys: str) -> list[bool]:
        settings = ("backend=sim", "backend.replicas=3", "batch=2", *QUICK, f"output={len(list(tmp_path.iterdir()))}")
        done = command("run", *settings, *keys, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / settings[-1].removeprefix("output=")
        busy = [stage["compute"] > 0 for stage in summary(folder)["about"]["execution"]["stages"]]
        for rows in (read_requests(folder), read_steps(folder)):
            assert {*rows["replica"]} == {replica for replica, works in enumerate(busy) if works}
        return busy

    assert used("backend.router._target_=my_router.Heaviest") == [True, False, False]
    assert used("backend.router._target_=my_router.Heaviest", "+backend.router.lightest=true") == [True] * 3
    assert used("backend.router={_target_: my_router.Heaviest, lightest: true}") == [True] * 3
    assert used("backend.router=least_loaded") == [True] * 3
    fails = ("backend.replicas=2", "backend.router._target_=my_router.Fails")
    refused = command("run", "backend=sim", *fails, cwd=tmp_path)
    raised = "router Fails, request 0: choose() raised IndexError: list index out of range (my_router.py:13)"
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: {raised}; see runs/"), refused


@pytest.mark.parametrize(
    ("settings", "num_stages"),
    [("tensor_parallel=4 replicas=2 router=least_loaded", 1), ("tensor_parallel=2 pipeline_stages=4", 4)],
)
def test_the_command_line_spreads_a_model(settings: str, num_stages: int) -> None:
    keys = [f"backend.{setting}" for setting in settings.split()]
    run = assemble(compose_run("backend=sim", "workload=open_loop", "workload.num_requests=20", *keys))
    assert run.first.limits.num_stages == num_stages
    assert len(run.engine.run().requests) == 20
    facts = run.settings.backend.facts([engine.executor for engine in run.engine.engines], run.first.cost, True)
    assert (facts["gpus"], len(facts["stages"])) == (8, num_stages * run.first.cost.topology.replicas)
    assert sum(facts["stages"][-1].values()) > 0
