"""The search for a capacity on curves that are known."""

from collections.abc import Callable
from math import inf

import numpy as np
import pytest
from curve import Curve, one_percent_at_7

from cbatch import CbatchError, ConfigError
from experiments.capacity.estimate import Capacity
from experiments.capacity.search import FIRST, LEAST, Goal, Search
from experiments.capacity.simulation import Outcome


def search(curve: Curve, **goal: object) -> Capacity:
    values = {"requests": 100_000, "most": 100, "accuracy": 0.03, **goal}
    return Search(Goal(0.99, **values), curve, lambda line: None).run()  # type: ignore[arg-type]


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


@pytest.mark.parametrize("accuracy", [0.1, 0.03, 0.01])
@pytest.mark.parametrize("end", [7.0, 7.1, 7.2, 7.3, 7.4, 7.5, 7.6])
def test_the_interval_contains_a_rate_above_which_all_requests_fail(end: float, accuracy: float) -> None:
    """Below it none fails. The rates tell only between which two of them it lies."""
    capacity = search(Curve(lambda rate: float(rate > end)), accuracy=accuracy)
    assert capacity.low <= end <= capacity.high
    assert capacity.accuracy <= accuracy


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
    assert capacity.accuracy == pytest.approx(0.05), "the interval at which it ends is moved out to ±5%"
    assert capacity.shares.num_replications.max() > LEAST
    later = {rate for number, rate in curve.pairs if number >= FIRST}
    assert len(later) < 5 and min(later) < 7 * 0.95 and max(later) > 7 * 1.05


@pytest.mark.parametrize(
    ("curve", "goal", "problem"),
    [
        (
            Curve(lambda rate: 0.3),
            {},
            "slo: no rate meets it, as even requests served one at a time reach only attainment 70%",
        ),
        (Curve(lambda rate: 0.0), {"requests": 300}, "requests=300: even if all arrive at once"),
        (one_percent_at_7(scatter=0.9), {"most": 16}, "accuracy=0.03: 16 replications of 100000 requests give ±"),
        (one_percent_at_7(scatter=0.9), {"recorded": 1_600_000}, "1600000 requests hold no more; give"),
        (one_percent_at_7(9, in_system=9), {"requests": 1000}, "give requests=1"),
    ],
)
def test_what_cannot_be_found_says_what_to_change(curve: Curve, goal: dict[str, int], problem: str) -> None:
    with pytest.raises(CbatchError) as error:
        search(curve, **goal)
    assert problem in str(error.value)


def test_requests_alone_are_few_and_all_count() -> None:
    curve = Curve(lambda rate: 0.3)
    with pytest.raises(ConfigError, match="served one at a time"):
        search(curve)
    assert curve.sizes[-1] == (200, 0)


class Spoiled(Curve):
    """A curve with other outcomes. spoil: called with each outcome."""

    def __init__(self, spoil: Callable[[Outcome], Outcome], violations: Callable[[float], float]) -> None:
        super().__init__(violations)
        self.spoil = spoil

    def simulate(self, number: int, rate: float, requests: int, warmup: int) -> Outcome:
        return self.spoil(super().simulate(number, rate, requests, warmup))


def test_a_lower_rate_than_that_of_requests_alone_decides_that_none_passes() -> None:
    """1.02% fail at all rates, and by chance none of the few requests that are served one at a time."""
    few = Spoiled(lambda made: made._replace(good=made.total) if made.requests == 200 else made, lambda rate: 0.0102)
    with pytest.raises(ConfigError, match=r"served one at a time reach only attainment 98\.98%"):
        search(few)
    assert min(rate for _, rate in few.pairs) > 0.02 / 4


def test_a_policy_that_serves_no_request_is_named() -> None:
    none = Spoiled(lambda made: made._replace(good=0, in_system=inf), lambda rate: 1.0)
    with pytest.raises(ConfigError, match="requests=100000: none is served if all arrive at once"):
        search(none)


def test_the_least_number_of_sessions_may_fail_with_more_replications() -> None:
    """One session passes in the four replications of the bracket, and fails in the next four."""
    one = Spoiled(
        lambda made: made._replace(good=made.total * (made.replication < 4 and made.rate == 1)), lambda _: 0.0
    )
    with pytest.raises(ConfigError, match="slo: is not met even at 1 sessions"):
        search(one, per_session=20.0)


def test_too_few_requests_are_refused_as_soon_as_that_is_certain() -> None:
    """At 5 times the rate that passes first 9 * rate are in the system; the bracket would go on to 7 requests/s."""
    short, long = (one_percent_at_7(9, in_system=9) for _ in range(2))
    with pytest.raises(ConfigError, match=r"requests=100: the first and last .* leaves too few"):
        search(short, requests=100)
    search(long)
    bracket = {rate for number, rate in long.pairs if number < 4}
    assert len({rate for _, rate in short.pairs}) < len(bracket) / 2


@pytest.mark.parametrize("luck", [0.3, 3.0])
def test_all_replications_are_simulated_at_the_rates_around_the_interval(luck: float) -> None:
    """The first eight have few or many violations, so that the capacity moves when others are added."""

    class Lucky(Curve):
        def simulate(self, number: int, rate: float, requests: int, warmup: int) -> Outcome:
            scale = luck if number < FIRST else 1.0 + 0.2 * (-1) ** number
            return Curve(lambda rate: scale * self.violations(rate)).simulate(number, rate, requests, warmup)

    capacity = search(Lucky(lambda rate: 0.01 * (rate / 7) ** 20), accuracy=0.05)
    shares = capacity.shares
    first, last = np.searchsorted(shares.rates, capacity.low, "right") - 1, np.searchsorted(shares.rates, capacity.high)
    assert set(shares.num_replications[first : last + 1]) == {len(shares.good)}
