"""Prefill here and decode there, simulated: goldens by hand, links, back-pressure, and random runs that leak nothing."""

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_policy import FuzzPolicy
from pool_check import check_pool
from schedules import UnitCost

from cbatch import Engine, FinishReason, Limits, Plan, Request, Server, View
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, LeastLoaded, Moves, Role, RoundRobin, Route, Router
from cbatch.cluster.links import Link
from cbatch.errors import StallError
from cbatch.kv import KVSize
from cbatch.moves import Room, has_room
from cbatch.record import Transfer
from cbatch.results.gathered import Gathered
from cbatch.results.metrics import Window
from cbatch.results.replicas import transfers_of
from cbatch.results.summary import summarize
from cbatch.results.timeline import write_timeline
from cbatch.sim.executor import SimExecutor
from cbatch.sim.measured import HostTime
from cbatch.sim.roofline import Affine
from policies.chunking import Fixed
from policies.continuum import Continuum
from policies.evictions import LRU
from policies.mlfq import MLFQ
from policies.pauses import Pauses, TimeToLive
from policies.plas import Plas
from policies.routers import LlmD
from policies.sarathi_serve import SarathiServe
from policies.session_affinity import SessionAffinity

ROLES = [Role.PREFILL, Role.DECODE]


class Whole:
    """Decodes, and whole prompts first come first served, as many as fit."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in view.waiting[:]:
            if not plan.add(request, whole=True):
                break
        return plan.build()


class Chunks:
    """Decodes, and as much of the prompts as fits."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in [*view.prefilling, *view.waiting]:
            if request not in plan.plan.preempt:
                plan.add(request)
        return plan.build()


def replica(
    batch: int = 8,
    max_tokens: int = 64,
    num_blocks: int = 100,
    asynchronous: bool = False,
    policy: Any = None,
    block_size: int = 1,
    handover: float = 0.0,
) -> Engine:
    """An iteration takes a second."""
    limits = Limits(batch, max_tokens, 64)
    executor = SimExecutor(UnitCost(), HostTime(0.0, handover_seconds=handover))
    parts = executor, limits, UnitCost(), KVSize(num_blocks, block_size), asynchronous
    return Server(*parts, prefix_cache=LRU()).engine(policy or Whole())


def serve(
    engines: list[Engine],
    requests: list[Request],
    moves: Moves,
    roles: list[Role] = ROLES,
    router: Router | None = None,
) -> Cluster:
    cluster = Cluster(engines, router or RoundRobin(), roles=roles, moves=moves)
    cluster.attach(Listed(requests))
    cluster.run()
    for engine in engines:
        state = engine.state
        assert not state.leases and engine.inbox.is_empty and state.pool.num_used == 0
        assert sorted(state.table._free_rows) == list(range(state.table.num_rows))
    return cluster


def test_golden_of_states() -> None:
    """Prompts of at most 8 tokens a batch; one link in order, 0.25 s + 0.125 s per token; two decodes at once.

    Prefills end at A 1, B 1, C 2, D 3, where D ends. Transfers: A 1 to 2, B 2 to 2.5, C 2.5 to 3.25. B waits for the iteration from 2 to 3.
    """
    sizes = [(6, 3), (2, 2), (4, 3), (8, 1)]
    requests = [Request(id_, prompt, new) for id_, (prompt, new) in enumerate(sizes)]
    moves = Moves(1, Affine(0.25, 0.125), fair=False)
    cluster = serve([replica(max_tokens=8), replica(batch=2)], requests, moves)
    assert [request.finished_at for request in requests] == [4, 4, 6, 3]
    spans = [(transfer.request, transfer.started, transfer.ended) for transfer in cluster.record.transfers]
    assert spans == [(0, 1, 2), (1, 1, 2.5), (2, 2, 3.25)]
    assert [step.ended for step in cluster.engines[1].record.steps] == [3, 4, 5, 6]
    assert [transfer.num_bytes for transfer in cluster.record.transfers] == [6, 2, 4]
    assert [request.first_token_at for request in requests] == [1, 1, 2, 3]
    assert cluster.record.prefilled_on == {0: 0, 1: 0, 2: 0}, "D stays"


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_golden_of_requests_admitted_ahead_of_their_transfers(late: float) -> None:
    """As above; iterations wait on the decoder's device. A and B: 1 to 2.5, iteration to 3.5, where B ends; C: 3.5 to 4.25, iterations to 5.25, where A ends, and 6.25.

    late: seconds from a first token to the decoder's turn, by which all but D's is later.
    """
    requests = [Request(id_, *sizes) for id_, sizes in enumerate([(6, 3), (2, 2), (4, 3), (8, 1)])]
    moves = Moves(1, Affine(0.25, 0.125), fair=False, ahead=True)
    cluster = serve([replica(max_tokens=8, handover=late), replica(batch=2)], requests, moves)
    assert [request.finished_at for request in requests] == [5.25 + late, 3.5 + late, 6.25 + late, 3]
    assert [step.started - late for step in cluster.engines[1].record.steps] == [2.5, 4.25, 5.25]
    (account,) = cluster.engines[1].executor.accounts()  # type: ignore[attr-defined]
    assert (account.compute, account.copies) == (3, 1.5 + 0.75)


@pytest.mark.parametrize(("ahead", "ends"), [(True, 5.25), (False, 6.25)])
def test_a_request_is_in_the_iteration_after_the_one_in_flight(ahead: bool, ends: float) -> None:
    """The decoder's iterations end at 2.25, 3.25, ...; a request that comes at 2.5 is read at 3.25, by 3.5; the next iteration begins then, the one after at 4.25."""
    requests = [Request(0, 4, 8), Request(1, 4, 2, arrival_time=1.5)]
    serve([replica(), replica(asynchronous=True)], requests, Moves(1, Affine(0.25, 0.0), ahead=ahead))
    assert requests[1].finished_at == ends


def test_sends_lengthen_an_iteration_of_their_sender() -> None:
    """As above, 1/16 s per token: the 8 tokens sent from 1 on lengthen the next iteration, D's from 2, by 0.5 s; C's 4 tokens none, as none follows."""
    sizes = [(6, 3), (2, 2), (4, 3), (8, 1)]
    requests = [Request(id_, prompt, new) for id_, (prompt, new) in enumerate(sizes)]
    moves = Moves(1, Affine(0.25, 0.125), fair=False, delay=Affine(0.0, 1 / 16))
    cluster = serve([replica(max_tokens=8), replica(batch=2)], requests, moves)
    assert [request.finished_at for request in requests] == [4, 4, 6, 3.5]
    executor: Any = cluster.engines[0].executor
    assert not executor.repeats  # a leap would pass over what C's tokens owe


@pytest.mark.parametrize(
    ("fair", "ends"),
    [(True, {0: 5.0, 1: 4.0}), (False, {0: 4.0, 1: 6.0})],  # alone: 1 s and 3 s, 1 s and 1 s; the second begins at 1 s
)
def test_a_link_is_shared_or_taken_in_turn(fair: bool, ends: dict[int, float]) -> None:
    """Fair: the first is alone from 1 s to 2 s, both have half from 2 s to 4 s, and the first has 1 s left."""
    link, ended = Link(fair), dict[int, float]()
    link.add(0, 0.0, 1.0, 3.0)
    link.advance(1.0)
    link.add(1, 1.0, 1.0, 1.0)
    while (at := link.next_at) < inf:
        ended |= dict.fromkeys(link.advance(at), at)
    assert ended == ends


@pytest.mark.parametrize(("fair", "ends"), [(True, (5.0, 4.0)), (False, (4.0, 6.0))])
def test_ends_are_foreseen_unless_others_begin(fair: bool, ends: tuple[float, float]) -> None:
    """The transfers above: alone, the first would end at 4 s; foreseeing moves nothing."""
    link = Link(fair)
    link.add(0, 0.0, 1.0, 3.0)
    assert link.ends_at(0) == 4.0
    link.advance(1.0)
    link.add(1, 1.0, 1.0, 1.0)
    assert (link.ends_at(0), link.ends_at(1)) == ends
    link.advance(3.0)
    assert (link.ends_at(0), link.ends_at(1)) == ends


def test_gpus_of_a_replica_send_side_by_side() -> None:
    """8 tokens of 4 bytes from two GPUs: 0.25 s and 16 bytes of each at 16 per s."""
    (transfer,) = serve(
        [replica(), replica()], [Request(0, 8, 2)], Moves(4, Affine(0.25, 1 / 16), gpus=2)
    ).record.transfers
    assert (transfer.num_bytes, transfer.ended - transfer.started) == (32, 1.25)


def test_what_is_hidden_takes_the_link() -> None:
    """3 s of work in each of two overlapping prefills, from 0 to 4 s and from 1 to 5 s, a plain transfer from 1 to 2 s: 4 s of 5 are free."""
    link = Link(True)
    link.add(0, 1.0, 0.0, 1.0)
    link.advance(5.0)
    assert [link.hide(begin, begin + 4.0, 3.0) for begin in (0.0, 1.0, 1.0)] == [3.0, 1.0, 0.0]
    link.add(1, 6.0, 0.0, 1.0)
    link.add(2, 9.0, 0.0, 9.0)
    for now in (6.5, 12.0):
        link.advance(now)
    assert link.hide(5.0, 12.0, 2.5) == 2.5, "1 s before the transfer from 6 to 7 s, and 1.5 s after it"
    assert link.hide(5.0, 12.0, 2.5) == 0.5, "the transfer that began at 9 s is not over"


def test_a_link_goes_on_after_days() -> None:
    """Here times are rounded to 1e-11 s: transfers of up to 2 ms, one a second, each end within theirs."""
    draw, link = random.Random(0), Link(True)
    for key in range(50):
        link.add(key, 1e5 + key, 1e-3 * draw.random(), 1e-3 * draw.random())
        assert link.advance(1e5 + key + 0.0021) == [key]


def test_random_links_are_never_faster_than_alone() -> None:
    """No transfer beats latency + work, and all together do not beat the sum of their work (A4, 25)."""
    for seed in range(50):
        draw = random.Random(seed)
        link, began, ended = Link(True), dict[int, tuple[float, float]](), dict[int, float]()
        now = 0.0
        for key in range(12):
            now += draw.choice([0.0, 0.1, draw.random()])
            ended |= dict.fromkeys(link.advance(now), now)
            began[key] = now, draw.random()
            link.add(key, now, 0.05, began[key][1])
        while (at := link.next_at) < inf:
            ended |= dict.fromkeys(link.advance(at), at)
        assert all(ended[key] >= at + 0.05 + work - 1e-9 for key, (at, work) in began.items())
        first = min(at for at, _ in began.values()) + 0.05
        assert max(ended.values()) - first >= sum(work for _, work in began.values()) - 1e-9


@pytest.mark.parametrize(("layers", "seconds", "visible"), [(4, 0.5, 0.125), (4, 3.0, 2.25), (2, 0.5, 0.25)])
def test_layers_are_sent_while_the_next_are_computed(layers: int, seconds: float, visible: float) -> None:
    """A transfer of t seconds beside a prefill of c = 1 s and 4 layers takes max(t/4, t - c*3/4) after the prefill (C0)."""
    request = Request(0, 8, 2)
    moves = Moves(1, Affine(0.0, seconds / 8), push=True, layers=layers)
    (transfer,) = serve([replica(), replica()], [request], moves).record.transfers
    assert transfer.ended - transfer.started == pytest.approx(visible)
    assert transfer.hidden == pytest.approx(1 - visible / seconds)


def test_hidden_layers_of_a_batch_share_the_link() -> None:
    """Two prompts of one iteration, 0.5 s alone each, have 0.75 s of the link beside it: 1 - 0.75 is left at its end."""
    requests = [Request(id_, 8, 2) for id_ in range(2)]
    transfers = serve(
        [replica(), replica()], requests, Moves(1, Affine(0.0, 1 / 16), push=True, layers=4)
    ).record.transfers
    assert max(transfer.ended for transfer in transfers) == pytest.approx(1.25)


@pytest.mark.parametrize("on_turn", [lambda cluster: None, lambda cluster: cluster.take()])
def test_hidden_layers_of_a_prompt_in_chunks(on_turn: Any) -> None:
    """16 tokens in four iterations and 4 layers hide 3 s of 8 s, also where a run with `stream` has taken the record of the first ones."""
    requests = [Request(id_, 16, 2, arrival_time=20.0 * id_) for id_ in range(3)]
    moves = Moves(1, Affine(0.0, 0.5), push=True, layers=4)
    cluster = Cluster([replica(max_tokens=4, policy=Chunks()), replica()], RoundRobin(), roles=ROLES, moves=moves)
    cluster.attach(Listed(requests))
    cluster.run(on_turn)
    assert [transfer.hidden for transfer in cluster.record.transfers] == [3 / 8] * 3


@pytest.mark.parametrize(("seconds", "block_size", "hidden"), [(0.5, 1, 3 / 8), (0.1, 1, 12 / 16), (0.1, 8, 1 / 2)])
def test_pushed_chunks_are_sent_while_the_next_are_computed(seconds: float, block_size: int, hidden: float) -> None:
    """Four chunks of 4 tokens take a second each: the full blocks of the first three have 3 s, so that 3 s of 8 are hidden, or these blocks of 1.6 s."""
    engines = [replica(max_tokens=4, policy=Chunks(), block_size=block_size), replica(block_size=block_size)]
    moves = Moves(block_size, Affine(0.0, seconds), push=True)
    (transfer,) = serve(engines, [Request(0, 16, 2)], moves).record.transfers
    assert (transfer.num_tokens, transfer.hidden) == (16, pytest.approx(hidden))
    assert transfer.ended - transfer.started == pytest.approx(16 * seconds * (1 - hidden))


def test_blocks_at_the_decoder_are_not_sent() -> None:
    """The same prompt again: seven of its eight tokens are found, as the last one is computed with the notification alone."""
    requests = [Request(id_, 8, 2, arrival_time=10.0 * id_, prefix_hashes=(1,), hash_block=8) for id_ in range(2)]
    record = serve([replica(), replica()], requests, Moves(1, Affine(0.25, 0.125))).record
    transfers, gathered = record.transfers, Gathered(record)
    assert [transfer.num_tokens for transfer in transfers] == [8, 0]
    gathered.transfers = [
        transfer._replace(hidden=hidden) for transfer, hidden in zip(transfers, (0.5, 0.0), strict=True)
    ]
    assert transfers_of(gathered, Window(0.0, 99.0))["hidden_share"] == 0.5, "of the bytes: the second has none"
    assert transfers[1].ended - transfers[1].started == 0.25


@pytest.mark.parametrize(("lease", "lost"), [(inf, 0), (5.0, 8)])
def test_a_full_decoder_stops_the_prefiller_or_loses_leases(lease: float, lost: int) -> None:
    """12 prompts of 8; the decoder has room for 2 and ends them late, the prefiller holds 3: the rest waits, or is computed again.

    Of the ten that are not read at once, those held when nothing is read for 5 s are lost.
    """
    requests = [Request(id_, 8, 30) for id_ in range(12)]
    engines = [replica(num_blocks=30), replica(num_blocks=60)]
    cluster = serve(engines, requests, Moves(1, Affine(0.0, 0.0), lease=lease))
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    assert max(step.kv_blocks_used for step in engines[0].record.steps) <= 30
    held = [step.ended for step in engines[0].record.steps]
    assert (max(held) > 30) == (lease == inf)
    recomputed = [request.id for request in requests if request.num_recomputed_tokens]
    assert bool(recomputed) == bool(lost)
    assert sorted((each.request, each.num_tokens) for each in cluster.record.lost) == [(id_, 8) for id_ in recomputed]
    if not lost:
        figures, (ids, times) = transfers_of(Gathered(cluster.record), Window(0.0, inf)), cluster.record.tokens()
        gaps = [np.diff(times[ids == request.id][:2]) for request in requests]
        parts = [figures[f"{name}_seconds"] for name in ("waiting", "visible", "next_token")]
        assert sum(parts) == pytest.approx(np.mean(gaps)) and parts[0] > 10
    assert cluster.record.requests == sorted(requests, key=lambda request: (request.finished_at, request.id))


@pytest.mark.parametrize(
    ("free", "is_idle", "fits"), [(8, True, True), (7, True, False), (17, False, True), (16, False, False)]
)
def test_room_is_left_for_what_runs_and_what_waits(free: int, is_idle: bool, fits: bool) -> None:
    """8 blocks are lacking, 4 promised to others, and 5 for the growth of all; an idle decoder leaves room for no other."""
    assert has_room(Room(20, 8, free, 4, 5, is_idle)) is fits
    assert has_room(Room(20, 8, free, 7, 5, is_idle, held=3)) is fits, "3 of the 7 are not free any more"


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_hold_their_blocks_while_they_wait_for_a_decoder(ahead: bool) -> None:
    """12 prompts of 9, 2 blocks of 4 and a token of the third, are ready at 1 s. 40 blocks have room for 8, with 3 further blocks of each.

    One runs at a time, for 12 iterations, and takes 4 blocks; its end makes room for another. From the sixth on, these are blocks of requests
    that have ended, although those that wait came before: only the last token of each prompt is computed again.
    """
    requests = [Request(id_, 9, 13) for id_ in range(12)]
    engines = [replica(16, 128, block_size=4), replica(1, num_blocks=40, block_size=4)]
    cluster = serve(engines, requests, Moves(4, Affine(0.0, 0.0), ahead=ahead))
    assert [transfer.started for transfer in cluster.record.transfers] == [1] * 8 + [13, 25, 37, 49]
    assert [request.finished_at for request in requests] == [1 + 12 * number for number in range(1, 13)]
    assert [request.num_recomputed_tokens for request in requests] == [1] * 12
    assert [request.num_cached_again for request in requests] == [8] * 12


class Fills(RoundRobin):
    def accepts(self, room: Room) -> bool:
        return True


@pytest.mark.parametrize("push", [False, True])
def test_a_router_may_fill_a_decoder_to_the_last_block(push: bool) -> None:
    """Both prompts of 8 hold all 16 blocks, and the first needs another: the second gives up its own, of which it loses the last two."""
    requests = [Request(id_, 8, 3) for id_ in range(2)]
    moves = Moves(1, Affine(0.0, 0.0), push)
    cluster = serve([replica(), replica(num_blocks=16)], requests, moves, router=Fills())
    assert [transfer.ended for transfer in cluster.record.transfers] == [1, 1]
    assert [request.finished_at for request in requests] == [3, 5]
    assert [(each.num_recomputed_tokens, each.num_recomputed_after_moves) for each in requests] == [(0, 0), (2, 2)]


def test_a_waiting_requests_blocks_cost_its_policy_nothing() -> None:
    """8 blocks of 10 are held for the second request, which waits for a place: its policy has 2 less what the first takes, and need not find them."""
    seen: list[tuple[int, int, int, int]] = []

    class Looks(Whole):
        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            for request in view.waiting:
                kv = view.kv
                seen.append((kv.num_free, kv.num_held(request), kv.num_shared(request), kv.num_lacking(request, 9)))
            return plan

    requests = [Request(0, 2, 4), Request(1, 8, 2)]
    serve([replica(), replica(1, num_blocks=13, policy=Looks())], requests, Moves(1, Affine(0.0, 0.0)), router=Fills())
    assert seen[1:] == [(2, 0, 8, 1), (1, 0, 8, 1), (5, 0, 8, 1)], seen


@pytest.mark.parametrize("push", [False, True])
def test_a_client_that_leaves_during_the_prefill_leaves_after_its_token(push: bool) -> None:
    """The client leaves at 0.5 s; the token comes at 1 s and cannot be recalled; the decoder, whose clock is still at 0, ends the request then."""
    request = Request(0, 8, 3, timeout=0.5)
    serve([replica(), replica()], [request], Moves(1, Affine(0.25, 0.125), push))
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.CANCELLED, 1)
    assert (request.last_token_at, request.finished_at) == (1, 1)


def test_blocks_kept_for_a_lost_lease_are_free_at_once() -> None:
    """The replica keeps 8 of 10 blocks from 0 s on. The lease is over at 1.5 s, before the request comes at 2 s: then it computes its 8 tokens and another with them."""
    request = Request(0, 8, 2)
    moves = Moves(1, Affine(0.0, 0.0), push=True, lease=0.5)
    cluster = serve([replica(handover=1.0), replica(num_blocks=10)], [request], moves)
    assert (request.finished_at, request.num_recomputed_tokens, cluster.record.transfers) == (3, 8, [])
    assert cluster.record.lost == [Transfer(0, 0, 1, num_tokens=8, num_bytes=0, started=2, ended=2)]
    figures = summarize(cluster.record, num_blocks=100, max_batch=8, num_replicas=2)
    named = {name: figures["transfers"][name] for name in ("number", "lost_leases", "lost_tokens")}
    assert named == {"number": 0, "lost_leases": 1, "lost_tokens": 8} and figures["run"]["preemptions"] == 0
    again = {key: tokens for key, tokens in figures["run"].items() if key.startswith("recomputed_after_")}
    assert [*again.values()] == [0, 0, 8], again
    assert transfers_of(Gathered(cluster.record), Window(2.0, 9.0))["lost_leases"] == 0, "lost before"


def test_a_client_that_leaves_frees_the_blocks_that_were_held_for_it() -> None:
    """The decoder has no room beside the first request; the second holds 8 of the prefiller's 10 blocks from 2 s until its client leaves at 5 s."""
    requests = [Request(0, 8, 30), Request(1, 8, 4, arrival_time=2.0, timeout=3.0), Request(2, 8, 1, arrival_time=3.0)]
    serve([replica(num_blocks=10), replica(num_blocks=40)], requests, Moves(1, Affine(0.0, 0.0)))
    assert [request.first_token_at for request in requests] == [1, 3, 6]


def test_events_look_at_links_with_news_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of one in 64 links costs at most 1.5 times as many looks at links as one in a single link."""
    asked: list[Link] = []
    due = Link.next_at.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Link, "next_at", property(lambda link: (asked.append(link), due(link))[1]))
    per_transfer = []
    for number in (1, 8):
        asked.clear()
        requests = [Request(id_, 8, 3, arrival_time=id_ / number) for id_ in range(20 * number)]
        engines, roles = [replica() for _ in range(2 * number)], [each for each in ROLES for _ in range(number)]
        moves = Moves(1, Affine(0.25, 0.125))
        cluster = serve(engines, requests, moves, roles)
        per_transfer.append(len(asked) / len(cluster.record.transfers))
    assert per_transfer[1] <= 1.5 * per_transfer[0], per_transfer


def test_figures_of_a_pool_include_the_first_tokens_of_another(tmp_path: Path) -> None:
    """Golden's A, B and C belong to the decoder's pool, with first tokens at 1, 1 and 2 s; three transfers of 12 tokens, 1 + 1.5 + 1.25 s, which end at 2, 2.5 and 3.25 s; second tokens at 3, 4 and 5 s."""
    requests = [Request(id_, *sizes) for id_, sizes in enumerate([(6, 3), (2, 2), (4, 3), (8, 1)])]
    engines = [replica(max_tokens=8), replica(batch=2)]
    cluster = Cluster(engines, RoundRobin(), ["p", "d"], roles=ROLES, moves=Moves(1, Affine(0.25, 0.125), fair=False))
    cluster.attach(Listed(requests))
    gathered = Gathered(cluster.run())
    write_timeline(tmp_path / "timeline.json.gz", cluster.record, "golden", gathered.served)
    events = json.loads(gzip.decompress((tmp_path / "timeline.json.gz").read_bytes()))["traceEvents"]
    spans = [(event["ph"], event["name"], event["ts"]) for event in events if event["pid"] == 8 and event["ph"] in "be"]
    assert spans[:2] == [("b", "0 to 1: 0", 1e6), ("e", "0 to 1: 0", 2e6)] and len(spans) == 6
    decoded = gathered.of_pool["d"].served
    assert sorted(zip(decoded.ttft.tolist(), decoded.output_tokens.tolist(), strict=True)) == [(1, 2), (1, 3), (2, 3)]
    assert gathered.of_pool["p"].served.ttft.tolist() == [3]
    assert transfers_of(gathered, Window(0.0, 9.0)) == {
        "number": 3,
        "tokens": 12,
        "bytes": 12,
        "waiting_seconds": 0,
        "visible_seconds": 1.25,
        "next_token_seconds": pytest.approx((1 + 1.5 + 1.75) / 3),
        "lost_leases": 0,
        "lost_tokens": 0,
        "hidden_share": 0,
    }
    gathered.transfers = [
        Transfer(0, 1, 0, 4, 4, 0.25, 0.5),
        *gathered.transfers,
    ]  # a prefix, copied before the prefill
    found = transfers_of(gathered, Window(0.0, 9.0))
    assert (found["number"], found["visible_seconds"], found["copied_seconds"]) == (4, 1.25, 0.25)


class Copies:
    """Sends requests to replicas in turn, and lets the one before send what it has cached; some are decoded elsewhere."""

    def __init__(self) -> None:
        self.number = -1

    def choose(self, request: Request, view: ClusterView) -> Route:
        self.number += 1
        able, decoders = view.fitting(request, Role.PREFILL), view.fitting(request, Role.DECODE)
        chosen = able[self.number % len(able)]
        stays = chosen in decoders and request.id % 3 > 0
        return Route(
            chosen, chosen if stays else decoders[request.id % len(decoders)], able[self.number % len(able) - 1]
        )


@pytest.mark.parametrize(("cached", "sent", "ends"), [(True, 7, 12.125), (False, 0, 11.0)])
def test_a_prefix_is_copied_before_the_prompt_is_computed(cached: bool, sent: int, ends: float) -> None:
    """0.25 s + 0.125 s for each of seven tokens; then an iteration for the last one. A replica that has none sends nothing, and none waits."""
    same: Any = {"prefix_hashes": (1,), "hash_block": 8} if cached else {}
    requests = [Request(id_, 8, 1, arrival_time=10.0 * id_, **same) for id_ in range(2)]
    cluster = serve([replica(), replica()], requests, Moves(1, Affine(0.25, 0.125)), [Role.BOTH] * 2, Copies())
    assert [transfer.num_tokens for transfer in cluster.record.transfers] == [sent] * cached
    assert [step.num_prefill_tokens for step in cluster.engines[1].record.steps] == [8 - sent]
    assert requests[1].finished_at == ends and requests[1].num_cached_tokens == sent


@pytest.mark.parametrize(
    ("router", "counts"), [(RoundRobin(), [3, 3, 3, 3]), (LlmD({"session": 1}, seed=1), [6, 0, 6, 0])]
)
def test_stages_do_not_share_a_routers_memory(router: Router, counts: list[int]) -> None:
    """Two prefillers and two decoders: in turn, each serves half; a session stays with its prefiller and with its decoder."""
    requests = [Request(id_, 2, 2, arrival_time=10.0 * id_, session="a") for id_ in range(6)]
    cluster = serve(
        [replica() for _ in range(4)], requests, Moves(1, Affine(0.0, 0.0)), [*ROLES[:1] * 2, *ROLES[1:] * 2], router
    )
    assert [len(engine.record.steps) for engine in cluster.engines] == counts


def random_run(seed: int, size: int = 1) -> Cluster:
    """size: tokens of a block."""
    draw = random.Random(seed)
    roles = [*ROLES, *draw.choices([Role.PREFILL, Role.DECODE, Role.BOTH], k=draw.randint(0, 3))]
    sizes = [(draw.randint(2, 6), draw.randint(64, 100) // size, draw.random() < 0.5) for _ in roles]
    engines = [replica(batch, 64, blocks, each, block_size=size) for batch, blocks, each in sizes]
    shared = draw.random() < 0.5
    requests = [
        Request(
            id_,
            draw.randint(1, 30),
            draw.choice([1, 2, 20, 30]),
            arrival_time=draw.choice([0.0, 5.0, 20 * draw.random()]),
            true_new_tokens=1,
            timeout=draw.choice([None, None, 30 * draw.random()]),
        )
        if draw.random() < 0.2
        else Request(
            id_,
            draw.randint(1, 30),
            draw.choice([1, 2, 20, 30]),
            arrival_time=20 * draw.random(),
            timeout=draw.choice([None, None, None, 60 * draw.random()]),
            **({"prefix_hashes": (1,), "hash_block": 30} if shared else {}),
        )
        for id_ in range(draw.randint(5, 40))
    ]
    push = draw.random() < 0.5
    link = Affine(draw.choice([0.0, 0.3]), draw.choice([0.0, 0.05, 0.5]))
    moves = Moves(
        1, link, push, 4 if push else 1, draw.choice([inf, inf, 3.0]), *(draw.random() < 0.7 for _ in range(2))
    )
    router: Any = draw.choice([RoundRobin(), LeastLoaded(), Copies()])
    cluster = serve(engines, requests, moves, roles, router)
    whole = [request for request in requests if request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)]
    assert len(whole) + sum(request.finish_reason is FinishReason.CANCELLED for request in requests) == len(requests)
    ids = cluster.record.tokens()[0].tolist()
    assert all(ids.count(request.id) == request.num_output_tokens for request in requests)
    assert all((request.last_token_at or 0.0) <= request.finished_at for request in requests)
    for transfer in cluster.record.transfers:
        first = inf if not push else requests[transfer.request].first_token_at or inf  # with push copies begin by then
        assert transfer.ended >= max(transfer.started, min(transfer.started, first) + link.at(0) - 1e-9)
    prefillers = [number for number, role in enumerate(roles) if role is Role.PREFILL]
    assert all(request.num_output_tokens <= 1 for request in requests if cluster.replica_of[request.id] in prefillers)
    assert [each.num_unfinished for each in cluster._router.look(1e6)] == [0] * len(roles)
    return cluster


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first = 100_000 * metafunc.config.getoption("--draw")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--schedules")))


def test_random_runs_leak_nothing_and_repeat(seed: int) -> None:
    """Roles, both orders of allocation, leases, clients that leave in every state; twice the same to the last digit."""
    once, again = random_run(seed), random_run(seed)
    assert once.record.steps == again.record.steps
    assert once.record.transfers == again.record.transfers


class Causes:
    """What each token of a request was lost to last, by its place, and how many tokens came again for each cause."""

    def __init__(self) -> None:
        self.of, self.found, self.again = dict[int, str](), 0, Counter[str]()

    def lose(self, number: int, cause: str) -> None:
        self.of.update(dict.fromkeys(range(number), cause))
        self.found = 0

    def lose_lease(self, number: int) -> None:
        self.of.update((place, "lost_leases") for place in range(number) if self.of.get(place) == "moves")

    def count(self, number: int) -> None:
        self.again.update(self.of[place] for place in range(self.found, number) if place in self.of)


@pytest.mark.long
def test_tokens_come_again_for_what_took_them_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """In random runs, token by token."""
    causes: dict[int, Causes] = defaultdict(Causes)
    notes: dict[str, Callable[[Causes, int], object]] = {
        "count_recomputed": Causes.count,
        "lose": lambda own, number: own.lose(number, "preemptions"),
        "move": lambda own, number: own.lose(number, "moves"),
        "lose_lease": Causes.lose_lease,
        "resume": lambda own, number: setattr(own, "found", number),
    }

    def noting(method: Callable[[Request, int], None], note: Callable[[Causes, int], object]) -> Any:
        def call(request: Request, number: int) -> None:
            method(request, number)
            note(causes[request.id], number)

        return call

    for name, note in notes.items():
        monkeypatch.setattr(Request, name, noting(getattr(Request, name), note))
    seen = Counter[str]()
    for seed in range(20):
        causes.clear()
        cluster = random_run(seed, size=5)
        for request in cluster.record.requests:
            again = causes[request.id].again
            moved = request.num_recomputed_after_moves, request.num_recomputed_after_lost_leases
            assert (again.total(), again["moves"], again["lost_leases"]) == (request.num_recomputed_tokens, *moved)
            seen += again
    assert min(seen[cause] for cause in ("preemptions", "moves", "lost_leases")) > 10, seen


def test_for_a_prefillers_policy_a_turn_ends_with_its_move() -> None:
    """It waits for a second and is computed in the next one. The session's next turn comes at 12 s, 10 s after that."""
    continuum = Continuum(Fixed(64), TimeToLive(pauses := Pauses(), seconds=50.0))
    plas, affine = Plas(Fixed(64), [100.0]), SessionAffinity(64)
    for policy in (continuum, plas, affine):
        asked = {"session": "s", "extra": {"tool": "search"}}
        requests = [Request(0, 8, 9, session="other"), Request(1, 8, 9, arrival_time=0.5, **asked)]
        requests.append(Request(2, 9, 9, arrival_time=12.0, **asked))
        serve([replica(policy=policy), replica()], requests, Moves(1, Affine(0.0, 0.0)))
    assert [*pauses.of_tool(requests[2])] == [10.0]
    assert {program: pin.until for program, pin in continuum.pinned.items()} == {"s": 63.0}
    assert plas._queues._programs["s"].waited == pytest.approx(0.5)
    assert affine._ended["s"] == 13.0


def test_mlfq_forgets_what_another_replica_continues() -> None:
    """The first request moves at 1 s, and has no second token for 9 s. After 3 s it would be promoted, when the second comes."""
    requests = [Request(0, 8, 3), Request(1, 8, 3, arrival_time=6.0)]
    policy = MLFQ(quantum=0.5, promote_after=3.0)
    serve([replica(policy=policy), replica()], requests, Moves(1, Affine(0.0, 1.0)))
    assert all(request.num_output_tokens == 3 for request in requests)


class Crosswise:
    """Requests 0 and 1 move from each replica to the other; others stay."""

    moves = True

    def choose(self, request: Request, view: ClusterView) -> Route:
        here = request.id % 2
        return Route(here, 1 - here if request.id < 2 else here)


def test_replicas_give_way_although_they_run_requests() -> None:
    """Each of 12 blocks holds 8 for the other replica, and has computed 4 of 8 prompt tokens of its own when nothing is free.

    The policy does not preempt its only running request, which fits by itself.
    """
    requests = [Request(id_, 8, 3, arrival_time=0.5 * (id_ > 1)) for id_ in range(4)]
    engines = [replica(num_blocks=12, policy=Chunks()) for _ in range(2)]
    serve(engines, requests, Moves(1, Affine(0.0, 0.0)), [Role.BOTH] * 2, Crosswise())
    assert [request.num_output_tokens for request in requests] == [3] * 4
    assert [request.num_moves for request in requests] == [1, 1, 0, 0]


class FillsCrosswise(Crosswise, Fills):
    pass


def test_a_replica_asks_once_for_the_blocks_that_it_keeps_and_sleeps() -> None:
    """Each keeps 8 blocks of 12 for the other's prompt, and has computed 4 of 8 tokens of its own. Blocks that never come back end the run."""
    engines, asked = [replica(num_blocks=12, policy=Chunks()) for _ in range(2)], list[int]()

    def take_back(request: Request) -> None:
        asked.append(request.id)
        assert len(asked) < 9, "it does not sleep"

    cluster = Cluster(engines, FillsCrosswise(), roles=[Role.BOTH] * 2, moves=Moves(1, Affine(0.0, 0.0), push=True))
    for engine in engines:
        engine.inbox.take_back = take_back
    cluster.attach(Listed([Request(id_, 8, 3) for id_ in range(2)]))
    with pytest.raises(StallError):
        cluster.run()
    assert sorted(asked) == [0, 1]


class ByNumber:
    """0 and 1 move to the second replica, 2 moves to the first one, where 3 stays."""

    moves = True

    def choose(self, request: Request, view: ClusterView) -> Route:
        return [Route(0, 1), Route(0, 1), Route(1, 0), Route(0, 0)][request.id]


def test_a_replica_that_waits_for_a_copy_ends_no_lease() -> None:
    """From 1 to 9 s request 0 is copied to the second replica, which runs nothing and has 4 blocks of 20 free: request 1 waits for 8.

    The 8 blocks that it holds for 2 are not read either, as the first replica keeps room for 3. They stay: with 0 it goes on.
    """
    requests = [Request(id_, 8, 3) for id_ in range(3)] + [Request(3, 2, 30)]
    engines = [replica(num_blocks=48), replica(num_blocks=20)]
    cluster = serve(engines, requests, Moves(1, Affine(0.0, 1.0)), [Role.BOTH] * 2, ByNumber())
    assert [request.num_recomputed_tokens for request in requests] == [0] * 4
    begun = [(transfer.request, transfer.started) for transfer in cluster.record.transfers]
    assert begun == [(0, 1), (1, 11), (2, 19)], begun


class ToAndFro:
    """Two of three requests move from each replica to the other."""

    moves = True

    def choose(self, request: Request, view: ClusterView) -> Route:
        here = request.id % 2
        return Route(here, 1 - here if request.id % 3 else here)


class FillsToAndFro(ToAndFro):
    def accepts(self, room: Room) -> bool:
        return True


def test_replicas_that_fill_each_other_never_wait_for_each_other(seed: int) -> None:
    """Each has little more than the blocks of one request, and holds blocks for those that wait there, that it gave away, and that it keeps room for."""
    draw = random.Random(seed)
    policies: list[Any] = [
        draw.choice([Whole, Chunks, partial(SarathiServe, Fixed(9)), partial(FuzzPolicy, seed)])() for _ in range(2)
    ]
    size = draw.choice([1, 4])
    engines = [
        replica(draw.randint(1, 5), 64, draw.randint(60, 80) // size, draw.random() < 0.5, policy, size)
        for policy in policies
    ]
    requests = [
        Request(
            id_,
            draw.randint(1, 30),
            draw.choice([1, 2, 20, 30]),
            arrival_time=draw.choice([0.0, 20 * draw.random()]),
            timeout=draw.choice([None, None, None, 60 * draw.random()]),
        )
        for id_ in range(draw.randint(4, 30))
    ]
    link = Affine(draw.choice([0.0, 0.3]), draw.choice([0.0, 0.05, 0.5]))
    moves = Moves(size, link, draw.random() < 0.5, lease=draw.choice([inf, inf, 3.0]), ahead=draw.random() < 0.5)
    cluster = serve(engines, requests, moves, [Role.BOTH] * 2, draw.choice([ToAndFro(), FillsToAndFro()]))
    assert all(request.finish_reason is not None for request in requests)
    for engine in cluster.engines:
        check_pool(engine.state.pool)  # type: ignore[arg-type]
