"""Goldens of placements by hand: where a request is prefilled and decoded, when a decoder takes it, and who is rejected."""

from collections import Counter
from math import inf
from typing import Any

import pytest
from schedules import UnitCost
from shown_replicas import Shown, loads, replica
from test_transfers import ROLES, serve
from test_transfers import replica as engine_of

from cbatch import FinishReason, KVSize, Limits, Plan, Request, Server, Status, View
from cbatch.cluster import Moves, Reject, Role, Route
from cbatch.moves import Room, adopt, reserve, show
from cbatch.request import SLO
from cbatch.sim.executor import SimExecutor
from cbatch.sim.roofline import Affine
from policies.evictions import LRU
from policies.placements import DistServe, Mooncake, RemoteAbove, Splitwise, TaiChi
from policies.placements.mooncake import num_alive


class Staged(Shown):
    """stages: which replicas prefill, and which decode."""

    stages: dict[Role, list[int]]

    def fitting(self, request: Request, stage: Role = Role.PREFILL) -> list[int]:
        return self.stages[stage]


def staged(replicas: Shown, prefill: list[int], decode: list[int]) -> Any:
    view = Staged(replicas)
    view.stages = {Role.PREFILL: prefill, Role.DECODE: decode}
    return view


def test_distserve_takes_a_prompt_while_few_wait() -> None:
    """Golden C1 at 1 s, M 14: A holds 7 blocks. B's 5 fit; then they wait, and C's 4 are not taken as 5 >= 5% of 14."""
    accepts = DistServe().accepts
    assert accepts(Room(14, lacking=5, free=7, promised=0, growth=9, is_idle=False))
    assert not accepts(Room(14, lacking=4, free=7, promised=5, growth=9, is_idle=False))
    assert not accepts(Room(14, lacking=8, free=7, promised=0, growth=0, is_idle=True))
    assert DistServe().choose(Request(0, 5, 5), loads(3, 1, 1)) == 1


class DecodeStage:
    """DistServe's decode stage. As in its code, a candidate is counted twice: as one that waits, and by its own blocks. A block is a token."""

    def __init__(self, twice: bool) -> None:
        self.twice, self.swapped = twice, list[Request]()

    def plan(self, view: View) -> Plan:
        plan, size, running = view.plan(), view.kv.num_blocks, list(view.running)
        waiting = [request for request in view.waiting if request not in self.swapped]
        for request in waiting:
            if self.twice and 2 * request.num_prompt_tokens + 1 > size:
                plan.reject(request, "its blocks, counted twice, never fit")
        prompts = sum(request.num_prompt_tokens for request in waiting)
        while sum(request.num_tokens for request in running) + prompts > size:
            plan.preempt(running[-1])
            self.swapped.append(running.pop())
        plan.add_decodes()
        for request in [*reversed(self.swapped), *waiting]:
            own = 0 if self.twice or request in self.swapped else request.num_prompt_tokens
            if sum(each.num_tokens for each in running) + prompts - own + request.num_tokens > size:
                break
            if not plan.add(request, whole=True):
                break
            running.append(request)
            prompts -= 0 if request in self.swapped else request.num_prompt_tokens
            self.swapped = [each for each in self.swapped if each is not request]
        return plan.build()


def decoded(twice: bool, *sizes: tuple[int, int]) -> tuple[list[str], list[Request]]:
    """Requests whose prompts are held elsewhere, with a first token, come to a decoder of 14 blocks, which takes them after each iteration.

    Returns the requests of each iteration, as letters.
    """
    limits = Limits(8, 64, 64)
    parts = SimExecutor(UnitCost()), limits, UnitCost(), KVSize(14, 1), False
    engine = Server(*parts, prefix_cache=LRU()).engine(DecodeStage(twice))
    requests = [Request(id_, prompt, new) for id_, (prompt, new) in enumerate(sizes)]
    held, state, policy = [*requests], engine.state, engine.policy
    assert isinstance(policy, DecodeStage)

    def accepts(room: Room) -> bool:
        prompts = (request.num_prompt_tokens for request in state.waiting if request not in policy.swapped)
        return DistServe().accepts(room._replace(promised=sum(prompts)))

    for request in requests:
        request.num_output_tokens, request.token_times, request.status = 1, (0.0, 0.0), Status.MOVING
    engine.arrivals.num_unfinished = len(requests)
    while engine.num_unfinished:
        while held and (loading := reserve(state, held[0], held[0].num_prompt_tokens, [], accepts)):
            show(state, loading, engine.now())
            adopt(state, held.pop(0), loading.hashes)
            state.free_row(loading.row)
        engine._waiting.wake()
        for _ in engine.turn(inf):
            engine.arrivals.num_unfinished -= 1
    return ["".join(sorted("ABC"[id_] for id_ in ids.tolist())) for ids in engine.record.receivers], requests


def test_distserve_counts_a_candidate_twice() -> None:
    """Golden C1: A 6/4, B 5/3, C 4/2 held at 0 s. Counted once, B joins at 2 s, and is swapped out at 3 s."""
    sizes = (6, 4), (5, 3), (4, 2)
    assert decoded(True, *sizes)[0] == ["A", "A", "A", "B", "B", "C"]
    steps, requests = decoded(False, *sizes)
    assert steps == ["A", "AB", "A", "BC"] and [request.finished_at for request in requests] == [3, 4, 4]
    _, (refused,) = decoded(True, (7, 2))
    assert refused.finish_reason is FinishReason.REJECTED


def test_splitwise_mixes_a_token_machine() -> None:
    """Golden C2: p0 9,000 pending, p1 7,000; t0 0.5 of memory, t1 0.3. The second prompt makes p1 exceed 8,192."""
    pools = [
        *(replica(prompt_tokens_left=left, num_unfinished=1, num_blocks=10_000) for left in (9000, 7000)),
        *(replica(kv_committed=use, num_unfinished=1, num_blocks=10_000) for use in (0.5, 0.3)),
    ]
    placement: Any = Splitwise(prompts=2)
    view: Any = Shown(pools)
    assert placement.choose(Request(0, 1000, 100), view) == Route(1, 3)
    assert placement.choose(Request(1, 1500, 100), view) == Route(2, 3)
    assert placement.choose(Request(2, 1600, 100), view) == Route(2, 3), "the mixed one, whose queue is empty"
    pools[2].num_unfinished = 0
    assert placement.choose(Request(3, 1000, 9000), view) == Route(1, 0), (
        "t0 is home; no token machine has room: p0 mixes"
    )


def test_splitwise_passes_over_a_mixed_machine_that_cannot_serve() -> None:
    """The first token machine is mixed, and too small for a request, or drains: the first prompt machine does both."""
    pools = [replica(kv_committed=1.0, num_unfinished=1, prompt_tokens_left=9, num_blocks=100)]
    pools += [replica(num_unfinished=1, num_blocks=100)]
    placement = Splitwise(prompts=1, most=8)
    placement._mixed = [1]
    able, asked = [0, 1], Request(0, 10, 5)
    view = staged(Shown(pools), able, able)
    assert placement.choose(asked, view) == Route(1, 1)
    view.stages = {Role.PREFILL: [0], Role.DECODE: [0]}
    assert placement.choose(asked, view) == Route(0, 0)


@pytest.mark.parametrize(
    ("threshold", "cached", "route"),
    [(16, 84, Route(0, 1)), (16, 85, Route(1, 1)), (0, 0, Route(1, 1)), (200, 0, Route(1, 1))],
)
def test_a_remote_prefill_pays_above_a_threshold(threshold: int, cached: int, route: Route) -> None:
    """100 prompt tokens, of which the decoder lacks 16 or 15; 0 never prefills remotely."""
    view = staged(Shown([replica(), replica(cached=cached)]), [0], [1])
    assert RemoteAbove(threshold).choose(Request(0, 100, 5), view) == route


def test_the_decoder_has_the_prefix_and_a_short_queue() -> None:
    """llm-d's sample weights: 2 x 0.5 + 1 x 0 against 2 x 0 + 1 x 1 is a tie, which the first wins; 0.6 cached decides."""
    view = staged(Shown([replica(cached=50, num_waiting=4), replica()]), [0], [0, 1])
    assert RemoteAbove(0, ties="first").choose(Request(0, 100, 5), view).decode == 0
    view = staged(Shown([replica(cached=40, num_waiting=4), replica()]), [0], [0, 1])
    assert RemoteAbove(0).choose(Request(0, 100, 5), view).decode == 1


def test_idle_replicas_share_the_requests() -> None:
    """llm-d's picker and Dynamo's selector draw among equal replicas: 400 requests, of which each pair of four gets 100 on average, 8.7 its deviation."""
    view, router = staged(Shown([replica() for _ in range(4)]), [0, 1], [2, 3]), RemoteAbove()
    routes = Counter(router.choose(Request(number, 100, 5), view) for number in range(400))
    assert sorted(routes) == [Route(0, 2), Route(0, 3), Route(1, 2), Route(1, 3)]
    assert min(routes.values()) > 60


def test_mooncake_predicts_who_is_alive() -> None:
    """Golden B17b: capacity 2, 4 s each; decodes began at 0 and 1, X's prefill ends at 3; now 2. An end at t' does not count."""
    begins = [0.0, 1.0, 3.0]
    assert num_alive(begins, 2.0, 4.0, is_known=True) == 2  # + 1 > 2: reject
    assert num_alive(begins, 4.5, 4.0) == 2  # reject
    assert num_alive(begins, 5.0, 4.0) == 1  # accept


@pytest.mark.parametrize(("seconds", "route"), [(2.5, Reject), (3.0, Route)])
def test_mooncake_rejects_by_the_decoders_at_the_prefills_end(seconds: float, route: type) -> None:
    placement = Mooncake(capacity=2, output_seconds=4.0)
    placement._begins = {0: 0.0, 1: 1.0, 2: 3.0}
    view = staged(Shown([replica(left=[(9, 0)]), replica()]), [0], [1])
    view.now = 2.0
    view[0].prefill_seconds = lambda request, tokens: seconds
    assert isinstance(placement.choose(Request(3, 10, 5), view), route)


def test_taichi_prefills_where_the_objective_holds() -> None:
    """Two replicas are predicted to meet 20 s: the one with fewer prompt tokens left prefills. The output goes to small chunks."""
    pools = [replica(left=[(1, 11)], prompt_tokens_left=11, kv_committed=0.1)]
    pools += [
        replica(left=[(2, left)], prompt_tokens_left=left, kv_committed=use) for left, use in ((5, 0.9), (3, 0.8))
    ]
    asked = Request(0, 10, 5, slo=SLO(ttft=20.0))
    assert TaiChi(large=1).choose(asked, Shown(pools)) == Route(2, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("router", [Splitwise(), TaiChi()])
def test_a_burst_is_spread_over_token_replicas(router: Any) -> None:
    """No decode has begun when four requests come at once: what is bound for a replica counts."""
    requests = [Request(id_, 8, 20) for id_ in range(4)]
    cluster = serve([engine_of() for _ in range(3)], requests, Moves(1, Affine(0.0, 0.0)), [Role.BOTH] * 3, router)
    assert sorted(cluster.replica_of.values()) == [1, 1, 2, 2]


def test_placements_serve_a_simulated_cluster() -> None:
    """Each ends every request; Mooncake with room for one decode rejects, and what it rejects ends at its arrival."""
    both = [Role.BOTH, Role.BOTH]
    for router, roles in (
        (DistServe(), ROLES),
        (Splitwise(), both),
        (RemoteAbove(4), ROLES),
        (TaiChi(), both),
        (Mooncake(), ROLES),
    ):
        requests = [Request(id_, 8 + id_, 20, arrival_time=float(id_)) for id_ in range(12)]
        cluster = serve([engine_of(), engine_of()], requests, Moves(1, Affine(0.1, 0.01)), roles, router)
        assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}
        assert cluster.record.transfers
    requests = [Request(id_, 8, 20, arrival_time=float(id_)) for id_ in range(4)]
    tight = Mooncake("current", capacity=1)
    serve([engine_of(), engine_of()], requests, Moves(1, Affine(0.1, 0.01)), ROLES, tight)
    rejected = [request for request in requests if request.finish_reason is FinishReason.REJECTED]
    assert rejected and all(request.finished_at == request.arrival_time for request in rejected)
