"""Published policies: their settings, what they tell predictors, and parts whose schedules `schedules.yaml` cannot show."""

import re
from collections.abc import Callable
from inspect import signature
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from landscape import LANDSCAPE
from unit_machine import golden, running, view_of

from cbatch import ConfigError, Request
from experiments.settings.compose import compose_run
from policies.chunking import Fixed
from policies.lars import LARS
from policies.length_order import LengthOrder
from policies.ltr import LTR
from policies.mc_sf import McSf
from policies.mlfq import MLFQ
from policies.past_future import PastFuture
from policies.predictors import Bins, History, Noisy, Oracle, Predictor, Ranks
from policies.priority import Priority
from policies.qoserve import QoServe
from policies.shared.future_memory import draw_left
from policies.slai import Slai
from policies.trail import Trail
from policies.vllm_v1 import VllmV1
from policies.vtc import VTC

DEFAULTS: dict[Any, str] = {
    LARS: "target=0.1 ttft=10.0",
    LengthOrder: "order='sjf'",
    LTR: "starvation=200 period=10",
    McSf: "order='shortest'",
    MLFQ: "quantum=0.01 skip_join=True promote_after=3.0",
    PastFuture: "admission='past_future' window=1000 reserve=0.03 draws=3 seed=0 history=()",
    Priority: "long_prefill=0 boost=0",
    QoServe: "order='hybrid' alpha=0.008 relegate=True",
    Slai: "budget=512 order='spf' offset=None tbt=0.2 by_priority=False",
    Trail: "c=0.8 margin=0.0",
    VllmV1: "long_prefill=0 victim='last'",
    VTC: "lift=True predict=False weights=None prompt_weight=1.0 output_weight=2.0 charge_first=True order='vtc' quantum=500.0 rpm=None",
    Noisy: "mae=None share=None seed=0",
    Bins: "bins=10 longest=512 refresh=8 error=0.0 seed=0",
    Ranks: "sigma=0.5 seed=0",
    History: "window=200",
}


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_the_papers_and_their_code(kind: Any) -> None:
    parameters = signature(kind).parameters.values()
    made = [f"{each.name}={each.default!r}" for each in parameters if each.default is not each.empty]
    assert " ".join(made) == DEFAULTS[kind]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: VllmV1("auto"), "policy.budget=auto: give a number of tokens"),  # type: ignore[arg-type]
        (lambda: VllmV1(0), "policy: need budget"),
        (lambda: VllmV1(1, long_prefill=-1), "policy: need budget"),
        (lambda: VllmV1(8, victim="first"), "victim='first'"),
        (lambda: VTC(Predictor(), weights={"a": 0}), "weights must be above 0"),
        (lambda: VTC(Predictor(), order="lcf"), "order='lcf' must be vtc, mdrr or fcfs"),
        (lambda: VTC(Predictor(), quantum=0), "quantum=0 above 0"),
        (lambda: VTC(Predictor(), rpm=0), "policy.rpm=0: give at least 1"),
        (lambda: LengthOrder(Fixed(8), Predictor(), "shortest"), "policy.order=shortest: choose one of sjf"),
        (lambda: QoServe(Fixed(8), Predictor(), "lifo"), "order='lifo'"),
        (lambda: PastFuture("careful"), "admission='careful' in past_future, aggressive, conservative, optimum"),
        (lambda: PastFuture(window=0), "policy: need admission="),
        (lambda: PastFuture(draws=0), "policy: need admission="),
        (lambda: PastFuture(reserve=1.0), "policy: need admission="),
        (lambda: PastFuture(reserve=-0.1), "policy: need admission="),
        (lambda: McSf(Predictor(), "longest"), "policy.order=longest"),
        (lambda: MLFQ(quantum=0), "quantum=0"),
        (lambda: MLFQ(promote_after=0), "promote_after=0"),
        (lambda: LTR(Predictor(), starvation=0), "starvation=0"),
        (lambda: LARS(target=-1), "target=-1"),
        (lambda: LARS(ttft=0), "ttft=0"),
        (lambda: Slai("auto"), "policy.budget=auto: give a number of tokens"),  # type: ignore[arg-type]
        (lambda: Slai(tbt=0), "tbt=0"),
        (lambda: Noisy(), "give predictor.mae"),
        (lambda: Noisy(mae=1, share=0.5), "predictor="),
        (lambda: Noisy(mae=-1), "predictor="),
        (lambda: Noisy(share=1.01), "predictor="),
        (lambda: Noisy(share=-0.01), "predictor="),
        (lambda: Bins(refresh=0), "refresh >= 1"),
        (lambda: Bins(bins=0), "predictor="),
        (lambda: Bins(bins=8, longest=7), "predictor="),
        (lambda: Bins(error=1.01), "predictor="),
        (lambda: Bins(error=-0.01), "predictor="),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


def test_the_least_settings_are_taken() -> None:
    VllmV1(1, long_prefill=1)
    PastFuture(window=1, draws=1, reserve=0)
    LTR(Oracle(), starvation=1, period=1)
    MLFQ(quantum=1e-9, promote_after=1e-9)
    Noisy(share=1)
    Bins(bins=1)
    Bins(bins=8, longest=8, refresh=1, error=1)
    policy = compose_run("policy=past_future", "policy.reserve=0", "+policy.history=[3,5]").policy()
    assert isinstance(policy, PastFuture) and policy._ended.ascending == [3, 5]


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


def test_the_cost_of_a_victim() -> None:
    """3 blocks for 11 tokens to recompute, of a request that has 6 of 8 output tokens to go."""
    view = view_of(kv=SimpleNamespace(num_held=lambda request: 3))
    policy = VllmV1(8, victim="cost")
    assert policy._reclaimed(running(0, 10, 8, 2), view) == pytest.approx(3 / 11 * 6 / 8)
    assert policy._reclaimed(running(0, 2, 8), view) == 3, "one token to recompute"


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


def test_past_future_draws_what_is_left_from_longer_outputs() -> None:
    """10 tokens generated, ended requests of 4, 12 and 20, limit 30: what is left is between 0 and 20, half of it below 10."""
    drawn = draw_left(Random(1), [10] * 4000, [30] * 4000, [4, 12, 20])
    assert min(drawn) >= 0 and max(drawn) <= 20
    # the support is 10, 12, 20, 30, each third equally likely: left 0 to 2, 2 to 10, 10 to 20
    shares = [np.mean([low <= left < high for left in drawn]) for low, high in ((0, 2), (2, 10), (10, 20))]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.03)


def test_past_future_remembers_a_window_of_ends() -> None:
    policy = PastFuture(window=2)
    for tokens in (7, 9, 3):
        ended = Request(0, 1, 99)
        ended.num_output_tokens = tokens
        policy.on_finish(ended)
    assert policy._ended.ascending == [3, 9]


@pytest.mark.parametrize(
    ("requests", "limit", "asked"),
    [
        # after four iterations ten blocks are full and each has generated four tokens; in the fifth A preempts B
        ("A 2/6 @0, B 2/6 @0", {"memory": 10}, [[0], [0, 0], [5, 4]]),
        # where no request finds a place nothing is drawn: draws would change what is drawn later
        ("A 1/4 @0, B 1/1 @0", {"batch": 1}, [[0], [0, 0], [0]]),
    ],
)
def test_a_request_counts_with_what_it_has_generated(
    requests: str, limit: dict[str, Any], asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[list[int]] = []
    monkeypatch.setattr(PastFuture, "_fits", lambda self, _, generated, *rest: fits.append([*generated]) or True)
    golden(PastFuture(), requests, **limit)
    assert fits[:3] == asked
