"""Routes that name two replicas: which are refused, what they count at once, and who rejects when."""

from math import inf
from typing import Any

import pytest
from test_transfers import ROLES, replica, serve

from cbatch import ConfigError, FinishReason, Plan, PolicyError, Request, View, WorkloadError
from cbatch.arrivals import Listed
from cbatch.cluster import Cluster, ClusterView, Moves, Reject, Role, RoundRobin, Route
from cbatch.errors import StallError
from cbatch.moves import Room
from cbatch.sim.roofline import Affine
from policies.placements import DistServe, Mooncake, RemoteAbove, Splitwise, TaiChi
from policies.routers import CacheAware, Dynamo, KVAware, PrefixAware, ShortestTTFT

BOTH = [Role.BOTH, Role.BOTH]
FREE = Affine(0.0, 0.0)  # seconds of a transfer


class Always:
    def __init__(self, chosen: Any) -> None:
        self.chosen = chosen

    def choose(self, request: Request, view: ClusterView) -> Any:
        return self.chosen


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        (Route(0, 0), "chose replica 0, which has the role prefill"),  # it would decode there
        (Route(1, 0), "chose replica 1, which has the role decode"),
        (Route(0, 1, 2), r"choose() returned Route(prefill=0, decode=1, copy=2); return the index of a replica"),
    ],
)
def test_routes_against_roles_are_refused(route: Route, problem: str) -> None:
    with pytest.raises(PolicyError) as refused:
        serve([replica(), replica()], [Request(0, 8, 4)], Moves(1, FREE), router=Always(route))
    assert problem in str(refused.value)


def test_a_decoder_may_compute_the_prompt_of_its_own_request() -> None:
    cluster = serve([replica(), replica()], [Request(0, 8, 4)], Moves(1, FREE), router=Always(Route(1, 1)))
    assert cluster.replica_of == {0: 1} and not cluster.record.transfers


@pytest.mark.parametrize("route", [Route(0, 1), Route(0, 0, 1)])
def test_a_route_is_refused_where_nothing_moves(route: Route) -> None:
    with pytest.raises(PolicyError, match=r"but requests stay where they are sent; .* states moves = True"):
        serve([replica(), replica()], [Request(0, 8, 4)], None, BOTH, Always(route))  # type: ignore[arg-type]


class RejectsOdd:
    """stage: in which it rejects."""

    def __init__(self, stage: Role) -> None:
        self.stage, self.asked = stage, list[tuple[int, Role]]()

    def choose(self, request: Request, view: ClusterView) -> int | Reject:
        self.asked.append((request.id, view.stage))
        if request.id % 2 and view.stage is self.stage:
            return Reject("odd")
        return view.fitting(request)[0]


def unfinished(cluster: Cluster) -> list[int]:
    """Returns the requests that count at each replica when the router has heard of all ends."""
    return [each.num_unfinished for each in cluster._router.look(1e6)]


@pytest.mark.parametrize("push", [False, True])
def test_no_decoder_is_asked_for_what_is_rejected(push: bool) -> None:
    requests, router = [Request(id_, 8, 4, arrival_time=float(id_)) for id_ in range(4)], RejectsOdd(Role.PREFILL)
    cluster = serve([replica(), replica()], requests, Moves(1, FREE, push), router=router)
    ends = [request.finish_reason for request in requests]
    assert ends == [FinishReason.LENGTH, FinishReason.REJECTED] * 2
    assert [id_ for id_, stage in router.asked if stage is Role.DECODE] == [0, 2]
    assert cluster.replica_of == {0: 1, 2: 1} and [each.num_ended for each in cluster._router.look(1e6)] == [0, 2]
    assert unfinished(cluster) == [0, 0]


@pytest.mark.parametrize("push", [False, True])
def test_a_rejection_comes_at_the_arrival(push: bool) -> None:
    requests = [Request(id_, 8, 4) for id_ in range(2)]
    with pytest.raises(PolicyError, match=r"request 1: returned .* for its decoder; reject it at its arrival"):
        serve([replica(), replica()], requests, Moves(1, FREE, push), ROLES, RejectsOdd(Role.DECODE))


class FewestBound:
    """The first of two prefillers, and the decoder with the fewest unfinished requests, chosen at the arrival."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def choose(self, request: Request, view: ClusterView) -> Route:
        self.seen.append([each.num_unfinished for each in view])
        self.loads = [(each.outstanding_tokens, each.kv_committed) for each in view]
        return Route(0, min(view.fitting(request, Role.DECODE), key=lambda index: view[index].num_unfinished))


@pytest.mark.parametrize("push", [False, True])
def test_a_decoder_counts_what_is_bound_for_it(push: bool) -> None:
    """Four prompts at once, computed one after another: the decoders take turns from the first choice on, whatever has come there by then.

    The third ends with its first token, and counts at no decoder then.
    """
    requests = [Request(id_, 8, 4, true_new_tokens=1 if id_ == 2 else None) for id_ in range(4)]
    router, roles = FewestBound(), [Role.PREFILL, Role.DECODE, Role.DECODE]
    cluster = serve([replica(max_tokens=8), replica(), replica()], requests, Moves(1, FREE, push), roles, router)
    assert router.seen == [[0, 0, 0], [1, 1, 0], [2, 1, 1], [3, 2, 1]]
    assert cluster.replica_of == {0: 1, 1: 2, 2: 0, 3: 2}
    assert unfinished(cluster) == [0, 0, 0]


@pytest.mark.parametrize("push", [False, True])
def test_an_end_at_the_prefiller_is_not_known_before_it_is_reported(push: bool) -> None:
    """The first request ends with its first token at 1 s, which the router reads 1 s later: arrivals at 0.5 and 1.5 s find it at both replicas."""
    requests = [Request(0, 8, 4, true_new_tokens=1), *(Request(id_, 8, 4, arrival_time=id_ - 0.5) for id_ in (1, 2, 3))]
    router = FewestBound()
    engines = [replica(), replica(num_blocks=400)]
    cluster = Cluster(engines, router, roles=ROLES, moves=Moves(1, FREE, push), staleness=1.0)
    cluster.attach(Listed(requests))
    cluster.run()
    assert router.seen == [[0, 0], [1, 1], [2, 2], [2, 2]]


def test_a_prefiller_has_no_outputs_ahead() -> None:
    """With 8 prompt tokens and 20 outputs the prefiller, of 100 blocks, has 9 tokens before it, the decoder all 28."""
    requests, router = [Request(id_, 8, 20) for id_ in range(2)], FewestBound()
    serve([replica(), replica()], requests, Moves(1, FREE), ROLES, router)
    assert router.loads == [(9, 0.09), (28, 0.28)]


@pytest.mark.parametrize(
    ("prompts", "outputs", "pool"),
    [((60, 20), (60, 60), None), ((20, 20), (60, 60), "p"), ((60, 60), (30, 20), "d"), ((30, 30), (60, 40), None)],
)
def test_a_prompt_must_fit_a_prefiller_and_the_whole_a_decoder(
    prompts: tuple[int, int], outputs: tuple[int, int], pool: str | None
) -> None:
    """KV blocks of two prefillers, and of two decoders. The prompt takes 30; the last of 4 output tokens takes none, which makes 33."""
    engines = [replica(num_blocks=number) for number in (*prompts, *outputs)]
    cluster = Cluster(engines, RoundRobin(), [*"ppdd"], roles=[*ROLES[:1] * 2, *ROLES[1:] * 2], moves=Moves(1, FREE))
    if pool is None:
        cluster.check_fits(Request(0, 30, 4))
    else:
        with pytest.raises(WorkloadError, match=f"pool {pool}: request 0: 3[03] tokens exceed the KV cache of"):
            cluster.check_fits(Request(0, 30, 4))


class Across:
    """Each of two replicas computes prompts for the other."""

    def choose(self, request: Request, view: ClusterView) -> Route:
        return Route(request.id % 2, 1 - request.id % 2)


@pytest.mark.parametrize(("push", "lease"), [(False, inf), (False, 5.0), (True, inf)])
def test_replicas_that_hold_blocks_for_each_other_give_way(push: bool, lease: float) -> None:
    """Each holds 40 of its 64 blocks for the other, and has no room for the other's 40. The first gives up its own, which the other computes again.

    Iterations take a second: one with the prompt, or two, and three with the other outputs; then the other two requests. With push each first
    keeps 40 blocks for a prompt that the other has no room to compute. Both give up what they keep, and no prompt is late.
    """
    requests = [Request(id_, 40, 4) for id_ in range(4)]
    serve([replica(num_blocks=64) for _ in BOTH], requests, Moves(1, FREE, push, lease=lease), BOTH, Across())
    assert [(each.finished_at, each.num_recomputed_tokens) for each in requests] == [(4, 40), (4, 0), (8, 40), (8, 0)]


def test_layers_reach_no_blocks_that_were_given_up() -> None:
    """As above with push; 40 tokens take a second after the prefill, of which layers would hide 3/4."""
    requests, moves = [Request(id_, 40, 4) for id_ in range(4)], Moves(1, Affine(0.0, 1 / 40), True, 4)
    cluster = serve([replica(num_blocks=64) for _ in BOTH], requests, moves, BOTH, Across())
    assert [(sent.hidden, sent.ended - sent.started) for sent in cluster.record.transfers] == [(0, 1), (0, 1)]


class Reserves:
    """Decodes, and whole prompts with all blocks that they may need."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in view.waiting[:]:
            if not plan.add(request, whole=True, reserve=request.max_tokens):
                break
        return plan.build()


class Around(Across):
    """As `Across`, of three replicas."""

    def choose(self, request: Request, view: ClusterView) -> Route:
        return Route(request.id % 3, (request.id + 1) % 3)


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(("number", "router"), [(2, Across), (3, Around)])
def test_replicas_give_way_also_to_requests_that_wait_there(number: int, router: type[Across], push: bool) -> None:
    """Each of 64 blocks holds 30 for the next, and has 34 for two requests: one that waits needs 40; the one that comes needs 30, and 14 for both to grow.

    Iterations take a second. At 1 s all plan nothing; the first gives its blocks up.
    """
    requests = [Request(id_, 30, 10) for id_ in range(2 * number)]
    engines = [replica(num_blocks=64, policy=Reserves()) for _ in range(number)]
    serve(engines, requests, Moves(1, FREE, push), BOTH[:1] * number, router())
    assert all(each.finish_reason is FinishReason.LENGTH for each in requests)
    assert [each.num_moves for each in requests] == [1] * len(requests)


class SteadyReserves(Reserves):
    steady = True


@pytest.mark.parametrize("leaps", [True, False])
def test_a_request_that_awaits_room_is_looked_at_in_each_turn(leaps: bool) -> None:
    """The first has 30 of 60 blocks, all reserved. The second takes 8, and may grow by 9: it comes once the first lacks at most 13 of 20 outputs.

    That is at 7 s, with its output number 7, one each second; the copy takes no time, and the next turn admits the second, whose output 2 comes at 9 s.
    """
    requests = [Request(0, 10, 20), Request(1, 8, 10, arrival_time=1.0)]
    engines = [replica(), replica(num_blocks=60, policy=SteadyReserves())]
    for engine in engines:
        engine.leaps = leaps
    serve(engines, requests, Moves(1, FREE))
    assert [(each.first_token_at, each.finished_at) for each in requests] == [(1, 20), (2, 17)]


def test_a_sender_keeps_the_blocks_that_are_sent_alone() -> None:
    """The first prompt reserves 58 of 64 blocks. Once it is computed 28 are being sent, and the other 36 are what the second reserves."""
    requests = [Request(0, 28, 30), Request(1, 28, 8)]
    engines = [replica(num_blocks=64, policy=Reserves()), replica(num_blocks=100)]
    serve(engines, requests, Moves(1, Affine(100.0, 0.0)))
    assert [each.first_token_at for each in requests] == [1, 2], "the first is being sent until 101 s"


class NeverDecodes:
    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in view.waiting[:]:
            plan.add(request, whole=True)
        return plan.build()


def test_a_policy_that_does_not_go_on_is_named_before_what_waits_for_it() -> None:
    """The first request never decodes, so that the decoder has no room for the second one."""
    requests = [Request(id_, 40, 4) for id_ in range(2)]
    with pytest.raises(StallError, match=r"policy NeverDecodes, .* 1 running requests"):
        serve([replica(), replica(num_blocks=64, policy=NeverDecodes())], requests, Moves(1, FREE))


class AcceptsNothing(RoundRobin):
    def accepts(self, room: Room) -> bool:
        return False


@pytest.mark.parametrize(("push", "remedy"), [(False, "give backend.transfers.lease=30, or"), (True, "or")])
def test_a_router_that_accepts_nothing_is_named(push: bool, remedy: str) -> None:
    with pytest.raises(StallError, match=rf"replica 1 never has room .*; raise kv_tokens, {remedy} let the router"):
        serve([replica(), replica()], [Request(0, 8, 4)], Moves(1, FREE, push), router=AcceptsNothing())


@pytest.mark.parametrize(
    ("router", "arguments"),
    [
        (CacheAware, {"max_tree_size": -1}),
        (CacheAware, {"eviction_interval": 0.0}),
        (DistServe, {"threshold": 0.0}),
        (Dynamo, {"temperature": -1.0}),
        (KVAware, {"threshold": -1}),
        (Mooncake, {"rule": "predict"}),
        (Mooncake, {"capacity": 0}),
        (PrefixAware, {"chunk": 0}),
        (RemoteAbove, {"threshold": -1}),
        (Splitwise, {"prompts": 0}),
        (TaiChi, {"large": 0}),
    ],
)
def test_meaningless_arguments_are_named(router: Any, arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError, match=f"router: .*{name}={value!r}"):
        router(**arguments)


@pytest.mark.parametrize("router", [Splitwise(prompts=2), TaiChi(large=2)])
def test_a_placement_leaves_replicas_of_both_kinds(router: Any) -> None:
    with pytest.raises(ConfigError, match="=2 leaves none of 2 replicas for"):
        serve([replica(), replica()], [Request(0, 8, 4)], Moves(1, FREE), BOTH, router)


def test_a_client_leaves_before_a_decoder_has_room() -> None:
    """Pushed: A holds the decoder's blocks until 24 s. B's client leaves at 5.5 s, so that C, which fits beside A, is not kept waiting."""
    sizes = [(40, 24, None), (40, 2, 5.0), (4, 2, None)]
    requests = [Request(id_, n, new, arrival_time=id_ / 2, timeout=left) for id_, (n, new, left) in enumerate(sizes)]
    cluster = serve([replica(), replica(num_blocks=72)], requests, Moves(1, FREE, push=True))
    assert [request.finish_reason for request in requests[1:]] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    assert [request.finished_at for request in requests[:2]] == [24.0, 5.5]
    assert requests[2].finished_at is not None and requests[2].finished_at < 10
    assert unfinished(cluster) == [0, 0]


def test_a_prompt_with_a_copied_prefix_is_decoded_by_a_decoder() -> None:
    """At 20.5 s a prompt waits at the first prefiller, which has the prefix: the second one gets a copy, and hands the request on."""
    same: Any = {"prefix_hashes": (1,), "hash_block": 8}
    requests = [Request(0, 8, 2, **same), *(Request(id_, 8, 2, arrival_time=at) for id_, at in ((1, 20.0), (2, 20.2)))]
    requests.append(Request(3, 16, 2, arrival_time=20.5, **same))
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    cluster = serve([replica() for _ in roles], requests, Moves(1, FREE), roles, ShortestTTFT(copy_above=1.0))
    sent = [(transfer.sender, transfer.receiver) for transfer in cluster.record.transfers if transfer.request == 3]
    assert sent == [(0, 1), (1, 2)] and set(cluster.replica_of.values()) == {2}
