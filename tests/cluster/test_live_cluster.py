"""Replicas in real time: each serves by itself, the router sees what is, and a failure of one ends all."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from apart import check_empty, serve_apart
from schedules import UnitCost
from tiny_models import LLAMA, LONGEST_OUTPUT, greedy_references, make_executor

from cbatch import Engine, Eviction, FinishReason, KVSize, Limits, Plan, Policy, Request, Server, Status, View
from cbatch.arrivals import Listed
from cbatch.cluster import ClusterView, LiveCluster, Moves, Reject, ReplicaView, Role, RoundRobin, Router
from cbatch.cluster.live_transfers import Prefilled
from cbatch.cluster.transfers import Copier, Copy
from cbatch.errors import PolicyError, StallError
from cbatch.moves import Moved, Room
from cbatch.request import spec_of
from cbatch.runtime.transfers import HostCopy, copy_blocks
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.stall import Patience
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.routers import ROUTERS
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(max_batch=3, max_tokens=64, max_request_tokens=64)
LONG = 60.0
"""Seconds that no wait of a working cluster takes."""


def replica(policy: Policy, eviction: Eviction | None = None) -> Engine:
    executor = make_executor(LLAMA, LIMITS, 40, 8)
    return Server(executor, LIMITS, UnitCost(), KVSize(40, 8), prefix_cache=eviction).engine(policy)


class AcceptsNothing(RoundRobin):
    def accepts(self, room: Room) -> bool:
        return False


def test_a_decoder_that_never_has_room_ends_the_run() -> None:
    """The patience is a second."""
    server = partial(Server, cost=UnitCost(), kv=KVSize(40, 8), patience=Patience(1.0), prefix_cache=LRU())
    engines = [server(make_executor(LLAMA, LIMITS, 40, 8), LIMITS).engine(Orca()) for _ in range(2)]
    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), connect=connected)
    cluster = LiveCluster(engines, AcceptsNothing(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    with pytest.raises(StallError, match=r"the policy plans nothing with \d+ requests; for 1 s"):
        run(cluster, asked(*[0.0] * 4))


class RejectsOdd(RoundRobin):
    def choose(self, request: Request, view: ClusterView) -> int | Reject:
        return Reject("odd") if request.id % 2 else super().choose(request, view)


def test_what_the_router_rejects_ends_alone() -> None:
    """No policy hears of it, and no replica counts it."""
    requests = asked(*[0.0] * 4)
    cluster = serve([Orca(), Orca()], requests, RejectsOdd())
    ends = [(request.finish_reason, request.reject_reason) for request in requests]
    assert ends == [(FinishReason.LENGTH, ""), (FinishReason.REJECTED, "odd")] * 2
    assert cluster.replica_of == {0: 0, 2: 1} and len(cluster.record.requests) == 4


def serve(policies: list[Policy], requests: list[Request], router: Router) -> LiveCluster:
    return run(LiveCluster([replica(policy) for policy in policies], router), requests)


def run(cluster: LiveCluster, requests: list[Request]) -> LiveCluster:
    cluster.attach(Listed(requests))
    left: list[int] = []  # as a progress bar sees it
    try:
        cluster.run(lambda part: left.append(part.num_unfinished))
    finally:
        cluster.executor.close()
    assert left == sorted(left, reverse=True) and left[-1] == 0
    return cluster


def asked(*arrivals: float, tokens: int = LONGEST_OUTPUT) -> list[Request]:
    """Request i is reference i and arrives at `arrivals[i]`."""
    return [
        Request(id_, len(reference.prompt), tokens, prompt=reference.prompt, arrival_time=time)
        for id_, (reference, time) in enumerate(zip(greedy_references(LLAMA), arrivals, strict=False))
    ]


@pytest.mark.long
@pytest.mark.parametrize("lies", [False, True])
def test_routers_know_wrongly_and_tokens_stay(lies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt comes twice. A lying index promises more cached tokens than a prompt has, at each busy replica."""
    if lies:
        monkeypatch.setattr(ReplicaView, "cached_tokens", lambda view, request: view.num_unfinished and 1000)
    expected = [reference.output[:4] for reference in greedy_references(LLAMA)[:4]]
    for make in ROUTERS.values():
        first, again = asked(*[0.0] * 4, tokens=4), asked(*[0.02] * 4, tokens=4)
        requests = first + [Request.from_spec(replace(spec_of(each), id=each.id + 4)) for each in again]
        run(LiveCluster([replica(Orca(), LRU()) for _ in range(2)], make()), requests)
        assert [request.output for request in requests] == expected * 2


class Waits(Orca):
    """Plans nothing before the event is set."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self.event = event

    def plan(self, view: View) -> Plan:
        assert self.event.wait(LONG), "the other replica goes on meanwhile"
        return super().plan(view)


def test_every_request_has_its_tokens_and_arrives_when_it_does() -> None:
    requests = asked(0, 0, 0, 0, 0.05, 0.1, 0.1)
    cluster = serve([Orca(), Orca()], requests, RoundRobin())
    expected = [reference.output for reference in greedy_references(LLAMA)[: len(requests)]]
    assert [request.output for request in requests] == expected
    served = [sorted(request.id for request in engine.record.requests) for engine in cluster.engines]
    assert served == [[0, 2, 4, 6], [1, 3, 5]]
    assert all(request.admitted_at >= request.arrival_time for request in requests)
    steps = cluster.record.steps
    number = sum(len(engine.record.steps) for engine in cluster.engines)
    assert [step.iteration for step in steps] == list(range(number))
    assert [step.received_at for step in steps] == sorted(step.received_at for step in steps)


def test_a_replica_takes_requests_while_another_is_under_way() -> None:
    """The first one plans nothing before the second one's later request has been served."""
    second, ended = threading.Event(), list[Request]()
    other = Orca()
    other.on_finish = lambda request: ended.append(request) or (second.set() if len(ended) == 2 else None)  # type: ignore[func-returns-value, attr-defined]
    serve([Waits(second), other], asked(0, 0, 0.01, 0.01), RoundRobin())


class Fails(Orca):
    def plan(self, view: View) -> Plan:
        raise ValueError("no idea")


def test_an_exception_in_one_replica_ends_all_at_once() -> None:
    """Not only when the last request, of an hour later, has arrived."""
    cluster = LiveCluster([replica(Orca()), replica(Fails())], RoundRobin())
    cluster.attach(Listed(asked(0, 0, 3600)))
    with pytest.raises(PolicyError, match=r"policy Fails, iteration 0: plan.* no idea"):
        cluster.run()
    assert not any(thread.name == "replica" for thread in threading.enumerate())


def move_cluster(
    connect: Callable[[Any, Any], Copier],
    lease: float = inf,
    push: bool = False,
    policy: Callable[[], Policy] = Orca,
    layers: int = 1,
) -> LiveCluster:
    """Two prefillers and two decoders on threads of their own."""
    roles = [Role.DECODE, Role.PREFILL, Role.PREFILL, Role.DECODE]
    moves = Moves(
        8 * LLAMA.kv_bytes_per_token, PiecewiseLinear((1.0,), (0.0,)), push, layers, lease=lease, connect=connect
    )
    return LiveCluster([replica(policy(), LRU()) for _ in roles], RoundRobin(), roles=roles, moves=moves)


def connected(sender: Any, receiver: Any) -> Copier:
    return lambda pairs: HostCopy(partial(copy_blocks, sender.caches, receiver.caches, pairs), receiver.follow)


def connected_late(sender: Any, receiver: Any) -> Copier:
    def copy(pairs: Any) -> int:
        time.sleep(0.01)
        return copy_blocks(sender.caches, receiver.caches, pairs)

    return lambda pairs: HostCopy(partial(copy, pairs), receiver.follow)


@pytest.mark.parametrize(("push", "layers"), [(False, 1), (True, 1), (True, LLAMA.num_layers)])
@pytest.mark.parametrize(("lease", "connect"), [(inf, connected), (inf, connected_late), (1e-9, connected)])
def test_real_tokens_are_prefilled_here_and_decoded_there(
    lease: float, connect: Callable[[Any, Any], Copier], push: bool, layers: int
) -> None:
    """Replicas compute while blocks are copied; with leases that end at once, decoders compute the prompts again."""
    cluster = move_cluster(connect, lease, push, lambda: SarathiServe(Fixed(9)), layers)
    requests = asked(*[0.002 * place for place in range(12)])
    run(cluster, requests)
    assert [request.output for request in requests] == [each.output for each in greedy_references(LLAMA)[:12]]
    assert all(request.num_moves == 1 for request in requests)
    senders = {each.request: each.sender for each in (*cluster.record.transfers, *cluster.record.lost)}
    prefilled_on = cluster.record.prefilled_on
    assert prefilled_on and senders.items() <= prefilled_on.items() and {*prefilled_on} == {*range(12)}
    parts = [(each.num_recomputed_after_moves, each.num_recomputed_after_lost_leases) for each in requests]
    assert [sum(part) for part in parts] == [each.num_recomputed_tokens for each in requests], "none is preempted"
    assert any(leases for _, leases in parts) == (lease < inf)
    full = sum(request.num_prompt_tokens // 8 * 8 for request in requests)
    sent = sum(transfer.num_tokens for transfer in cluster.record.transfers)
    assert sent == full if lease == inf else sent < full
    assert sent + sum(each.num_tokens for each in cluster.record.lost) == full
    firsts = {request.id: request.token_times[0] for request in requests}
    assert all(transfer.started > (firsts[transfer.request] or inf) for transfer in cluster.record.transfers)
    hidden = [transfer.hidden for transfer in cluster.record.transfers]
    assert all(0 <= share <= 1 for share in hidden) and any(hidden) == (push and lease == inf)
    num_bytes = sum(transfer.num_bytes for transfer in cluster.record.transfers)
    assert num_bytes == sent * LLAMA.kv_bytes_per_token
    if layers > 1:
        assert all(share == 1 for share in hidden)
    check_empty(cluster)


@pytest.mark.parametrize("push", [False, True])
def test_no_thread_is_woken_between_a_replica_that_learns_of_blocks_and_their_copy(push: bool) -> None:
    """With push that is the prefiller, before the request leaves it; else the decoder."""
    begun, reference = list[tuple[bool, Status]](), greedy_references(LLAMA)[-1]

    def connect(sender: Any, receiver: Any) -> Copier:
        def begin(pairs: Any) -> Copy:
            begun.append((threading.current_thread() is cluster._replicas[1 - push].thread, request.status))
            return HostCopy(partial(copy_blocks, sender.caches, receiver.caches, pairs), receiver.follow)

        return begin

    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), push, connect=connect)
    engines, request = [replica(SarathiServe(Fixed(9)), LRU()) for _ in range(2)], reference.request(0, 4)
    cluster = LiveCluster(engines, RoundRobin(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    run(cluster, [request])
    assert set(begun) == {(True, Status.RUNNING if push else Status.MOVING)}
    assert request.output == reference.output[:4]


@pytest.mark.parametrize("push", [False, True])
def test_a_request_is_decoded_by_iterations_that_wait_for_its_copies_in_place_of_the_host(push: bool) -> None:
    """Copies begin when the decoder has launched the request's first iteration, and until then hold their blocks at both ends."""
    launched, held = threading.Event(), list[int]()

    def connect(sender: Any, receiver: Any) -> Copier:
        def copy(pairs: Any) -> int:
            assert launched.wait(LONG)
            held.append(len(engines[0].state.leases))
            return copy_blocks(sender.caches, receiver.caches, pairs)

        return lambda pairs: HostCopy(partial(copy, pairs), receiver.follow)

    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), push, connect=connect)
    engines, reference = [replica(SarathiServe(Fixed(9)), LRU()) for _ in range(2)], greedy_references(LLAMA)[-1]
    cluster = LiveCluster(engines, RoundRobin(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    engines[1].on_launch = lambda step: launched.set()
    request = reference.request(0, 4)
    run(cluster, [request])
    assert request.output == reference.output[:4] and held and all(held)
    check_empty(cluster)


@pytest.mark.parametrize(("push", "layers"), [(False, 1), (True, 1), (True, LLAMA.num_layers)])
def test_clients_leave_while_blocks_are_copied(push: bool, layers: int) -> None:
    """At times at which requests are prefilled, offered, copied and decoded; what each has got by then stays."""
    cluster = move_cluster(connected_late, push=push, policy=lambda: SarathiServe(Fixed(9)), layers=layers)
    timeouts = [0.004 * (1 + place) for place in range(12)]
    requests = [
        Request.from_spec(replace(spec_of(request), timeout=timeout))
        for request, timeout in zip(asked(*[0.002 * place for place in range(12)]), timeouts, strict=True)
    ]
    run(cluster, requests)
    for request, reference in zip(requests, greedy_references(LLAMA), strict=False):
        assert request.output == reference.output[: len(request.output)]
    assert any(request.finish_reason is FinishReason.CANCELLED for request in requests)
    check_empty(cluster)


@pytest.mark.long
def test_random_policies_and_clients_keep_tokens_and_blocks() -> None:
    """Requests are preempted at both replicas, of one or two stages, whatever is on its way."""
    transfers = []
    for seed in range(6):  # each of the three with each of the two others
        limits = replace(LIMITS, num_stages=1 + seed % 2)
        executors = [make_executor(LLAMA, limits, 60, 4) for _ in range(2)]
        connect = (connected, connected_late)[seed // 2 % 2]
        cluster = serve_apart(executors, LLAMA, limits, KVSize(15, 4), connect, seed, layerwise=seed % 3 == 0)
        cluster.executor.close()
        transfers += cluster.record.transfers
    assert len(transfers) > 50 and any(transfer.hidden for transfer in transfers)


def test_a_client_that_left_before_a_move_is_known_to_the_decoder() -> None:
    """The prefiller may have handed the request over before it hears of the client; then the decoder, which looks, ends the request."""
    cluster, requests = move_cluster(connected), asked(0, 0)
    replicas = [SimpleNamespace(messages=SimpleQueue[Any]()) for _ in cluster.engines]
    cluster.begin(replicas, SimpleQueue())
    for request in requests:
        cluster.arrive(request, 0.0)
    cluster.cancel(1)
    for request in requests:
        moved = Moved(np.zeros(0, np.int32), None, 0.0)
        cluster.take_in([Prefilled(request, cluster.replica_of[request.id], moved)])
    told = [[each.messages.get() for _ in range(each.messages.qsize())] for each in replicas]
    assert told[1:3] == [[requests[0]], [requests[1], 1]]
    assert [len(messages) for messages in (told[0], told[3])] == [1, 1]
    assert all(1 in each.left_early and 0 not in each.left_early for each in replicas)
    cluster.take_in(requests)
    assert not replicas[0].left_early
    cluster.executor.close()


def test_clients_leave_in_time_though_no_blocks_are_kept_for_them() -> None:
    """With push, and decoders that take nothing: the run ends with the clients' patience, 50 ms, and not with a stall after 60 s."""
    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), push=True, connect=connected)
    engines = [replica(Orca(), LRU()) for _ in range(2)]
    cluster = LiveCluster(engines, AcceptsNothing(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    requests = [Request.from_spec(replace(spec_of(each), timeout=0.05)) for each in asked(0, 0.01, 0.02)]
    run(cluster, requests)
    assert {request.finish_reason for request in requests} == {FinishReason.CANCELLED}
    assert all(0.05 <= (request.finished_at or 0) - request.arrival_time < 5 for request in requests)
    check_empty(cluster)


class OneChunk(SarathiServe):
    """Computes a chunk of the first prompt, and nothing more."""

    def plan(self, view: View) -> Plan:
        return view.plan().build() if view.running else super().plan(view)


@pytest.mark.parametrize("leaves", [False, True])
def test_kept_blocks_stay_until_the_copies_to_them_have_ended(leaves: bool) -> None:
    """Although the client leaves amid the prompt, or the prefiller's lease ends at once."""
    gate, used = threading.Event(), list[int]()

    def connect(sender: Any, receiver: Any) -> Copier:
        def copy(pairs: Any) -> int:
            assert gate.wait(LONG)
            return copy_blocks(sender.caches, receiver.caches, pairs)

        return lambda pairs: HostCopy(partial(copy, pairs), receiver.follow)

    policy: type[SarathiServe] = OneChunk if leaves else SarathiServe
    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), True, lease=1e-9, connect=connect)
    engines = [replica(policy(Fixed(9)), LRU()), replica(Orca(), LRU())]
    cluster = LiveCluster(engines, RoundRobin(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    reference = greedy_references(LLAMA)[-1]
    request = Request.from_spec(replace(spec_of(reference.request(0, 4)), timeout=0.5 if leaves else None))

    def look(_: Any) -> None:
        if request.status is Status.FINISHED:
            time.sleep(0.05)
            used.append(engines[1].state.pool.num_used)
            gate.set()

    cluster.attach(Listed([request]))
    try:
        cluster.run(look)
    finally:
        gate.set()
        cluster.executor.close()
    assert used[0] == len(reference.prompt) // 8
    assert request.output == ([] if leaves else reference.output[:4])
    check_empty(cluster)


def test_kept_blocks_stay_until_the_iterations_that_write_to_them_have_ended() -> None:
    """The client leaves while a chunk is in flight, whose layers write to the decoder's blocks."""
    moves = Moves(0, PiecewiseLinear((1.0,), (0.0,)), True, LLAMA.num_layers, connect=connected)
    engines = [replica(SarathiServe(Fixed(9)), LRU()) for _ in range(2)]
    cluster = LiveCluster(engines, RoundRobin(), roles=[Role.PREFILL, Role.DECODE], moves=moves)
    at_prefiller, at_decoder = queues = [SimpleQueue[Any](), SimpleQueue[Any]()]
    cluster.begin([SimpleNamespace(messages=queue) for queue in queues], SimpleQueue())
    (prefiller, decoder), (request,) = engines, asked(0)
    cluster.arrive(request, 0.0)
    at_decoder.get()()
    decoder.step()  # keeps blocks
    prefiller.submit([at_prefiller.get()])
    prefiller.step()  # begins the first chunk
    prefiller.cancel(request)
    cluster.take_in([request])
    at_prefiller.get()()
    cluster.transfers._of_pairs[0, 1].submit(int).result()  # runs after what was to be copied before
    assert prefiller.num_in_flight == 1 and at_decoder.empty()
    prefiller.step()
    at_decoder.get(timeout=LONG)()
    assert decoder.state.pool.num_used == request.num_prompt_tokens // 8
    cluster.settle()
    assert decoder.state.pool.num_used == 0
    cluster.executor.close()


def test_blocks_that_are_used_before_they_came_are_noticed() -> None:
    """What the tests above would notice: iterations that do not wait for a copy of 50 ms, although its request is with them."""

    def connect(sender: Any, receiver: Any) -> Copier:
        return lambda pairs: HostCopy(lambda: time.sleep(0.05) or 0, lambda event: None)

    with pytest.raises(RuntimeError, match="poison"):
        run(move_cluster(connect), asked(*[0.0] * 12))


@pytest.mark.parametrize("copy", [lambda pairs: 1 // 0, lambda pairs: HostCopy(lambda: 1 // 0, lambda event: None)])
def test_an_exception_in_a_copy_ends_the_run(copy: Copier) -> None:
    """While it begins, or while its end is waited for."""

    def connect(sender: Any, receiver: Any) -> Copier:
        return copy

    with pytest.raises(ZeroDivisionError):
        run(move_cluster(connect), asked(*[0.0] * 12))
    assert not any(thread.name.startswith(("replica", "copies")) for thread in threading.enumerate())
