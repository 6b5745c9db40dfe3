"""Capacity: rules and statistics by hand, the search on curves that are known, and the command."""

import gc
import json
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import outcome
from unit_machine import CostOf

from cbatch import SLO, ConfigError, Limits, Request, Server
from cbatch.kv import KVSize
from cbatch.results.metrics import Served, collect_served
from cbatch.sim.executor import SimExecutor
from experiments.capacity import __main__ as command
from experiments.capacity import command as searching
from experiments.capacity import control
from experiments.capacity.control import Control, draw_queue
from experiments.capacity.definitions import Rule, select
from experiments.capacity.estimate import Shares, by_replication, estimate_alone, least_crossing
from experiments.capacity.report import describe_alone
from experiments.capacity.search import FIRST, LEAST, Capacity, Goal, Search
from experiments.capacity.simulation import Outcome, simulate
from experiments.run import main
from experiments.settings.assemble import assemble
from experiments.settings.compose import compose
from experiments.settings.construct import construct
from experiments.settings.settings import Settings, read_settings
from experiments.trials.rates import bounds_together
from experiments.trials.replications import Replication
from experiments.workloads import ClosedBatch, GammaArrivals, OpenLoop, UniformLengths
from policies.orca import Orca

# -- rules ------------------------------------------------------------------------------------------------------------


def served_requests() -> tuple[list[Request], Served]:
    """Five requests of one prompt token, of which the last is rejected: first tokens after 1, 2, 3, 4 s, and gaps by hand."""
    requests = [Request(id_, 1, 3, slo=SLO(ttft=2.0, tbt=1.5, total=9.0)) for id_ in range(5)]
    gaps = [(1.0, 1.0), (1.0, 2.5), (2.0, 2.0), (1.0, 1.0)]
    times = np.array([[first, first + a, first + a + b] for first, (a, b) in enumerate(gaps, start=1)])
    zeros, ids = np.zeros(4), np.arange(4)
    first, last, lengths = times[:, 0], times[:, -1], (ids + 1, ids * 0 + 3)
    return requests, Served(ids, zeros, ids.astype(float), first, last, *lengths, np.repeat(ids, 3), times.ravel())


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("joint", {"attainment": (1, 5)}),  # request 1 has a gap of 2.5 s, 2 and 3 a TTFT of 3 and 4 s, 4 was rejected
        ("qoserve", {"attainment": (2, 5)}),  # gaps do not count
        ("sarathi_serve", {"scheduling delay": (3, 5), "tbt": (5, 8)}),  # delays of 0, 1, 2, 3 s against 2; 8 gaps
        ("vidur", {"scheduling delay": (4, 5)}),
        ("distserve", {"ttft": (2, 5), "tpot": (2, 5)}),  # mean gaps of 1, 1.75, 2 and 1 s
    ],
)
def test_definitions_count_by_hand(name: str, counts: dict[str, tuple[int, int]]) -> None:
    requests, served = served_requests()
    rule = Rule(name, requests[0].slo, 0.9)
    assert {criterion.name: criterion.good(requests, served) for criterion in rule.criteria} == counts


@pytest.mark.parametrize(("name", "counts"), [("distserve", [(0, 2), (1, 2)]), ("sarathi_serve", [(1, 2), (2, 4)])])
def test_only_the_window_counts(name: str, counts: list[tuple[int, int]]) -> None:
    requests, served = served_requests()
    rule = Rule(name, requests[0].slo, 0.9)
    assert [criterion.good(requests[2:4], select(served, 2, 4)) for criterion in rule.criteria] == counts


# -- statistics -------------------------------------------------------------------------------------------------------


def shares(good: Sequence[Sequence[float]], level: float = 0.98) -> Shares:
    """Of 100 asked, at rates 1, 2, ..."""
    counts = np.array(good, dtype=float)
    return Shares(np.arange(1.0, counts.shape[1] + 1), counts, np.full(counts.shape, 100.0), level)


def test_crossing_is_where_the_violations_reach_the_limit() -> None:
    """Violations of 1% at rate 1 and 4% at 2: on a logarithmic scale 2% lies halfway."""
    assert shares([[99, 96], [99, 96]]).crossing() == pytest.approx(1.5)
    assert shares([[100, 98, 90]]).crossing() == 2.0
    assert shares([[97, 96]]).crossing() == 0.0
    assert shares([[100, 99]]).crossing() == math.inf
    # 100% counts as half a violation of 100 requests: 0.5, 2 and 8%
    assert shares([[100, 92]]).crossing() == pytest.approx(1.5)
    assert shares([[100, 99.6]], level=0.999).crossing() == 2.0, "violations of less than half a request are none"
    # 97% and 99% break the order: together 98% at rates 2 and 3, which is just enough
    assert shares([[100, 97, 99, 90]]).crossing() == 3.0
    # by 300 and 100 requests they are 97.5%; of the first rate 100% is half a violation of 150 requests, the mean of the four rates
    asked = np.array([[100.0, 100, 100, 100], [0, 100, 0, 0], [0, 100, 0, 0]])
    good = np.array([[100.0, 97, 99, 90], [0, 97, 0, 0], [0, 97, 0, 0]])
    assert Shares(np.arange(1.0, 5.0), good, asked, 0.98).crossing() == pytest.approx(1 + math.log(6) / math.log(7.5))


def test_interval_of_two_values_is_that_of_the_studentized_bootstrap() -> None:
    """Half of 20 replications have 94 good and half 98: the mean is 96, its error 2 / sqrt(19), t of about 2.1."""
    low, high = shares([[94.0], [98.0]] * 10).band()
    assert low[0] == pytest.approx(0.96 - 2.1 * 0.02 / math.sqrt(19), abs=0.002)
    assert high[0] == pytest.approx(0.96 + 2.1 * 0.02 / math.sqrt(19), abs=0.002)
    assert shares([[99.0, 96.0]] * 5).interval() == (1.5, 1.5), "replications that agree leave no doubt"
    low, high = shares([[94.0], [98.0]] * 200).band()
    assert (0.96 - low[0], high[0] - 0.96) == pytest.approx([1.966 * 0.02 / math.sqrt(399)] * 2, rel=0.05)
    # of the resamples of [100, 100, 97] 1 in 27 is three times the last, without an error: 4.6 errors of 1% away
    low, high = shares([[100.0], [100.0], [97.0]]).band()
    assert (low[0], high[0]) == (pytest.approx(0.99 - 4.6 * 0.01), 1.0), "8 in 27 have none; no share is above 1"


def test_capacity_is_that_of_the_criterion_which_fails_first() -> None:
    first, second = shares([[99.0, 96.0, 90.0]] * 5), shares([[99.0, 99.0, 96.0]] * 5)
    assert second.interval() == (2.5, 2.5)
    assert least_crossing([second, first]) == least_crossing([first, second]) == (1.5, 1.5, 1.5)


def test_where_few_replications_have_violations_the_lower_end_allows_for_one_more_as_bad() -> None:
    """One of 8 replications has 8 violations of 100. With one more, two of 9: 16/9%, with an error of
    sqrt((2 (8 - 16/9)^2 + 7 (16/9)^2) / 9 / 8) = 1.176%. Of the resamples of 9, (7/9)^9 = 10% have neither: 4.6 errors below.
    At a lower rate, where none has any, one more is as bad as at the next: 8/9%, with an error of 8/9%.
    """
    low, high = shares([[100.0, 92.0], *[[100.0, 100.0]] * 7]).band()
    assert low[1] == pytest.approx(1 - 0.16 / 9 - 4.6 * 0.01176, abs=1e-5)
    assert low[0] == pytest.approx(1 - 5.6 * 0.08 / 9)
    assert high[1] == 1.0, "the upper end is that of the replications themselves"
    low, _ = shares([[100.0, 0.0], *[[100.0, 100.0]] * 7]).band()
    assert low[0] == pytest.approx(1 - 5.6 / 9), "one that loses all its requests"
    # one of 8 has 8 violations of 200 requests: one more of 112.5, the mean, has 4.5; 1,000 of 1,012.5 are good
    asked, good = np.array([[200.0]] + [[100.0]] * 7), np.array([[192.0]] + [[100.0]] * 7)
    share = 1000 / 1012.5
    squares = (192 - 200 * share) ** 2 + 7 * (100 - 100 * share) ** 2 + (108 - 112.5 * share) ** 2
    low, _ = Shares(np.ones(1), good, asked, 0.98).band()
    assert low[0] == pytest.approx(share - 4.6 * math.sqrt(squares * 9 / 8) / 1012.5)


def test_ten_replications_with_violations_or_all_of_fewer_need_no_allowance() -> None:
    """Of 40 replications ten have 2 violations of 100, or nine; or all of three have one."""
    assert not shares([[98.0]] * 10 + [[100.0]] * 30).scarce.any()
    assert shares([[98.0]] * 9 + [[100.0]] * 31).scarce.all()
    assert not shares([[99.0]] * 3).scarce.any()


def test_interval_grows_with_what_replications_have_in_common_the_naive_one_does_not() -> None:
    """Each replication loses all of a burst of 20 requests, or none: 10 of 20 do, 10% of the requests."""
    bursts = shares([[100.0, 80.0, 60.0], [100.0, 100.0, 60.0]] * 10, level=0.9)
    low, high = bursts.interval()
    naive_low, naive_high = bursts.naive_interval()
    assert low < naive_low < bursts.crossing() == 2.0 < naive_high < high
    assert (high - low) > 2 * (naive_high - naive_low)
    half = 1.96 * math.sqrt(0.24 / 100)
    above, below = math.log(0.5 / (0.4 + half)), math.log((0.6 + half) / (0.4 + half))
    assert shares([[60.0, 40.0]], level=0.5).naive_interval()[0] == pytest.approx(1 + above / below)


def test_values_by_replication_have_the_capacity_as_mean() -> None:
    one = shares([[99, 96], [99, 94], [100, 97], [98, 95]])
    assert np.mean(by_replication([one])) == pytest.approx(one.crossing())
    assert by_replication([shares([[99, 96]] * 4)]) == pytest.approx([1.5] * 4)


def test_a_value_by_replication_is_what_the_capacity_owes_to_it() -> None:
    """Violations of 4/3 and 16/3% in all: 2% lies at 1 + log(1.5) / log(4). Without the last one: 1 and 4%. Without another: 1.5 and 6%."""
    whole, without, last = (1 + math.log(ratio) / math.log(4) for ratio in (1.5, 4 / 3, 2))
    mean = (2 * without + last) / 3
    expected = [whole + 2 * (mean - each) for each in (without, without, last)]
    one = shares([[99, 96], [99, 96], [98, 92]])
    assert by_replication([one]) == pytest.approx(expected)
    assert by_replication([shares([[100, 99]] * 3), one]) == pytest.approx(expected), "the other criterion never fails"


def test_replications_that_fail_or_pass_at_every_rate_are_counted_beside_the_span_of_the_others() -> None:
    """At rates 1, 2 and 3. The second was simulated only at 2 and fails there, the third passes at all three."""
    asked = np.array([[100.0, 100, 100], [0, 100, 0], [100, 100, 100], [100, 100, 100]])
    good = np.array([[99.0, 96, 90], [0, 54, 0], [100, 100, 99], [100, 99, 96]])
    found = estimate_alone([Shares(np.array([1.0, 2, 3]), good, asked, 0.98)])
    assert found == {"least": 1.5, "most": 2.5, "failed": 1, "failed_at": 2, "passed": 1, "passed_at": 3}
    said = describe_alone({"one_alone": found, "replications": 4})
    assert said == "1.5 to 2.5 (2 of 4), below 2 (1 of 4), above 3 (1 of 4)"
    assert all(math.isnan(estimate_alone([shares([[99, 96]])])[key]) for key in ("failed_at", "passed_at"))
    only_failed = {**found, "failed": 4, "passed": 0}
    assert describe_alone({"one_alone": only_failed, "replications": 4}) == "below 2 (4 of 4)"


# -- the control variate ----------------------------------------------------------------------------------------------


UNLUCKY = (True, True, False, True, True, False, True, True)
"""Of the simulated replications; of the further ones every other one is."""


def two_kinds(number: int, requests: int) -> tuple[Any, Any]:
    """A request per second, each of half a second; the first one of an unlucky replication takes so long that the others wait."""
    work = np.full(requests, 0.5)
    work[0] = 30.0 if (UNLUCKY[number] if number < len(UNLUCKY) else number % 2) else 0.5
    return np.arange(float(requests)), work


THROUGHPUT = 20 / (19 * 0.5 + (30 + 0.5) / 2)


def adjusted(good: Sequence[float], asked: Sequence[int] = (100,) * 8, rate: float = 1, *queue: Any) -> list[float]:
    """asked: requests in each replication. queue: what draws it, its requests, warm-up and throughput."""
    of_one_rate = Shares(np.array([rate]), np.array([good]).T, np.array([asked[: len(good)]], dtype=float).T, 0.98)
    control = Control(*(queue or (two_kinds, 20, 0, THROUGHPUT)), 1000)
    return control.adjust(of_one_rate).good[:, 0].tolist()  # type: ignore[no-any-return]


def with_a_last_burst(place: Callable[[int], int]) -> Callable[[int, int], tuple[Any, Any]]:
    """As `two_kinds`, with one more long request at the end."""

    def draw(number: int, requests: int) -> tuple[Any, Any]:
        arrivals, work = two_kinds(number, requests)
        work[place(number)] = 30.0
        return arrivals, work

    return draw


LUCK = [61.0, 59, 101, 59, 61, 99, 61, 59]


def test_a_queue_counts_work_in_any_unit_and_time_in_that_of_the_rate() -> None:
    """The first request of a replication is 1 to 8 times as long as five, and the more of it the fewer are good."""

    def graded(number: int, requests: int, unit: float = 1.0) -> tuple[Any, Any]:
        work = np.full(requests, 0.5)
        work[0] = 2.5 * (1 + number % 8)
        return np.arange(float(requests)), work * unit

    good = [95.0, 90, 85, 80, 75, 70, 65, 60]
    found = adjusted(good, (100,) * 8, 1, graded, 20, 0, 1.2)
    assert found != good
    assert adjusted(good, (100,) * 8, 1, partial(graded, unit=1000.0), 20, 0, 1.2) == pytest.approx(found)
    assert adjusted(good, (100,) * 8, 2, graded, 20, 0, 2.4) == pytest.approx(found)


def test_the_last_requests_of_a_queue_do_not_count_either() -> None:
    """Of 20, those from the sixteenth on: wherever they are held up."""
    same, elsewhere = (
        adjusted(LUCK, (100,) * 8, 1, with_a_last_burst(place), 20, 5, THROUGHPUT)
        for place in (lambda _: 15, lambda number: 15 + number % 5)
    )
    assert same == pytest.approx(elsewhere) != LUCK


def test_what_a_queue_leaves_is_as_wide_as_its_regression_is_uncertain() -> None:
    """Four of eight replications are unlucky, with 41 violations of 101 give or take one, the others have one.

    Residuals of 0, 0, 1 and -1, by the line through the others 8 / 7 as large, with 6 degrees of freedom; and the mean of the
    queue's 1,000, half of which have 40 violations, of an error of 20 / sqrt(1000) for one and of 20 * sqrt(8 / 1000) for eight.
    """

    def every_other(number: int, requests: int) -> tuple[Any, Any]:
        return two_kinds(len(UNLUCKY) + number, requests)

    good = [100.0, 60, 100, 60, 100, 59, 100, 61]
    found = adjusted(good, (101,) * 8, 1, every_other, 16, 0, THROUGHPUT)
    assert np.mean(found) == pytest.approx(80)
    assert np.var(found) == pytest.approx(2 * (8 / 7) ** 2 / 8 * 8 / 6 + 20**2 * 8 / 1000)


def test_what_a_queue_explains_of_the_scatter_is_taken_away() -> None:
    """The unlucky ones have 60 good requests and the others 100, give or take one: 80 on average, as half of all are unlucky."""
    luck = np.where(UNLUCKY, 60.0, 100.0) + np.array([1.0, -1] * 4)
    assert luck.mean() == 70
    assert np.mean(adjusted(luck.tolist())) == pytest.approx(80, abs=0.5)
    assert 1 < np.std(adjusted(luck.tolist())) < 4, "what is left, and how well the queue's mean is known"


def test_replications_that_a_rate_lacks_do_not_count() -> None:
    """A rate near the crossing early and late only: of 12 replications four were not simulated."""
    numbers = [0, 1, 2, 3, 4, 7, 8, 11]  # all but 2 and 8 are unlucky
    good = np.zeros(12)
    good[numbers] = [61, 59, 101, 59, 61, 59, 101, 59]
    found = np.array(adjusted(good.tolist(), [100 if number in numbers else 0 for number in range(12)]))
    assert found[numbers].mean() == pytest.approx(80, abs=0.5)
    assert not found[[5, 6, 9, 10]].any()


def test_a_queue_explains_nothing_where_few_replications_have_violations() -> None:
    """Two of eight have 40 violations, as the queue says they should; what a third would have is not known."""
    assert adjusted([100.0, 60, 100, 100, 100, 100, 60, 100]) == [100.0, 60, 100, 100, 100, 100, 60, 100]


@pytest.mark.parametrize("good", [[100.0, 90] * 4, [97.0] * 8, [60.0, 60, 100, 60]])
def test_what_a_queue_does_not_explain_stays(good: list[float]) -> None:
    """Neither scatter of other origin, nor none at all, nor that of a few replications."""
    assert adjusted(good) == good


# -- a queue of our own parts -----------------------------------------------------------------------------------------


def test_one_request_at_a_time_is_a_queue_with_the_waits_of_lindley() -> None:
    """Services of 4, 1, 3 and 2 s, arrivals at 0, 1, 6 and 7 s: waits of 0, 3, 0 and 2 s."""
    cost = CostOf(lambda shape: float(shape.num_tokens))
    server = Server(SimExecutor(cost), Limits(1, 100, 100), cost, KVSize(1000, 1), asynchronous=False)
    requests = [
        Request(id_, s, 1, arrival_time=a) for id_, (s, a) in enumerate([(4, 0.0), (1, 1.0), (3, 6.0), (2, 7.0)])
    ]
    assert collect_served(server.serve(Orca(), requests)).ttft.tolist() == [4.0, 4.0, 3.0, 4.0]


# -- replications -----------------------------------------------------------------------------------------------------

OPEN = OpenLoop(
    num_requests=7,
    seed=3,
    arrivals=GammaArrivals(rate=5.0),
    lengths=UniformLengths(min_length=20, max_length=90, pd_ratio=4),
)


def test_the_queue_has_the_arrivals_and_work_of_a_replication() -> None:
    draw = draw_queue(OPEN)
    assert draw is not None
    times, work = draw(1, 4)
    requests = Replication(OPEN, 1, 1.0, 4).requests(None)
    assert times.tolist() == [request.arrival_time for request in requests]
    assert work.tolist() == [request.max_tokens for request in requests]
    assert draw_queue(ClosedBatch(length=8, pd_ratio=1, batch=2)) is None, "its requests can be drawn whole only"


# -- the search -------------------------------------------------------------------------------------------------------


class Curve:
    """Simulates nothing: each replication fails `violations(rate)` of its requests, times a factor of its own."""

    def __init__(self, violations: Callable[[float], float], scatter: float = 0.0, in_system: float = 1.0) -> None:
        self.violations, self.scatter, self.in_system = violations, scatter, in_system
        self.pairs: list[tuple[int, float]] = []
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, pairs: Sequence[tuple[int, float]], requests: int, warmup: int) -> list[Outcome]:
        self.pairs += pairs
        self.sizes.append((requests, warmup))
        return [self.simulate(number, rate, requests, warmup) for number, rate in pairs]

    def simulate(self, number: int, rate: float, requests: int, warmup: int) -> Outcome:
        factor = 1 + self.scatter * (-1) ** number
        counted = requests - 2 * warmup
        good = counted * (1 - min(self.violations(rate) * factor, 1.0))
        return Outcome(rate, number, requests, warmup, ((round(good), counted),), self.in_system * rate, seconds=2.0)


def one_percent_at_7(power: int = 5, **others: float) -> Curve:
    return Curve(lambda rate: 0.01 * (rate / 7) ** power, **others)


def search(curve: Curve, **goal: object) -> Capacity:
    rule = Rule("joint", SLO(ttft=1.0), 0.99)
    values = {"requests": 100_000, "most": 100, "accuracy": 0.03, "warmup": None, **goal}
    return Search(Goal(rule.criteria, **values), curve, lambda line: None).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("accuracy", [0.03, 0.01])
def test_search_finds_the_rate_at_which_one_percent_fails(accuracy: float) -> None:
    """Rates 6.6% apart lie near the ends of 3%, not near those of 1%."""
    curve = one_percent_at_7(20)
    capacity = search(curve, accuracy=accuracy)
    assert capacity.rate == pytest.approx(7.0, rel=2e-3)
    assert capacity.low <= capacity.rate <= capacity.high
    assert capacity.warmup == pytest.approx(5 * 7, rel=0.15), "5 residence times; 1 * rate requests are in the system"
    rates = {rate for number, rate in curve.pairs if number >= 4}
    assert len(rates) < 8
    assert all(7 / 1.2 < rate < 7 * 1.2 for rate in rates), "replications are spent near the crossing"
    ends = 7 * (1 - accuracy), 7 * (1 + accuracy)
    assert all(any(abs(rate / end - 1) < accuracy / 1.5 for rate in rates) for end in ends), "and at its ends"
    assert all({(number, rate) for number in range(FIRST)} <= set(curve.pairs) for rate in rates)


def test_a_rate_that_passes_is_doubled() -> None:
    """All at once, 100,000 requests wait half of 100,000 s on average: the bracket begins at 1 request/s."""

    class Slow(Curve):
        def simulate(self, number: int, rate: float, requests: int, warmup: int) -> Outcome:
            made = super().simulate(number, rate, requests, warmup)
            return made._replace(in_system=rate * 50_000) if rate == 1e6 else made

    curve = Slow(lambda rate: 0.01 * (rate / 7) ** 20)
    assert search(curve).rate == pytest.approx(7.0, rel=2e-3)
    assert [rate for number, rate in curve.pairs if number == 0][1:5] == [1, 2, 4, 8]


def test_one_replication_that_decides_leaves_the_same_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for hopeless in (Search._hopeless, lambda *_: False):
        monkeypatch.setattr(Search, "_hopeless", hopeless)
        curve = one_percent_at_7(scatter=0.5)
        capacity = search(curve, accuracy=0.05)
        ends.append((capacity.rate, capacity.low, capacity.high, {rate for _, rate in curve.pairs}, len(curve.pairs)))
    (*same, number), (*others, more) = ends
    assert same == others and number < more


def test_search_adds_replications_at_the_nearest_rates_only() -> None:
    curve = one_percent_at_7(scatter=0.9)
    capacity = search(curve, accuracy=0.05)
    assert capacity.accuracy <= 0.05
    assert capacity.shares[0].num_replications.max() > LEAST
    later = {rate for number, rate in curve.pairs if number >= FIRST}
    assert len(later) < 5 and min(later) < 7 * 0.95 and max(later) > 7 * 1.05


@pytest.mark.parametrize(
    ("curve", "goal", "problem"),
    [
        (Curve(lambda rate: 0.3), {}, "slo: no rate meets it, requests served alone reach attainment 70%"),
        (Curve(lambda rate: 0.0), {"requests": 300}, "requests=300: even if all arrive at once"),
        (one_percent_at_7(scatter=0.9), {"most": 16}, "accuracy=0.03: 16 replications of 100000 requests give ±"),
        (one_percent_at_7(scatter=0.9), {"recorded": 1_600_000}, "1600000 requests hold no more; give"),
        (one_percent_at_7(9, in_system=9), {"requests": 1000}, "give requests=1"),
    ],
)
def test_what_cannot_be_found_says_what_to_change(curve: Curve, goal: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        search(curve, **goal)
    assert problem in str(error.value)


def test_requests_alone_are_few_and_all_count() -> None:
    curve = Curve(lambda rate: 0.3)
    with pytest.raises(ConfigError, match="served alone"):
        search(curve)
    assert curve.sizes[-1] == (200, 0)


def test_too_few_requests_are_refused_as_soon_as_that_is_certain() -> None:
    """At 5 times the rate that passes first 9 * rate are in the system; the bracket would go on to 7 requests/s."""
    short, long = (one_percent_at_7(9, in_system=9) for _ in range(2))
    with pytest.raises(ConfigError, match=r"requests=100: the first and last .* leaves too few"):
        search(short, requests=100)
    search(long)
    bracket = {rate for number, rate in long.pairs if number < 4}
    assert len({rate for _, rate in short.pairs}) < len(bracket) / 2


# -- the command ------------------------------------------------------------------------------------------------------

SMALL = "policy=orca workload=open_loop slo.ttft=1 requests=10000 accuracy=0.05 cores=1 output=found"


def run(*changes: str, without: Sequence[str] = ()) -> str:
    """What the command prints, or its error."""
    changed = {change.partition("=")[0] for change in changes} | set(without)
    kept = [key for key in SMALL.split() if key.partition("=")[0] not in changed]
    ended = outcome(lambda: main(command.COMMAND), [*kept, *changes])
    return ended.complaint or ended.printed


def simulate_curve(monkeypatch: pytest.MonkeyPatch, curve: Curve) -> None:
    """Has the command simulate this curve."""
    monkeypatch.setattr(
        searching, "simulate", lambda settings, rule, number, rate, *size: curve([(number, rate)], *size)[0]
    )


def result() -> Any:
    return json.loads(Path("found/capacity.json").read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one. The control variate's queue has as many requests as a search of a few needs."""
    monkeypatch.setattr(control, "_DRAWN", 200_000)
    with chdir(tmp_path):
        yield tmp_path


def test_a_search_is_written_resumed_and_not_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = one_percent_at_7(scatter=0.5)
    simulate_curve(monkeypatch, curve)
    printed, first = run(), result()
    figures = first["capacity"]
    assert figures["requests_per_second"] == pytest.approx(7.0, rel=0.01)
    assert f"{figures['requests_per_second']:.4g} [{figures['low']:.4g}, {figures['high']:.4g}] requests/s" in printed
    simulated = set(curve.pairs)
    assert figures["simulations"] == len(simulated), "those that found the bracket count, too"
    assert figures["cpu_seconds"] == 2.0 * len(simulated)
    curve.pairs.clear()
    assert "holds this run already" in run()
    lines = Path("found/simulations.jsonl").read_text().splitlines(keepends=True)
    Path("found/simulations.jsonl").write_text("".join(lines) + lines[-1][:20])  # cut off while it was written
    Path("found/capacity.json").unlink()
    assert f"{len(lines) - 1} simulations of an earlier search are kept" in run()
    assert not curve.pairs
    assert all(result()[key] == first[key] for key in ("capacity", "curves", "by_replication"))
    run("accuracy=0.02")
    assert curve.pairs, "a narrower interval goes on from what there is"
    assert simulated.isdisjoint(curve.pairs)


def test_a_capacity_over_what_no_policy_can_sustain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heaviest 1% may wait for ever: 99% of the requests can be sustained at a slightly higher rate than all."""
    simulate_curve(monkeypatch, one_percent_at_7(scatter=0.5))
    small = ("requests=200", "slo.tbt=1")
    run(*small, without=["slo.ttft"])
    simulated = Path("found/simulations.jsonl").read_text()
    printed = run(*small, "bounds=true", without=["slo.ttft"])
    assert Path("found/simulations.jsonl").read_text() == simulated, "nothing is simulated again"
    regret, figures = result()["regret"], result()["capacity"]
    keys = compose("policy=orca", "workload=open_loop", "backend=sim", "+workload.slo.tbt=1").keys
    bounds = bounds_together(read_settings(keys), figures["replications"], 200)
    assert regret["rate_bound"] == pytest.approx(bounds.rate_attained(0.99))
    assert bounds.rate < regret["rate_bound"] < 1.1 * bounds.rate
    assert regret["capacity"] == pytest.approx(figures["requests_per_second"] / regret["rate_bound"])
    assert f"of {regret['rate_bound']:.4g} requests/s, which no policy exceeds" in printed
    assert "bounds=true: definition=qoserve" in run("definition=qoserve", "bounds=true", "output=other")


def open_loop(policy: str, limit: float) -> Settings:
    """The settings of a run of requests with this objective of the first token."""
    settings = read_settings(compose(f"policy={policy}", "backend=sim").keys)
    return replace(settings, workload=replace(OPEN, slo={"ttft": limit}))


@pytest.mark.parametrize(("limit", "good"), [(1e-6, 0), (10.0, 8)])
def test_a_simulation_counts_the_requests_of_its_window(limit: float, good: int) -> None:
    """One request per 10 s is served alone; with TTFT objectives below and above its prefill none or all attain them."""
    made = simulate(open_loop("orca", limit), Rule("joint", SLO(ttft=limit), 0.99), 0, 0.1, 12, 2)
    assert made.counts == ((good, 8),) and made[:4] == (0.1, 0, 12, 2)
    assert 0 < made.in_system < 0.1


@pytest.mark.parametrize("policy", ["orca", "sarathi", "vllm_v1", "mlfq", "qoserve"])
def test_a_simulation_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """What it held is free at once, not when the collector next looks: a search runs a hundred in each of its processes."""
    states = []

    def assemble_and_watch(settings: Any) -> Any:
        run = assemble(settings)
        states.extend(weakref.ref(engine.state) for engine in run.engine.engines)
        return run

    monkeypatch.setattr("experiments.capacity.simulation.assemble", assemble_and_watch)
    gc.disable()
    try:
        simulate(open_loop(policy, 1.0), Rule("joint", SLO(ttft=1.0), 0.99), 0, 1.0, 20, 2)
        assert [state() for state in states] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("slo.ttft=null", "definition=joint: no objective is set; give slo.ttft=SECONDS"),
        ("definition=distserve", "definition=distserve: needs an objective, give slo.tbt=SECONDS"),
        ("definition=orca", "definition=orca: "),
        ("attainment=1", "attainment=1: "),
        ("workload=closed", "workload: "),
        ("+workload.load=0.5", "workload.load=0.5: "),
        ("backend=cpu", "backend=cpu: this command simulates; give backend=sim"),
        ("slo=strictest", "slo=strictest: "),
        ("slo.tpot=1", "slo.tpot: "),
        ("requests=many", "requests=many: give auto, or a whole number from "),
        ("cores=many", "cores=many: give auto, or a whole number from "),
        ("requests=60", "slo: no rate meets it, requests served alone reach attainment 70%"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    change: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_curve(monkeypatch, Curve(lambda rate: 0.3))
    assert problem in run(change.lstrip("+"))
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("requests", "recorded", "problem"),
    [
        (
            "auto",
            40,
            "requests=20: a trace of 40 requests makes 2 replications, at least 16 are needed; give a trace of 320",
        ),
        ("30", 319, "makes 10 replications, at least 16 are needed; give a trace of 320 requests or more"),
        ("30", 350, "makes 11 replications, at least 16 are needed; give requests=21, or a longer trace"),
    ],
)
def test_a_trace_too_short_for_its_replications_is_refused(
    requests: str, recorded: int, problem: str, folder: Path
) -> None:
    path = Path(f"trace_of_{recorded}.csv").absolute()
    rows = [f"{time},ann,3,1\n" for time in range(recorded)]
    path.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    assert problem in run("workload=vtc_real", f"workload.path={path}", f"requests={requests}")


def test_named_objectives_are_those_of_the_requests() -> None:
    """strict: the first token in 1 s and each next one in 50 ms; relaxed: 5 times as long; tiers: by service class."""
    slos = {}
    for name in ("none", "strict", "relaxed", "tiers"):
        keys = compose("workload=open_loop", f"slo={name}", name="capacity").keys
        slos[name] = {request.slo for request in construct("workload", keys["workload"]).requests(None)}
    tiers = {SLO(ttft=6.0, tbt=0.05), SLO(total=600.0), SLO(total=1800.0)}
    assert slos == {"none": {SLO()}, "strict": {SLO(1.0, 0.05)}, "relaxed": {SLO(5.0, 0.25)}, "tiers": tiers}


def test_a_sweep_over_objectives_and_models_has_a_row_for_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search has settings of its own, and the highest capacity comes first."""
    seen: set[tuple[str, SLO]] = set()

    def simulate(settings: Settings, rule: Rule, number: int, rate: float, *size: int) -> Outcome:
        seen.add((settings.model.name, rule.slo))
        strict = 7.0 if rule.slo.tbt == 0.05 else 9.0
        return Curve(lambda rate: 0.01 * (rate / strict) ** 9)([(number, rate)], *size)[0]

    monkeypatch.setattr(searching, "simulate", simulate)
    swept = ("-m", "sweep=s", "model=tiny,llama-2-7b", "slo=strict,relaxed")
    printed = run(*swept, without=["output", "slo.ttft"])
    assert seen == set(product(("tiny", "llama-2-7b"), (SLO(1.0, 0.05), SLO(5.0, 0.25))))
    rows = [re.split(r"\s{2,}", line)[:2] for line in printed.splitlines() if line.startswith("orca, ")]
    assert [float(figures.split(" ")[0]) for _, figures in rows] == pytest.approx([9.0, 9.0, 7.0, 7.0], rel=0.01)
    assert all("slo=relaxed" in label for label, _ in rows[:2]) and len({label for label, _ in rows}) == 4


def test_what_can_be_gone_on_with_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_curve(monkeypatch, one_percent_at_7(scatter=0.9))
    assert "replications=" in run("replications=16")
    assert [path.name for path in Path("found").iterdir() if not path.name.startswith(".")] == ["simulations.jsonl"]
    assert "of an earlier search are kept" in run()
