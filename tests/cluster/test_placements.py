"""Goldens of placements by hand: where a request is prefilled and decoded, when a decoder takes it, and who is rejected."""

from typing import Any

import pytest
from shown_replicas import Shown, loads, replica
from test_transfers import ROLES, serve
from test_transfers import replica as engine_of

from cbatch import FinishReason, Request
from cbatch.cluster import Moves, Reject, Role, Route
from cbatch.moves import Room
from cbatch.request import SLO
from cbatch.sim.roofline import Affine
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


def test_splitwise_mixes_a_token_machine() -> None:
    """Golden C2: p0 9,000 pending, p1 7,000; t0 0.5 of memory, t1 0.3. The second prompt makes p1 exceed 8,192."""
    pools = [
        *(replica(prompt_tokens_left=left, num_unfinished=1, num_blocks=10_000) for left in (9000, 7000)),
        *(replica(kv_use=use, num_unfinished=1, num_blocks=10_000) for use in (0.5, 0.3)),
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
    assert RemoteAbove(0).choose(Request(0, 100, 5), view).decode == 0
    view = staged(Shown([replica(cached=40, num_waiting=4), replica()]), [0], [0, 1])
    assert RemoteAbove(0).choose(Request(0, 100, 5), view).decode == 1


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
    """Of two replicas that are predicted to meet 20 s, the one with fewer prompt tokens left; the output goes to small chunks."""
    pools = [replica(left=[(1, 11)], prompt_tokens_left=11, kv_use=0.1)]
    pools += [replica(left=[(2, left)], prompt_tokens_left=left, kv_use=use) for left, use in ((5, 0.9), (3, 0.8))]
    asked = Request(0, 10, 5, slo=SLO(ttft=20.0))
    assert TaiChi(large=1).choose(asked, Shown(pools)) == Route(2, 2)  # type: ignore[arg-type]


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
