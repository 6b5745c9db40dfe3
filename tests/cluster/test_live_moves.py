"""Moves in a live cluster whose threads are stepped by hand: replicas, the router and copies act in any order, drawn from a seed."""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Container
from functools import partial
from math import inf
from queue import SimpleQueue
from typing import Any

import pytest
from apart import check_empty
from fuzz_policy import FuzzPolicy
from schedules import UnitCost
from test_live_cluster import connected
from test_routes import Across
from tiny_models import LLAMA, LONGEST_OUTPUT, greedy_references, make_executor

from cbatch import Engine, FinishReason, KVSize, Limits, Policy, Request, Server
from cbatch.arrivals import Listed
from cbatch.cluster import ClusterView, LiveCluster, Moves, Role, RoundRobin, Route, Router
from cbatch.cluster.live import _Replica
from cbatch.cluster.live_transfers import Prefilled
from cbatch.host import advance
from cbatch.moves import Room
from cbatch.record import Transfer
from cbatch.runtime.transfers import HostCopy, copy_blocks
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.stall import Patience
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(max_batch=3, max_tokens=64, max_request_tokens=64)
SIZE = 4


def live_cluster(
    policies: list[Policy],
    sizes: list[int],
    roles: list[Role],
    router: Router,
    connect: Callable[..., Any] = connected,
    **moves: Any,
) -> LiveCluster:
    """sizes: blocks of each replica."""
    engines = [
        Server(
            make_executor(LLAMA, LIMITS, size, SIZE), LIMITS, UnitCost(), KVSize(size, SIZE), prefix_cache=LRU(),
            patience=Patience(2.0),
        ).engine(policy)
        for policy, size in zip(policies, sizes, strict=True)
    ]  # fmt: skip
    seconds = PiecewiseLinear((1.0,), (0.0,))
    given = Moves(SIZE * LLAMA.kv_bytes_per_token, seconds, connect=connect, **moves)
    return LiveCluster(engines, router, roles=roles, moves=given)


class WithClients(_Replica):
    """A replica whose clients may leave, like those of a server."""

    def __init__(self, engine: Engine, send: Callable[[Any], object]) -> None:
        super().__init__(engine, send)
        self.live: dict[int, Request] = {}
        self.left_early: Container[int] = ()

    def receive(self, message: Any) -> None:
        if isinstance(message, int):
            if request := self.live.get(message):
                self._engine.cancel(request)
            return
        super().receive(message)
        if isinstance(message, Request):
            self.adopted(message)

    def adopted(self, request: Request) -> None:
        self.live[request.id] = request
        if request.id in self.left_early:
            self._engine.cancel(request)

    def left(self, prefilled: Prefilled) -> None:
        del self.live[prefilled.request.id]
        super().left(prefilled)

    def ended(self, request: Request) -> None:
        super().ended(request)
        del self.live[request.id]


class SomeStay(Across):
    def choose(self, request: Request, view: ClusterView) -> Route:
        prefiller, decoder, _ = super().choose(request, view)
        return Route(prefiller, prefiller if request.id % 3 == 2 else decoder)


class ByHand:
    """The thread of a pair, which does its next task when told."""

    def __init__(self) -> None:
        self.waiting, self.is_over = deque[Callable[[], object]](), False

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        assert not self.is_over, "a thread that has ended does nothing more"
        self.waiting.append(partial(function, *arguments))

    def go(self) -> None:
        self.waiting.popleft()()

    def do_all(self) -> None:
        while self.waiting:
            self.go()

    def shutdown(self) -> None:
        self.do_all()
        self.is_over = True


class Threads:
    """The threads of a cluster, each of which does one thing at a time."""

    def __init__(self, cluster: LiveCluster, requests: list[Request]) -> None:
        self.cluster, self.pending, self.ended = cluster, deque(requests), list[Request]()
        self.sent = deque[Any]()  # by replicas, for the thread that routes
        self.awaiting = set[int]()  # replicas whose iterations wait for copies
        self.replicas = [WithClients(engine, self.sent.append) for engine in cluster.engines]
        cluster.attach(Listed(requests))
        cluster.executor.now()  # starts all clocks
        cluster.begin(self.replicas, SimpleQueue())
        self.pairs = {pair: ByHand() for pair in cluster.transfers._of_pairs}
        cluster.transfers._of_pairs = self.pairs
        for number, (engine, each) in enumerate(zip(cluster.engines, self.replicas, strict=True)):
            engine.arrivals = each
            executor: Any = engine.executor
            executor.wait = partial(self._wait, number, executor.wait)
            executor.follow = partial(self._follow, number, executor.follow)

    def _follow(self, replica: int, follow: Callable[[Any], None], event: Any) -> None:
        self.awaiting.add(replica)
        follow(event)

    def _wait(self, replica: int, wait: Callable[[Any], Any], in_flight: Any) -> Any:
        """The device waits for copies if its iterations are to, and for no others."""
        for (_, receiver), pair in self.pairs.items():
            if receiver == replica and replica in self.awaiting:
                pair.do_all()
        self.awaiting.discard(replica)
        return wait(in_flight)

    def possible(self) -> list[Callable[[], object]]:
        """What some thread could do next."""
        return [*self.copies(), *self.turns(), *[self.arrive] * bool(self.pending), *[self.take_in] * bool(self.sent)]

    def turns(self) -> list[Callable[[], object]]:
        """The turns of replicas that have anything to do."""
        engines = zip(self.cluster.engines, self.replicas, strict=True)
        return [partial(advance, *each) for each in engines if min(each[0].next_at(), each[1].next()) <= each[0].now()]

    def copies(self) -> list[Callable[[], object]]:
        """The next copy of each pair that has one."""
        return [pair.go for pair in self.pairs.values() if pair.waiting]

    def arrive(self) -> None:
        self.cluster.arrive(self.pending.popleft(), self.cluster.now())

    def take_in(self) -> None:
        self.ended += self.cluster.take_in([self.sent.popleft()])

    def settle(self) -> None:
        self.cluster.settle()
        self.cluster.executor.close()
        check_empty(self.cluster)
        assert self.cluster._num_open == [0] * len(self.replicas) and not self.cluster._decoders
        transfers = self.cluster.transfers
        assert not (transfers._prefiller_of or transfers._sent or any(transfers._after_flight.values()))


def random_threads(seed: int) -> LiveCluster:
    draw, references = random.Random(seed), greedy_references(LLAMA)
    across = draw.random() < 0.3
    push, router = draw.random() < 0.6, SomeStay() if across else RoundRobin()
    roles = [Role.PREFILL] * draw.randint(1, 2) + [Role.DECODE] * draw.randint(1, 2)
    roles = [Role.BOTH] * 2 if across else roles
    layers = LLAMA.num_layers if push and draw.random() < 0.5 else 1
    makers: list[Callable[[], Policy]] = [Orca, lambda: SarathiServe(Fixed(9)), lambda: FuzzPolicy(seed)]
    policies, sizes = [draw.choice(makers)() for _ in roles], [draw.randint(14, 14 if across else 30) for _ in roles]
    cluster = live_cluster(
        policies, sizes, roles, router, push=push, layers=layers, lease=draw.choice([inf, inf, 1e-9, 0.01])
    )
    requests = [
        draw.choice(references).request(id_, draw.randint(1, LONGEST_OUTPUT)) for id_ in range(draw.randint(4, 10))
    ]
    threads, left, leaves = Threads(cluster, requests), set[int](), draw.choice([0.0, 0.02, 0.1])
    haste: defaultdict[str, float] = defaultdict(lambda: draw.choice([0.1, 1.0, 1.0]))  # of each kind of thread
    while len(threads.ended) < len(requests):
        able = threads.possible()
        assert able, f"seed {seed}: nothing can happen, and requests are left"
        draw.choices(able, [haste[getattr(each, "func", each).__name__] for each in able])[0]()
        there = sorted(cluster.replica_of.keys() - left - {each.id for each in threads.ended})
        if there and draw.random() < leaves:
            left.add(id_ := draw.choice(there))
            cluster.cancel(id_)
    threads.settle()
    by_prompt = {tuple(reference.prompt): reference.output for reference in references}
    for request in requests:
        whole = request.max_new_tokens if request.finish_reason is FinishReason.LENGTH else len(request.output)
        assert request.output == by_prompt[tuple(request.prompt or ())][:whole], f"seed {seed}: {request}"
        assert request.id in left or request.finish_reason is FinishReason.LENGTH
    return cluster


@pytest.mark.long
def test_any_order_of_threads_keeps_tokens_and_blocks() -> None:
    transfers, reasons = [], []
    for seed in range(30):
        cluster = random_threads(seed)
        transfers += cluster.transfers.done
        reasons += [request.finish_reason for engine in cluster.engines for request in engine.record.requests]
    assert len(transfers) > 50 and any(each.hidden for each in transfers)
    assert reasons.count(FinishReason.CANCELLED) > 10


def test_layers_write_no_more_to_blocks_that_were_given_up() -> None:
    """After the first of five chunks; the decoder reads the blocks after the prefill then."""
    policies: list[Policy] = [SarathiServe(Fixed(9)), Orca()]
    roles, reference = [Role.PREFILL, Role.DECODE], greedy_references(LLAMA)[-1]
    cluster = live_cluster(policies, [24, 24], roles, RoundRobin(), push=True, layers=LLAMA.num_layers)
    threads = Threads(cluster, [request := reference.request(0, 4)])
    prefiller, decoder = cluster.engines
    threads.arrive()
    threads.turns()[-1]()
    threads.turns()[0]()
    assert prefiller._in_flight[-1].step.sent.any()
    decoder.inbox.take_back(request)
    threads.turns()[0]()
    assert not prefiller._in_flight[-1].step.sent.any()
    while able := threads.possible():
        able[0]()
    threads.settle()
    (sent,) = cluster.transfers.done
    assert request.output == reference.output[:4] and sent.num_tokens == 36 and not sent.hidden


class AcceptsShort(RoundRobin):
    def accepts(self, room: Room) -> bool:
        return room.lacking <= 2


def test_a_client_that_leaves_before_blocks_are_kept_for_it_ends_its_request() -> None:
    """The decoder never keeps the 9 blocks of the first prompt, behind which the second waits, of 2."""
    cluster = live_cluster([Orca(), Orca()], [24, 24], [Role.PREFILL, Role.DECODE], AcceptsShort(), push=True)
    long, short = greedy_references(LLAMA)[-1], greedy_references(LLAMA)[3]
    requests = [long.request(0, 4), short.request(1, 4)]
    threads = Threads(cluster, requests)
    while able := threads.possible():
        able[0]()
    assert not threads.ended
    cluster.cancel(0)
    while able := threads.possible():
        able[0]()
    assert [(each.id, each.output) for each in threads.ended] == [(0, []), (1, short.output[:4])]
    threads.settle()


@pytest.mark.parametrize("push", [False, True])
def test_replicas_that_hold_blocks_for_each_other_give_way(push: bool) -> None:
    """Each of 16 blocks holds 9 for the other, and has no room for the other's 9: one of the leases ends, and its prompt is computed again.

    With push each first keeps 9 for a prompt that the other has no room to compute, and gives these up.
    """
    cluster = live_cluster([Orca(), Orca()], [16, 16], [Role.BOTH] * 2, Across(), push=push)
    requests = [reference.request(id_, 4) for id_, reference in enumerate(greedy_references(LLAMA)[-2:])]
    threads = Threads(cluster, requests)
    for _ in requests:
        threads.arrive()
    while len(threads.sent) < len(requests):
        for act in (*threads.copies(), *threads.turns()):
            act()
    assert [len(engine.state.leases) for engine in cluster.engines] == [1, 1]
    while len(threads.ended) < len(requests):
        able = threads.possible()
        assert able, "each waits for the other"
        able[0]()
    threads.settle()
    assert [each.output for each in requests] == [each.output[:4] for each in greedy_references(LLAMA)[-2:]]
    assert any(each.num_recomputed_tokens for each in requests) and all(each.num_moves == 1 for each in requests)


def test_blocks_that_are_being_copied_outlive_the_request_at_both_ends() -> None:
    """Its client leaves when the prompt is here and the copies of its first blocks have not ended: later requests would find them overwritten."""
    policies: list[Policy] = [SarathiServe(Fixed(9)), Orca()]
    cluster = live_cluster(policies, [24, 24], [Role.PREFILL, Role.DECODE], RoundRobin(), push=True)
    request = greedy_references(LLAMA)[-1].request(0, 4)
    threads = Threads(cluster, [request])
    prefiller, decoder = cluster.engines
    copies = threads.pairs[0, 1]
    threads.arrive()
    while not threads.sent:
        threads.turns()[0]()
    leases, held = list(prefiller.state.leases), decoder.state.pool.num_used
    assert copies.waiting and held and sum(lease.revoke() for lease in leases) == 1  # the others are being read
    threads.take_in()
    cluster.cancel(0)
    threads.turns()[-1]()
    assert request.finish_reason is FinishReason.CANCELLED and decoder.state.pool.num_used == held
    threads.take_in()
    assert [cluster._idle_at(each) for each in (0, 1)] == [inf, inf]
    while threads.possible():
        threads.possible()[0]()
    assert decoder.state.pool.num_used == 0
    threads.settle()


TICK = 1 / 32  # seconds for each thing that a thread does


class Late(HostCopy):
    """A copy that ended a quarter of a tick before the thread that waits for it sees this."""

    def wait(self) -> tuple[int, float]:
        return super().wait()[0], TICK / 4


def late(sender: Any, receiver: Any) -> Callable[[Any], Late]:
    return lambda pairs: Late(partial(copy_blocks, sender.caches, receiver.caches, pairs), receiver.follow)


@pytest.mark.parametrize(
    ("push", "layers", "ends", "hidden", "started", "ended"),
    [
        (False, 1, {}, 0, 11, 11.75),  # it begins at 11, and the decoder's device waits for it from 12 on
        (True, 1, {6: 1, 7: 1, 8: 1, 12: 1}, (6 + 3 / 4) / 9, 9, 12),
        (True, 1, {12: 4}, (2 * 4 / 7 + 2 * 3 / 6 + 2 * 2 / 5 + 3 / 4) / 9, 9, 12),
        (True, 1, {6: 1, 7: 1, 8: 2}, 1, 9, 9),
        (True, LLAMA.num_layers, {}, 1, 12, 12),
    ],
)
def test_a_transfer_lasts_from_the_first_token_to_the_end_of_its_last_copy(
    push: bool, layers: int, ends: dict[int, int], hidden: float, started: float, ended: float
) -> None:
    """Times in ticks. With pull the first token is there at 7 and the decoder reads at 11. With push these are 9 and 12; the iterations that end
    at 5, 6, 7 and 8 complete 2, 2, 2 and 3 blocks, whose copies begin then. ends: how many copies end by tick.
    """
    policies: list[Policy] = [Orca(), SarathiServe(Fixed(9))]
    roles, ticks = [Role.DECODE, Role.PREFILL], 1.0
    cluster = live_cluster(policies, [24, 24], roles, RoundRobin(), late, push=push, layers=layers)
    for engine in cluster.engines:
        engine.executor.now = lambda: ticks * TICK  # type: ignore[method-assign]
    requests = [greedy_references(LLAMA)[-1].request(id_, 4) for id_ in (7, 8)]
    threads = Threads(cluster, requests)
    copies = threads.pairs[1, 0].waiting
    threads.arrive()
    while not threads.ended:
        ticks = tick = int(ticks) + 1
        [*threads.turns()[::-1], *[threads.take_in] * bool(threads.sent), *threads.copies()][0]()
        ticks = tick + 1 / 4
        for _ in range(ends.get(tick, 0)):
            copies.popleft()()
            copies.popleft()()  # of the blocks' lease, or of the transfer
    while able := threads.turns():
        able[0]()
    assert not any(engine.state.pool.num_used for engine in cluster.engines)
    while able := threads.possible():  # the second request finds its blocks at the decoder
        able[0]()
    threads.settle()
    sent, none = cluster.transfers.done
    size = 9 * SIZE * LLAMA.kv_bytes_per_token
    assert sent == Transfer(7, 1, 0, 9 * SIZE, size, started * TICK, ended * TICK, pytest.approx(hidden))
    assert none == Transfer(8, 1, 0, 0, 0, none.started, none.started)
    assert requests[0].token_times[0] == (9 if push else 7) * TICK
