"""Published policies where memory, batch or a setting is at its limit: golden schedules computed by hand, as in `test_landscape`."""

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from landscape import LANDSCAPE
from unit_machine import golden, running, view_of

from cbatch import Request
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


# -- vllm_v1 and priority -------------------------------------------------------------------------------------------------


def test_the_cost_of_a_victim() -> None:
    """3 blocks for 11 tokens to recompute, of a request that has 6 of 8 output tokens to go."""
    view = view_of(kv=SimpleNamespace(num_held=lambda request: 3))
    policy = VllmV1(8, victim="cost")
    assert policy._reclaimed(running(0, 10, 8, 2), view) == pytest.approx(3 / 11 * 6 / 8)
    assert policy._reclaimed(running(0, 2, 8), view) == 3, "one token to recompute"


def test_limits_of_vllms_settings() -> None:
    assert (VllmV1(1).budget, VllmV1(1, long_prefill=1).long_prefill) == (1, 1)
    for wrong in ({"budget": 0}, {"budget": 1, "long_prefill": -1}):
        with pytest.raises(Exception, match="policy: need budget"):
            VllmV1(**wrong)


# -- length_order, trail ----------------------------------------------------------------------------------------------------


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


def test_a_client_that_is_idle_and_owes_nothing_receives_no_quantum() -> None:
    """f's quantum of 4 pays for f1, 2 + 2 * 1, exactly, and g's for g1; f receives another when f2 is there."""
    policy = VTC(Predictor(), order="mdrr", quantum=4)
    found = golden(policy, "f1 2/1 @0, g1 2/1 @0, f2 2/1 @5", batch=1, client={"f1": "f", "g1": "g", "f2": "f"})
    assert found.policy.counters == {"f": 0, "g": 0}


# -- mc_sf, past_future -------------------------------------------------------------------------------------------------------


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


def test_the_least_settings_of_past_future_are_taken() -> None:
    PastFuture(window=1, draws=1, reserve=0)
    for wrong in ({"window": 0}, {"draws": 0}, {"reserve": 1.0}, {"reserve": -0.1}):
        with pytest.raises(Exception, match="policy: need admission="):
            PastFuture(**wrong)
