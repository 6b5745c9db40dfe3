"""Statistics of capacities by hand: shares, intervals, and the control variate."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from experiments.capacity.control import Control, draw_queue
from experiments.capacity.estimate import Capacity, Shares
from experiments.trials.replications import Replication
from experiments.workloads import ClosedBatch, GammaArrivals, OpenLoop, UniformLengths


def shares(good: Sequence[Sequence[float]], level: float = 0.98) -> Shares:
    """Returns the shares of good requests among 100, at rates 1, 2, ..."""
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
    # of a single request each: 8 of 9 with an error of 1/9, and 7 of 9 with one of sqrt((2 (7/9)^2 + 7 (2/9)^2) / 9 / 8)
    single = Shares(np.array([1.0, 2.0]), np.array([[1.0, 0.0], *[[1.0, 1.0]] * 7]), np.ones((8, 2)), 0.98)
    assert single.band()[0] == pytest.approx([3.4 / 9, 7 / 9 - 4.6 * math.sqrt(1.75) / 9])
    low, high = shares([[99.0, 98.0]] * 2).band()
    assert (low.tolist(), high.tolist()) == ([0, 0], [1, 1]), "two replications show nothing"


def test_ten_replications_with_violations_or_all_of_fewer_need_no_allowance() -> None:
    """Ten of 40 replications have 2 violations among 100, or nine have; or each of three replications has one."""
    assert not shares([[98.0]] * 10 + [[100.0]] * 30).scarce.any()
    assert shares([[98.0]] * 9 + [[100.0]] * 31).scarce.all()
    assert not shares([[99.0]] * 3).scarce.any()


@pytest.mark.parametrize(
    ("found", "accuracy", "stated"),
    [
        ((98.0, 102.4), 0.03, (97.25, 102.75)),  # ±2.2%: a quarter more
        ((97.2, 102.4), 0.03, (97.0, 103.0)),  # ±2.6%: 3%, less than a quarter more
        ((96.0, 101.0), 0.03, (96.0, 103.0)),  # an end beyond 3% stays
    ],
)
def test_an_interval_at_which_a_search_ends_is_wider(
    found: tuple[float, float], accuracy: float, stated: tuple[float, float]
) -> None:
    wide = Capacity(100.0, *found, shares([[99.0, 96.0]]), 100, 0).widened(accuracy)
    assert (wide.low, wide.high) == pytest.approx(stated)


def test_values_by_replication_have_the_capacity_as_mean() -> None:
    one = shares([[99, 96], [99, 94], [100, 97], [98, 95]])
    assert np.mean(one.by_replication()) == pytest.approx(one.crossing())
    assert shares([[99, 96]] * 4).by_replication() == pytest.approx([1.5] * 4)


def test_a_value_by_replication_is_what_the_capacity_owes_to_it() -> None:
    """Violations of 4/3 and 16/3% in all: 2% lies at 1 + log(1.5) / log(4). Without the last one: 1 and 4%. Without another: 1.5 and 6%."""
    whole, without, last = (1 + math.log(ratio) / math.log(4) for ratio in (1.5, 4 / 3, 2))
    mean = (2 * without + last) / 3
    expected = [whole + 2 * (mean - each) for each in (without, without, last)]
    one = shares([[99, 96], [99, 96], [98, 92]])
    assert one.by_replication() == pytest.approx(expected)


# -- the control variate ----------------------------------------------------------------------------------------------


UNLUCKY = (True, True, False, True, True, False, True, True)
"""Which of the simulated replications are unlucky; of the further ones, every other one is."""


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
    """Requests 16 to 20 of 20 do not count, wherever they are held up."""
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


# -- replications -----------------------------------------------------------------------------------------------------

LENGTHS = UniformLengths(min_length=20, max_length=90, pd_ratio=4)
OPEN = OpenLoop(num_requests=7, seed=3, arrivals=GammaArrivals(rate=5.0), lengths=LENGTHS)


def test_the_queue_has_the_arrivals_and_work_of_a_replication() -> None:
    draw = draw_queue(OPEN)
    assert draw is not None
    times, work = draw(1, 4)
    requests = Replication(OPEN, 1, 1.0, 4).requests(None)
    assert times.tolist() == [request.arrival_time for request in requests]
    assert work.tolist() == [request.max_tokens for request in requests]
    assert draw_queue(ClosedBatch(length=8, pd_ratio=1, batch=2)) is None, "its requests can be drawn whole only"
