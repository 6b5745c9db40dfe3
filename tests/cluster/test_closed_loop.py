"""Requests that follow the ends of others: on one engine, on a simulated cluster with and without leaps, and on replicas in real time."""

import random
from pathlib import Path

import pytest
from commands import command, summary
from small_cluster import make_cost, make_executor
from tiny_models import LLAMA
from tiny_models import make_executor as make_real

from cbatch import Engine, Limits, Request, RunRecord, Server
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, LiveCluster
from cbatch.kv import KVSize
from cbatch.model.topology import Topology
from policies.evictions import LRU
from policies.orca import Orca

TURNS, PAUSE = 5, 0.004


class Sessions(Listed):
    """Conversations: a turn follows the answer to the turn before after a pause, and its prompt begins with both."""

    follow_ends = True

    def __init__(self, number: int, pause: float = PAUSE, prompts: bool = False) -> None:
        self.numbers, self.pause, self.prompts = random.Random(0), pause, prompts
        self.tokens = dict.fromkeys(range(number), 0)
        super().__init__([self.make(chat, chat, 0.001 * chat) for chat in range(number)])

    def make(self, id_: int, chat: int, at: float) -> Request:
        tokens, new = self.tokens[chat] + self.numbers.randint(2, 6), self.numbers.randint(1, 5)
        self.tokens[chat] = tokens + new
        prompt = [id_ % 7] * tokens if self.prompts else None
        return Request(id_, tokens, new, arrival_time=at, session=str(chat), texts=((chat, 0),), prompt=prompt)

    def ended(self, request: Request) -> None:
        super().ended(request)
        number, (turn, chat) = len(self.tokens), divmod(request.id, len(self.tokens))
        if turn + 1 < TURNS:
            assert request.finished_at is not None
            self.add([self.make(request.id + number, chat, request.finished_at + self.pause)])


class AtArrival(LeastLoaded):
    def choose(self, request: Request, view: ClusterView) -> int:
        assert view.now >= request.arrival_time
        assert all(replica.at <= view.now for replica in view)
        return super().choose(request, view)


def serve(replicas: int, leaps: bool, pause: float) -> RunRecord:
    cost, limits = make_cost(Topology()), Limits(4, 256, 256, tile=4)
    servers = [Server(make_executor(1), limits, cost, KVSize(2000, 4), prefix_cache=LRU()) for _ in range(replicas)]
    engines = [server.engine(Orca()) for server in servers]
    for engine in engines:
        engine.leaps = leaps
    host: Engine | Cluster = engines[0] if replicas == 1 else Cluster(engines, AtArrival())
    host.attach(Sessions(6, pause))
    return host.run()


def told(record: RunRecord) -> list[tuple[float | None, ...]]:
    requests = sorted(record.requests, key=lambda request: request.id)
    return [(request.arrival_time, request.admitted_at, request.finished_at) for request in requests]


@pytest.mark.parametrize("pause", [0.0, PAUSE, 1.0])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_leaps_change_no_closed_loop(replicas: int, pause: float) -> None:
    leaping, plain = (serve(replicas, leaps, pause) for leaps in (True, False))
    assert leaping.steps == plain.steps and told(leaping) == told(plain)
    assert len(plain.requests) == 6 * TURNS
    ends = {request.id: request.finished_at for request in plain.requests}
    for request in plain.requests:
        if (before := request.id - 6) >= 0:
            assert request.arrival_time == ends[before] + pause <= request.admitted_at
    if replicas == 1 and pause:
        assert any(request.num_cached_tokens for request in plain.requests), "a turn finds the turns before"


def test_sessions_go_on_across_replicas_in_real_time() -> None:
    """An end in one replica makes a request, which the other one may serve."""
    limits = Limits(2, 64, 64)
    executors = [make_real(LLAMA, limits, 64, 8) for _ in range(2)]
    engines = [
        Engine(Orca(), executor, limits, make_cost(Topology()), num_blocks=64, block_size=8) for executor in executors
    ]
    cluster = LiveCluster(engines, AtArrival())
    cluster.attach(Sessions(4, 0.01, prompts=True))
    record = cluster.run()
    cluster.executor.close()
    assert len(record.requests) == 4 * TURNS and {*cluster.replica_of.values()} == {0, 1}
    ends = {request.id: request.finished_at for request in record.requests}
    for request in record.requests:
        if (before := request.id - 4) >= 0:
            assert request.arrival_time == ends[before] + 0.01 <= request.admitted_at


WORKLOAD = """
from dataclasses import dataclass

from cbatch import Request
from cbatch.arrivals import Listed
from experiments.workloads import Workload


class PingPong(Listed):
    follow_ends = True

    def ended(self, request):
        super().ended(request)
        if request.id < 9:
            self.add([Request(request.id + 1, 20, 5, arrival_time=request.finished_at + 1.0)])


@dataclass(frozen=True, kw_only=True, repr=False)
class Answers(Workload):
    def requests(self, vocabulary):
        return [Request(0, 20, 5)]

    def source(self, vocabulary):
        return PingPong(self.requests(vocabulary))
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_workload_of_a_user_may_answer_back(tmp_path: Path, replicas: int) -> None:
    (tmp_path / "answers.py").write_text(WORKLOAD)
    (tmp_path / "mine" / "workload").mkdir(parents=True)
    (tmp_path / "mine" / "workload" / "answers.yaml").write_text("_target_: answers.Answers\n")
    settings = ("backend=sim", f"backend.replicas={replicas}", "workload=answers", "output=run", "--config-dir", "mine")
    done = command("run", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = summary(tmp_path / "run")
    assert figures["run"]["requests"] == figures["about"]["requests"] == 10 and figures["run"]["seconds"] > 9


@pytest.mark.parametrize("key", ["stream=true", "bounds=true", "+workload.load=0.5"])
def test_what_needs_all_requests_beforehand_is_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "answers.py").write_text(WORKLOAD)
    (tmp_path / "mine" / "workload").mkdir(parents=True)
    (tmp_path / "mine" / "workload" / "answers.yaml").write_text("_target_: answers.Answers\nnum_requests: 9\n")
    done = command("run", "backend=sim", "workload=answers", "output=run", "--config-dir", "mine", key, cwd=tmp_path)
    assert done.returncode == 2 and "follow the ends of others" in done.stderr and done.stderr.count("\n") == 1
