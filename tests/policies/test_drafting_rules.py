"""Drafting rules: worked examples, and the decisions of vLLM's and SGLang's code made by hand."""

import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from acceptance import acceptance_length, conditional_rates, speed_up, survivals_of

from cbatch import KVSize, Plan, PlanBuilder, Policy, PolicyError, Request, RunRecord, Server, View
from cbatch.policy import name_of
from cbatch.sim import SimExecutor
from cbatch.sim.drafter import SurvivalsDrafter
from experiments.check.scenario import EVEN_COST, Arrival, Scenario
from policies.drafting import DraftingRule, WithDrafts
from policies.drafting.adaptive import assign, best_budget, staircase
from policies.drafting.ema import Ema, Slot
from policies.drafting.goodput import best_number
from policies.drafting.throughput_aware import ThroughputAware
from policies.joint import Pair, best_pair
from policies.orca import Orca

KIMI = [0.83, 0.60, 0.45, 0.36, 0.22, 0.16, 0.09, 0.06]
GLM = [71.23, 51.70, 39.04, 30.51, 24.37, 20.00, 16.85, 14.41, 12.46, 10.94, 9.64, 8.56, 7.58, 6.67, 5.82, 4.98]
CONFIDENCES = [(0.9, 0.8, 0.5), (0.6, 0.5, 0.5), (0.95, 0.9, 0.9)]


@pytest.mark.parametrize(
    ("alpha", "k", "length", "speed_ups"),
    [(0.8, 4, 3.3616, {0.05: 2.8013, 0.1: 2.4011}), (0.7, 3, 2.533, {0.05: 2.2026})],
)
def test_speed_up_of_independent_drafts(alpha: float, k: int, length: float, speed_ups: dict[float, float]) -> None:
    found = acceptance_length(survivals_of(alpha, k))
    assert found == pytest.approx(length) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert [speed_up(found, k, share) for share in speed_ups] == pytest.approx([*speed_ups.values()], abs=5e-5)


def test_acceptance_of_published_survivals() -> None:
    assert acceptance_length(KIMI) == pytest.approx(3.77)
    rates = [0.83, 0.7229, 0.75, 0.8, 0.6111, 0.7273, 0.5625, 0.6667]
    assert conditional_rates(KIMI) == pytest.approx(rates, abs=5e-5)
    shares = [percent / 100 for percent in GLM]
    assert acceptance_length(shares) == pytest.approx(4.3476)
    assert acceptance_length(shares[:4]) == pytest.approx(2.9248)


def verify(size: int) -> float:
    """Milliseconds of an iteration: 10 up to 4 tokens, 10.5 up to 8, 14 above."""
    return 10.0 if size <= 4 else 10.5 if size <= 8 else 14.0


def test_adaptive_verifies_five_drafts_of_nine() -> None:
    """The sixth draft would pass the graph of 8 tokens, which costs 3.5 ms for 0.36 of a token."""
    survivals = np.cumprod(CONFIDENCES, axis=1)
    seconds = staircase(verify, (4, 8, 16), 3, 9)
    rates = (3 + np.concatenate(([0.0], np.cumsum(sorted(survivals.flatten(), reverse=True))))) / (1 + seconds)
    by_hand = [0.2727, 0.3591, 0.4217, 0.4961, 0.5630, 0.6256, 0.5196, 0.5436, 0.5636, 0.5736]
    assert rates.tolist() == pytest.approx(by_hand, abs=5e-5)
    assert best_budget(survivals, 1.0, seconds) == 5
    assert assign(survivals, 5) == [2, 0, 3]


def test_staircase_pads_to_graphs_and_is_monotone() -> None:
    """A graph of 8 tokens that was measured to be faster than one of 4 counts as equally slow; above the last one nothing is padded."""
    times = {4: 10.0, 8: 9.0, 16: 12.0}
    stairs = staircase(lambda size: times.get(size, size), (4, 8, 16), 3, 15)
    assert stairs.tolist() == [10, 10, 10, 10, 10, 10, 12, 12, 12, 12, 12, 12, 12, 12, 17, 18]
    assert staircase(lambda size: size, (4,), 300, 200).tolist() == list(range(300, 501))
    assert staircase(lambda size: size, (4, 8), 3, 0).tolist() == [4]


def test_equally_likely_drafts_are_verified_from_the_first_on() -> None:
    ones = np.ones((3, 2))
    assert [assign(ones, budget) for budget in range(7)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [2, 2, 1],
        [2, 2, 2],
    ]


@pytest.mark.parametrize(
    ("accepted", "mean_after_15", "k"), [(3.0, 2.9648, 7), (0.1, 0.16685, 1), (0.5, 0.5528, 3), (2.0, 2.0, 3)]
)
def test_ema_steps_after_warm_up_and_every_five(accepted: float, mean_after_15: float, k: int) -> None:
    slot = Slot((1, 3, 7), start=3)
    for batch in range(1, 16):
        assert slot.k == 3, batch
        slot.observe(accepted)
    assert (slot.mean, slot.k) == (pytest.approx(mean_after_15, abs=5e-5), k)
    for _ in range(5):
        slot.observe(accepted)
    assert slot.k == k  # 2.988 > 2.25 keeps 7, 0.1 keeps 1, 0.5 keeps 3


def test_ema_tries_again_after_no_drafts() -> None:
    """With candidates 0 and 1, a mean of at most 0.25 ends drafting; the next check tries 1 with the mean of before."""
    slot = Slot((0, 1), start=1)
    for _ in range(15):
        slot.observe(0.0)
    assert (slot.k, slot.mean) == (0, 0.0)
    for _ in range(5):
        slot.observe(0.0)
    assert (slot.k, slot.mean) == (1, 0.0)
    fresh = Slot((0, 3), start=0)
    for _ in range(15):
        fresh.observe(0.0)
    assert (fresh.k, fresh.mean) == (3, 2.0)  # without a history: neutral


def test_ema_has_a_mean_for_each_range_of_batches() -> None:
    rule = Ema()
    first = {batch: rule._slot(batch).k for batch in (1, 7, 8, 31, 32, 63, 64, 500)}
    assert first == {1: 3, 7: 3, 8: 3, 31: 3, 32: 1, 63: 1, 64: 0, 500: 0}
    for _ in range(15):
        rule.observe([3] * 4, [3] * 4)
    assert {batch: rule._slot(batch).k for batch in (4, 16)} == {4: 5, 16: 3}
    assert Ema((1, 3, 7))._slot(256).k == 3


def test_rules_learn_nothing_from_decodes_without_drafts() -> None:
    """Nine decodes, of which two had room for drafts, and accepted three and two of three."""
    rule, aware = Ema(), ThroughputAware()
    drafts, accepted = [3, 3, *[0] * 7], [3, 2, *[0] * 7]
    rule.observe(drafts, accepted)
    aware.observe(drafts, accepted)
    rule.observe([0] * 9, [0] * 9)
    aware.observe([0] * 9, [0] * 9)
    assert [rule._slot(batch).mean for batch in (1, 9)] == [2.0, 0.8 * 2.0 + 0.2 * 2.5]
    assert ([list(seen) for seen in aware.rates[:3]], aware._num_batches) == ([[1.0], [1.0], [0.5]], 1)


def observe(rule: ThroughputAware, drafts: int, batches: Sequence[Sequence[int]]) -> None:
    for accepted in batches:
        rule.observe([drafts] * len(accepted), accepted)


def test_throughput_aware_extrapolates_and_forgets() -> None:
    """Two requests accept 3 and 1 of 3 drafts: rates 1, .5, .5, whose mean fall of .7071 gives .3536, .25, .1768, .125."""
    rule = ThroughputAware()
    observe(rule, 3, [[3, 1]] * 20)
    assert rule.expected_rates() == pytest.approx([1, 0.5, 0.5, 0.35355, 0.25, 0.17678, 0.125], abs=5e-6)
    rule.choose({1: 10.0, 3: 12.0, 5: 14.0, 7: 19.0})  # 0.2, 0.25, 0.2574, 0.2056 tokens per second
    assert rule.k == 5
    rule.choose({1: 10.0, 3: 18.0, 5: 24.0, 7: 29.0})  # 0.2, 0.1667, ...
    assert rule.k == 1 and [len(seen) for seen in rule.rates] == [20, 0, 0, 0, 0, 0, 0]
    assert rule.expected_rates() == [1.0] * 7  # one rate alone is repeated


def test_throughput_aware_waits_for_full_windows() -> None:
    rule = ThroughputAware(window=20, every=10)
    due = []
    for batch in range(1, 41):
        rule.observe([3, 3], [1, 2])
        if rule._is_due():
            due.append(batch)
    assert due == [20, 30, 40]


def test_goodput_takes_the_least_of_the_best_numbers() -> None:
    """Two decodes: 2, 3.4, 4.4 and 5 tokens in 10, 12, 20 and 25 s give rates of .2, .2833, .22 and .2."""
    survivals = np.array([[0.9, 0.6, 0.4], [0.5, 0.4, 0.2]])
    assert best_number(survivals, [10, 12, 20, 25]) == 1
    assert best_number(survivals, [10, 17, 22, 25]) == 0  # four times .2
    assert best_number(survivals, [10, 12, 14, 16]) == 2  # .3143 against .3125


@pytest.mark.parametrize(
    ("tbt", "prompt_value", "pair"),
    [
        (25, 1, (128, 0)),  # 6.5 tokens per ms: a prompt token is certain, a draft is not
        (12.5, 1, (128, 2)),  # 21 ms for 1.75 tokens per decode: 12 ms, where no drafts need 20
        (11.5, 1, (128, 4)),  # 10.9 ms
        (8, 1, (0, 2)),  # .318 tokens per ms, four drafts .314
        (5, 1, (0, 2)),  # none keeps the target: 6.29 ms is the least
        (25, 0, (0, 2)),
    ],
)
def test_joint_trades_prompt_tokens_for_drafts(tbt: float, prompt_value: float, pair: Pair) -> None:
    """Two decodes, whose drafts add .9, .6, .5 and .4 tokens in this order, beside 0 or 128 prompt tokens."""
    survivals = np.array([[0.9, 0.6], [0.5, 0.4]])
    milliseconds = {(0, 0): 10.0, (0, 2): 11.0, (0, 4): 14.0, (128, 0): 20.0, (128, 2): 21.0, (128, 4): 24.0}
    assert best_pair(survivals, milliseconds, tbt=tbt, prompt_value=prompt_value) == pair
    assert best_pair(np.ones((0, 2)), {(0, 0): 0.0, (64, 0): 8.0}, tbt=tbt, prompt_value=1) == (64, 0)


def test_mean_acceptance_equals_the_closed_form() -> None:
    """Draft by draft with conditional rates, 40,000 verifications accept as many as the survivals sum to."""
    uniforms = np.random.default_rng(0).random((40_000, len(KIMI)))
    accepted = (uniforms < conditional_rates(KIMI)).cumprod(axis=1).sum(axis=1)
    error = accepted.std() / len(accepted) ** 0.5
    assert abs(fmean(accepted) + 1 - acceptance_length(KIMI)) < 3 * error


class Raising(DraftingRule):
    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> int:
        if self.error:
            raise self.error
        return 1


class Listening(DraftingRule):
    """Drafts one token for the first of two decodes."""

    def __init__(self) -> None:
        self.observed: list[tuple[list[int], list[int]]] = []

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> list[int]:
        return [1, 0][: len(decodes)]

    def observe(self, drafts: Sequence[int], accepted: Sequence[int]) -> None:
        self.observed.append(([*drafts], [*accepted]))


class Broken(Orca):
    def plan(self, view: View) -> Plan:
        raise ValueError("no plan")


@pytest.mark.parametrize(
    ("policy", "rule", "kind", "text"),
    [
        (
            Orca(),
            Raising(ValueError("no")),
            PolicyError,
            r"drafting rule Raising: num_drafts\(\) raised ValueError: no \(test_dr",
        ),
        (Orca(), Raising(KeyboardInterrupt()), KeyboardInterrupt, r"drafting rule Raising, num_drafts\(\) \(test_dr"),
        (Broken(), Raising(), PolicyError, r"policy Broken with Raising, iteration 0: plan\(\) raised .* \(test_dr"),
    ],
)
def test_an_error_names_the_policy_or_its_rule(policy: Policy, rule: Raising, kind: type, text: str) -> None:
    """Not the object around both, nor a line of its file."""
    scenario = Scenario((Arrival(4, 4, 0),), 1, 20, 9, 2, asynchronous=False)
    limits, drafter = scenario.limits, SurvivalsDrafter([0.7])
    server = Server(SimExecutor(EVEN_COST, drafter=drafter), limits, EVEN_COST, KVSize(9, 2), False)
    with pytest.raises(kind, match=text):
        server.engine(WithDrafts(policy, rule), scenario.source()).run()


class Returning(Raising):
    def __init__(self, numbers: Callable[[int], Any]) -> None:
        self.numbers = numbers  # from the number of decodes

    def num_drafts(self, view: View, plan: PlanBuilder, decodes: Sequence[Request]) -> Any:
        return self.numbers(len(decodes))


@pytest.mark.parametrize("numbers", [-2, [1, -1], [1], [1, 1, 1], [], 2.5, [1.0, 1.0], True, None, [[1], [1, 1]]])
def test_numbers_of_drafts_that_cannot_be_are_the_rules_fault(numbers: Any) -> None:
    """For two decodes."""
    text = rf"^drafting rule Returning: num_drafts\(\) returned {re.escape(repr(numbers))}.*; return .* a list of 2, one per decode"
    with pytest.raises(PolicyError, match=text):
        two_requests_with(Returning(lambda _: numbers))


@pytest.mark.parametrize("numbers", [lambda n: np.int64(1), lambda n: (1,) * n, lambda n: np.ones(n, int)])
def test_numbers_of_drafts_may_be_one_for_all_or_one_each(numbers: Callable[[int], Any]) -> None:
    assert max(step.num_drafts for step in two_requests_with(Returning(numbers)).steps) == 2


def two_requests_with(rule: DraftingRule) -> RunRecord:
    scenario = Scenario((Arrival(4, 9, 0), Arrival(4, 9, 0)), 2, 20, 40, 2, asynchronous=False)
    drafter = SurvivalsDrafter([0.7])
    server = Server(SimExecutor(EVEN_COST, drafter=drafter), scenario.limits, EVEN_COST, KVSize(20, 2), False)
    return server.engine(WithDrafts(Orca(), rule), scenario.source()).run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rule_observes_decodes_alone(asynchronous: bool) -> None:
    """The first iteration has a prompt alone; in the fourth, the second prompt is beside the first decode. All drafts are accepted."""
    rule = Listening()
    scenario = Scenario((Arrival(4, 11, 0), Arrival(4, 3, 3)), 2, 20, 40, 2, asynchronous=asynchronous)
    drafter = SurvivalsDrafter([1.0])
    server = Server(SimExecutor(EVEN_COST, drafter=drafter), scenario.limits, EVEN_COST, KVSize(20, 2), asynchronous)
    record = server.engine(WithDrafts(Orca(), rule), scenario.source()).run()
    assert record.steps[0].num_decode_tokens == 0 < record.steps[3].num_prefill_tokens
    assert rule.observed[:3] == [([1], [1])] * 3 and ([1, 0], [1, 0]) in rule.observed
    assert len(rule.observed) == len(record.steps) - 1


def test_a_policy_is_named_without_its_own_getattr() -> None:
    class Failing:
        def __getattr__(self, name: str) -> str:
            raise ValueError(name)

    assert name_of(Failing()) == "Failing"
    assert name_of(WithDrafts(Orca(), Raising())) == "Orca with Raising"
