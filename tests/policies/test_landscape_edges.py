"""Published policies where memory, batch or a setting is at its limit: golden schedules computed by hand, as in `test_landscape`."""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from landscape import LANDSCAPE
from unit_machine import golden, running, view_of

from cbatch import Policy, Request
from policies.chunking import Fixed
from policies.lars import LARS
from policies.length_order import LengthOrder
from policies.ltr import LTR
from policies.mc_sf import McSf
from policies.mlfq import MLFQ
from policies.past_future import PastFuture
from policies.predictors import Oracle, Predictor
from policies.priority import Priority
from policies.qoserve import QoServe
from policies.slai import Slai
from policies.trail import Trail
from policies.vllm_v1 import VllmV1
from policies.vtc import VTC

EVER = float("inf")
PAUSES: dict[str, Any] = {"batch": 2, "limits": {"max_running": 8}}


# -- all ----------------------------------------------------------------------------------------------------------------

DEFAULTS: dict[Any, dict[str, Any]] = {
    LARS: {"target": 0.1, "ttft": 10.0},
    LengthOrder: {"order": "sjf"},
    LTR: {"starvation": 200, "period": 10},
    McSf: {"order": "shortest"},
    MLFQ: {"quantum": 0.01, "skip_join": True, "promote_after": 3.0},
    PastFuture: {"admission": "past_future", "window": 1000, "reserve": 0.03, "draws": 3, "seed": 0, "history": ()},
    Priority: {"long_prefill": 0, "boost": 0},
    QoServe: {"order": "hybrid", "alpha": 0.008, "relegate": True},
    Slai: {"budget": 512, "order": "spf", "offset": None, "tbt": 0.2, "by_priority": False},
    Trail: {"c": 0.8, "margin": 0.0},
    VllmV1: {"long_prefill": 0, "victim": "last"},
    VTC: {
        "order": "vtc",
        "quantum": 500.0,
        "rpm": None,
        "lift": True,
        "predict": False,
        "weights": None,
        "prompt_weight": 1.0,
        "output_weight": 2.0,
        "charge_first": True,
    },
}


@pytest.mark.parametrize("policy", DEFAULTS)
def test_defaults_are_those_of_the_papers_and_their_code(policy: Any) -> None:
    parameters = signature(policy).parameters.values()
    assert {each.name: each.default for each in parameters if each.default is not each.empty} == DEFAULTS[policy]


class Listening(Oracle):
    def __init__(self) -> None:
        self.observed: list[int] = []

    def observe(self, request: Request) -> None:
        self.observed.append(request.id)


@pytest.mark.parametrize("name", LANDSCAPE)
def test_a_policy_tells_its_predictor_of_every_end_and_forgets_the_request(name: str) -> None:
    """Its chunk selector too. Under a cache that holds two or three of the six requests at a time."""
    policy: Any = LANDSCAPE[name](8)
    ended: list[int] = []
    if chunks := hasattr(policy, "chunking"):
        policy.chunking.observe = lambda request: ended.append(request.id)
    if predicts := hasattr(policy, "predictor"):
        policy.predictor = Listening()
    found = golden(policy, "A 4/5 @0, B 6/2 @0, C 3/4 @1, D 5/3 @2, E 1/6 @2, F 2/1 @9", batch=4, memory=16)
    assert all(found.ends.values())
    if predicts:
        assert sorted(policy.predictor.observed) == [0, 1, 2, 3, 4, 5]
    assert sorted(ended) == ([0, 1, 2, 3, 4, 5] if chunks else [])
    kept = [value for value in vars(policy).values() if isinstance(value, dict | set)]
    kept += [level for value in kept if isinstance(value, dict) for level in value.values() if isinstance(level, dict)]
    assert not [entry for each in kept for entry in each if isinstance(entry, Request)]


@pytest.mark.parametrize(
    "policy", [VllmV1(4), LTR(Oracle()), McSf(Oracle()), MLFQ(quantum=10), PastFuture("optimum"), VTC(Oracle())]
)
def test_whole_prompts_are_not_cut_where_an_iteration_has_no_room(policy: Policy) -> None:
    """Of 4 tokens, one is left beside A's prompt. vLLM's scheduler cuts B's prompt, the others wait."""
    found = golden(policy, "A 3/1 @0, B 3/2 @0", tokens=4)
    assert found.schedule == ("A3 B1 | B2 | B1" if isinstance(policy, VllmV1) else "A3 | B3 | B1")


# -- vllm_v1 and priority -------------------------------------------------------------------------------------------------


def test_one_request_takes_at_most_long_prefill_tokens_of_an_iteration() -> None:
    found = golden(VllmV1(10, long_prefill=3), "A 8/2 @0, B 2/1 @0", tokens=10)
    assert found.schedule == "A3 B2 | A3 | A2 | A1"


@pytest.mark.parametrize(("victim", "third"), [("last", "A1 pre B"), ("cost", "B1 pre A")])
def test_the_victim_of_least_cost_is_the_furthest_from_its_end(victim: str, third: str) -> None:
    """After three tokens each of A's 8 and B's 4 the cache of 11 tokens is full: A has 5/8 to go, B 1/4."""
    found = golden(VllmV1(8, victim=victim), "A 3/8 @0, B 3/4 @0", batch=8, tokens=8, memory=11)
    assert found.schedule.split(" | ")[:4] == ["A3 B3", "A1 B1", "A1 B1", third]


def test_the_cost_of_a_victim() -> None:
    """3 blocks for 11 tokens to recompute, of a request that has 6 of 8 output tokens to go."""
    view = view_of(kv=SimpleNamespace(num_held=lambda request: 3))
    policy = VllmV1(8, victim="cost")
    assert policy._reclaimed(running(0, 10, 8, 2), view) == pytest.approx(3 / 11 * 6 / 8)
    assert policy._reclaimed(running(0, 2, 8), view) == 3, "one token to recompute"


def test_two_prompts_do_not_preempt_each_other_for_ever() -> None:
    """By cost alone the victim is always the one that has just begun a block; as neither has generated, it is the newest."""
    found = golden(
        VllmV1(8, long_prefill=5, victim="cost"), "A 14/2 @0, B 14/4 @0", tokens=8, memory=6, block=3, asynchronous=True
    )
    assert found.schedule == "A5 B3 | A5 B3 | A4 pre B | A1 | B5 | B5 | B4 | B1 | B1 | B1"


def test_a_running_prompt_is_not_cut_to_the_blocks_that_are_left() -> None:
    """In iteration 2 B wants 3 tokens of its prompt, and one block is left: it is preempted, the newest as it is."""
    found = golden(VllmV1(4), "A 2/4 @0, B 8/1 @0", tokens=4, memory=10)
    assert found.schedule.split(" | ")[:3] == ["A2 B2", "A1 B3", "A1 pre B"]


def test_limits_of_vllms_settings() -> None:
    assert (VllmV1(1).budget, VllmV1(1, long_prefill=1).long_prefill) == (1, 1)
    for wrong in ({"budget": 0}, {"budget": 1, "long_prefill": -1}):
        with pytest.raises(Exception, match="policy: need budget"):
            VllmV1(**wrong)


def test_of_equals_the_latest_arrival_is_preempted_then_the_last_submitted() -> None:
    found = golden(Priority(8), "A 3/5 @0.5, B 3/5 @0", batch=8, tokens=8, memory=10)
    assert found.schedule.split(" | ")[:4] == ["B3", "B1 A3", "B1 A1", "B1 pre A"]
    found = golden(Priority(8), "A 3/5 @0, B 3/5 @0", batch=8, tokens=8, memory=10)
    assert found.schedule.split(" | ")[:4] == ["A3 B3", "A1 B1", "A1 B1", "A1 pre B"]


@pytest.mark.parametrize(("boost", "sixth"), [(0, "C1 pre A"), (1, "A1 pre C"), (2, "A1 pre C")])
def test_a_preemption_makes_more_urgent_up_to_the_boost(boost: int, sixth: str) -> None:
    """A, the latest, is preempted in iteration 3 and comes back; in iteration 5 the cache of 12 is full again."""
    found = golden(Priority(8, boost=boost), "A 4/6 @2, B 1/4 @0, C 2/6 @0", batch=8, tokens=8, memory=12)
    assert found.schedule.split(" | ")[:6] == ["B1 C2", "B1 C1", "B1 C1 A4", "B1 C1 pre A", "C1 A5", sixth]


# -- length_order, trail ----------------------------------------------------------------------------------------------------


def test_the_response_ratio_counts_the_tokens_processed_since_the_arrival() -> None:
    """At 2 s 1 token since B, C came, 0 since D, E: 1/8, 1/4, 0, 0. At 3 s 5/8 for B, 4/20 and 4/8; at 4 s 12/20 and 12/8."""
    requests = "A 10/2 @0, B 8/1 @1, C 4/1 @1, D 20/1 @2, E 8/1 @2"
    found = golden(LengthOrder(Fixed(100), Predictor(), "hrrn"), requests, batch=1)
    assert found.schedule == "A10 | A1 | C4 | B8 | E8 | D20"


@pytest.mark.parametrize(("number", "first"), [(128, 127), (129, 0)])
def test_with_many_waiting_requests_hrrn_is_first_come_first_served(number: int, first: int) -> None:
    """The last to arrive has the shortest prompt; prompts under way come first."""
    policy = LengthOrder(Fixed(100), Predictor(), "hrrn")
    waiting = [Request(id_, number - id_, 1) for id_ in range(number)]
    for request in waiting:
        policy.on_arrival(request)
    policy._processed = 100
    under_way = Request(999, 5, 1)
    found = list(policy.prompts(view_of(prefilling=[under_way], waiting=waiting)))
    assert found[0] is under_way and found[1].id == first and len(found) == number + 1


def test_a_preempted_request_waits_again_in_its_place() -> None:
    """6 of 7 tokens are held after two iterations; then the newest, B, leaves, and comes back when A has ended."""
    found = golden(LengthOrder(Fixed(100), Predictor()), "A 2/4 @0, B 2/5 @0", memory=7)
    assert found.schedule == "A2 B2 | A1 B1 | A1 pre B | A1 | B4 | B1 | B1"


@pytest.mark.parametrize(("margin", "second"), [(0.0, "B1 pre A"), (0.9, "B1 pre A"), (1.0, "A1")])
def test_a_victims_rest_must_exceed_the_newcomers_by_more_than_the_margin(margin: float, second: str) -> None:
    """A has 5 tokens to go when B, of 4, arrives."""
    found = golden(Trail(Fixed(100), Oracle(), 1.0, margin), "A 1/6 @0, B 1/4 @1", batch=1)
    assert found.schedule.split(" | ")[1] == second


@pytest.mark.parametrize("c", [0.0, 1.0])
def test_trail_takes_the_place_of_a_prompt_under_way(c: float) -> None:
    """It has no token yet, which is no more than any share."""
    found = golden(Trail(Fixed(4), Oracle(), c), "A 9/3 @0, B 1/2 @1", batch=1)
    assert found.schedule == "A4 | B1 pre A | B1 | A4 | A4 | A1 | A1 | A1"


def test_trail_keeps_those_that_found_a_place_and_no_tokens_waiting() -> None:
    found = golden(Trail(Fixed(3), Oracle(), 1.0), "A 5/1 @0, B 4/1 @0, C 2/2 @0", batch=3)
    assert found.schedule == "A3 | A2 B1 | B3 | C2 | C1"


def test_of_equal_victims_trail_takes_the_newest() -> None:
    found = golden(Trail(Fixed(100), Oracle(), 1.0), "A 1/6 @0, B 1/6 @0, C 1/2 @1", batch=2)
    assert found.schedule.split(" | ")[:4] == ["A1 B1", "A1 C1 pre B", "A1 C1", "A1 B2"]


# -- vtc --------------------------------------------------------------------------------------------------------------------

FOUR = "f1 2/4 @0, g1 3/2 @0, f2 2/2 @0, g2 2/2 @0"
FOUR_CLIENTS = {"client": {"f1": "f", "f2": "f", "g1": "g", "g2": "g"}}


@pytest.mark.parametrize(
    ("options", "order", "counters"),
    [
        ({}, "f1 g1 g2 f2", {"f": 16, "g": 13}),  # f1: 2 + 2 * 4 = 10, g1: 3 + 2 * 2 = 7, g2 and f2: 2 + 2 * 2 = 6
        ({"charge_first": False}, "f1 g1 g2 f2", {"f": 8 + 4, "g": 5 + 4}),  # a token less of each request
        ({"weights": {"f": 2.0}}, "f1 g1 f2 g2", {"f": 8, "g": 13}),
        ({"prompt_weight": 3.0, "output_weight": 1.0}, "f1 g1 f2 g2", {"f": 10 + 8, "g": 11 + 8}),
    ],
)
def test_services_of_clients_as_they_are_weighted(options: Any, order: str, counters: dict[str, float]) -> None:
    found = golden(VTC(Predictor(), **options), FOUR, batch=1, **FOUR_CLIENTS)
    assert " ".join(dict.fromkeys(entry[:2] for entry in found.schedule.split(" | "))) == order
    assert found.policy.counters == pytest.approx(counters)


@pytest.mark.parametrize(("predict", "third"), [(False, "f22"), (True, "g22")])
def test_predicted_outputs_are_charged_at_admission(predict: bool, third: str) -> None:
    """With f1 and g1 admitted the counters are 2 and 3, or with the predictions 10 and 7."""
    found = golden(VTC(Predictor(), predict=predict), FOUR, batch=3, **FOUR_CLIENTS)
    assert found.schedule.split(" | ")[0] == f"f12 g13 {third}"


def test_what_was_charged_too_much_is_refunded() -> None:
    """f1 ends after 2 of the 4 tokens that were charged for; g1 came in between, as f stood at 10."""
    found = golden(VTC(Predictor(), predict=True), FOUR, batch=1, true_new_tokens={"f1": 2}, **FOUR_CLIENTS)
    assert found.policy.counters == {"f": 2 + 4 + 6, "g": 7 + 6}


def test_a_new_client_is_lifted_to_the_least_of_those_that_wait() -> None:
    """At 6 s f waits with 2 + 2 * 4 = 10 and g with (2 + 2) + (2 + 2) = 8 on their counters: h begins at 8, and is next at 7 s."""
    requests = "f1 2/4 @0, g1 2/1 @0, f2 2/1 @0, g2 2/2 @0, g3 2/1 @0, h1 2/1 @5.5"
    client = {name: name[0] for name in ("f1", "f2", "g1", "g2", "g3", "h1")}
    found = golden(VTC(Predictor()), requests, batch=1, client=client)
    assert found.schedule.startswith("f12 | f11 | f11 | f11 | g12 | g22 | g21 | h12 | ")
    assert found.policy.counters["h"] == 8 + 2 + 2


def test_of_equal_counters_the_client_that_came_first_is_next() -> None:
    found = golden(VTC(Predictor()), "z1 2/1 @0, a1 2/1 @0", batch=1, client={"z1": "z", "a1": "a"})
    assert found.schedule == "z12 | a12"


def test_a_client_that_is_idle_and_owes_nothing_receives_no_quantum() -> None:
    """f's quantum of 4 pays for f1, 2 + 2 * 1, exactly, and g's for g1; f receives another when f2 is there."""
    policy = VTC(Predictor(), order="mdrr", quantum=4)
    found = golden(policy, "f1 2/1 @0, g1 2/1 @0, f2 2/1 @5", batch=1, client={"f1": "f", "g1": "g", "f2": "f"})
    assert found.policy.counters == {"f": 0, "g": 0}


def test_first_come_first_served_counts_services_too() -> None:
    assert golden(VTC(Predictor(), order="fcfs"), FOUR, batch=1, **FOUR_CLIENTS).policy.counters == {"f": 16, "g": 13}


def test_vtc_reserves_the_limit_of_each_request() -> None:
    """Both prompts would fit into 8 tokens; with their outputs they need 6 each."""
    assert golden(VTC(Predictor()), "A 2/4 @0, B 2/4 @0", memory=8).schedule.startswith("A2 | A1 | A1 | A1 | B2")


# -- mc_sf, past_future -------------------------------------------------------------------------------------------------------


def test_mc_sf_admits_all_that_fit() -> None:
    assert golden(McSf(Oracle()), "A 2/1 @0, B 2/2 @0", memory=100).schedule == "A2 B2 | B1"


def test_mc_sf_preempts_the_newest_where_outputs_are_longer_than_predicted() -> None:
    """Two outputs of one token were predicted, of four are. At 2 s there are 7 tokens of KV cache for 8; C, which would fit, waits.

    At 3 s C, which comes before B, would make it 5 + 1 + 2 * 1 = 8 at their ends; at 4 s both fit: 1 + 4 + 2 * 1 = 7.
    """
    predicted = {"A": 1, "B": 1, "C": 1}
    requests = "A 2/4 @0, B 2/4 @0, C 1/1 @2"
    found = golden(McSf(Predictor()), requests, memory=7, predicted_new_tokens=predicted)
    assert found.schedule == "A2 B2 | A1 B1 | A1 pre B | A1 | C1 B4 | B1"


def test_mc_sf_admits_none_in_an_iteration_with_a_preemption() -> None:
    """Blocks of 8 tokens: of three, A and B hold one each; at 2 s both need another. C fits, by tokens and into B's block."""
    predicted = {"A": 1, "B": 1, "C": 1}
    found = golden(McSf(Predictor()), "A 7/3 @0, B 7/3 @0, C 1/1 @2", memory=3, block=8, predicted_new_tokens=predicted)
    assert found.schedule.startswith("A7 B7 | A1 B1 | A1 pre B | ")


def test_mc_sf_admits_one_alone_whatever_is_predicted() -> None:
    found = golden(McSf(Predictor()), "A 5/3 @0", memory=8, predicted_new_tokens={"A": 9})
    assert found.schedule == "A5 | A1 | A1"


def ended(tokens: int) -> Request:
    request = Request(0, 1, 99)
    request.num_output_tokens = tokens
    return request


def test_past_future_expects_what_the_last_requests_generated() -> None:
    """After A, of 2 tokens, B and C count as 2 each: 4 + 4 + 2 * 2 = 12 of 18 tokens; by their limits of 9 it would be 26."""
    found = golden(PastFuture(reserve=0), "A 4/2 @0, B 4/9 @3, C 4/9 @3", memory=18)
    assert found.schedule.split(" | ")[:3] == ["A4", "A1", "B4 C4"]
    without = golden(PastFuture(reserve=0), "B 4/9 @0, C 4/9 @0", memory=18)
    assert without.schedule.split(" | ")[0] == "B4"
    policy = PastFuture(window=2)
    for tokens in (7, 9, 3):
        policy.on_finish(ended(tokens))
    assert policy._ended.ascending == [3, 9], "of the last two"


def test_the_largest_of_several_draws_counts() -> None:
    """Of lengths 1 and 40, 30 draws hold 40 all but surely; one request alone is admitted whatever is drawn."""
    policy = PastFuture(reserve=0, draws=30)
    for tokens in (1, 40):
        policy.on_finish(ended(tokens))
    found = golden(policy, "A 2/9 @0, B 2/9 @0", memory=30)
    assert found.schedule.split(" | ")[0] == "A2"


def test_limits_are_counted_in_tokens_of_the_cache_not_in_blocks() -> None:
    found = golden(PastFuture("conservative"), "A 4/2 @0, B 4/2 @0", memory=6, block=2)
    assert found.schedule == "A4 B4 | A1 B1", "six tokens each in a cache of twelve"


def test_a_preempted_request_counts_with_what_it_has_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four iterations ten blocks are full and each has generated four tokens; in the fifth A preempts B."""
    asked: list[list[int]] = []
    monkeypatch.setattr(PastFuture, "_fits", lambda self, _, generated, *rest: asked.append([*generated]) or True)
    golden(PastFuture(), "A 2/6 @0, B 2/6 @0", memory=10)
    assert asked[:3] == [[0], [0, 0], [5, 4]]


def test_where_no_request_finds_a_place_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws would change what is drawn later: one each for A, for B beside it in the first iteration, and for B at the end."""
    asked: list[int] = []
    monkeypatch.setattr(PastFuture, "_fits", lambda self, admitted, *_: asked.append(admitted[-1].id) or True)
    assert golden(PastFuture(), "A 1/4 @0, B 1/1 @0", batch=1).schedule == "A1 | A1 | A1 | A1 | B1"
    assert asked == [0, 1, 1]


@pytest.mark.parametrize(("reserve", "first"), [(0.0, "A5 B4 C3"), (0.1, "A5 B4")])
def test_a_share_of_the_cache_stays_free(reserve: float, first: str) -> None:
    """The three peak at 18 tokens, as in `test_landscape`: below 19, not below 19 * 0.9 = 17.1."""
    found = golden(PastFuture("optimum", reserve=reserve), "A 5/4 @0, B 4/3 @0, C 3/2 @0", memory=19)
    assert found.schedule.split(" | ")[0] == first


@pytest.mark.parametrize(("memory", "first"), [(13, "A10"), (14, "A10 B1")])
def test_the_peak_is_that_before_the_first_end(memory: int, first: str) -> None:
    """A and B hold 11 and 2 tokens after one iteration, at A's end; B alone holds 3 at its own."""
    found = golden(PastFuture("optimum", reserve=0), "A 10/1 @0, B 1/2 @0", memory=memory)
    assert found.schedule.split(" | ")[0] == first


@pytest.mark.parametrize(("prompt", "first"), [(59, "A40 B59"), (60, "A40")])
def test_the_aggressive_admission_leaves_one_percent_of_the_blocks(prompt: int, first: str) -> None:
    found = golden(PastFuture("aggressive"), f"A 40/2 @0, B {prompt}/2 @0", memory=100)
    assert found.schedule.split(" | ")[0] == first


def test_the_least_settings_of_past_future_are_taken() -> None:
    PastFuture(window=1, draws=1, reserve=0)
    for wrong in ({"window": 0}, {"draws": 0}, {"reserve": 1.0}, {"reserve": -0.1}):
        with pytest.raises(Exception, match="policy: need admission="):
            PastFuture(**wrong)
