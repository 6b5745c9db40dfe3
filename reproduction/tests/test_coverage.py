"""Intervals cover what they should, on queues of our own parts whose capacity and mean are known."""

import numpy as np
import pytest

from cbatch import CostFunction, KVSize, Limits, Request, Server
from cbatch.results.metrics import collect_served
from cbatch.sim import SimExecutor
from experiments.report.intervals import mean_of
from policies.orca import Orca
from reproduction.bench.coverage import COLUMNS, CURVES, QUEUES, TRUTHS, repeat, search


def test_truths_by_hand() -> None:
    """At load 0.5: M/M/1 sojourns are exponential with mean 2; M/D/1 waits 0.5 on average, and half do not wait."""
    memoryless, constant = QUEUES["M/M/1"], QUEUES["M/D/1"]
    assert memoryless.mean(0.5) == 2.0
    assert memoryless.within(0.5) == pytest.approx(1 - np.exp(-0.5 * memoryless.limit))
    assert constant.mean(0.5) == 1.5
    assert type(constant)(1.0, deterministic=True).within(0.5) == pytest.approx(0.5)
    # Erlang: P(W <= t) = (1 - r) e^(rt) up to one service
    assert type(constant)(1.5, deterministic=True).within(0.5) == pytest.approx(0.5 * np.exp(0.25))
    assert memoryless.capacity == pytest.approx(1 + np.log(0.01) / memoryless.limit)


@pytest.mark.parametrize("name", QUEUES)
def test_the_engine_is_the_queue(name: str) -> None:
    """Orca with a batch of one, on a device that takes 1 ms per prompt token."""
    cost, rate = CostFunction(lambda shape: shape.num_tokens / 1000), 0.7
    server = Server(SimExecutor(cost), Limits(1, 100_000, 100_000), cost, KVSize(110, 1000), asynchronous=False)
    rows = zip(*(column.tolist() for column in QUEUES[name].draw(3)), strict=True)
    asked = [Request(id_, tokens, 1, arrival_time=time / rate) for id_, (time, tokens) in enumerate(rows)]
    found = QUEUES[name].recur(range(3, 4), np.array([rate]))
    served = collect_served(server.serve(Orca(), asked)).end_to_end
    np.testing.assert_allclose(served, found[:, 0, 0], atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", QUEUES)
def test_intervals_cover_the_truth(name: str, num_repetitions: int) -> None:
    """In 93 to 97% of 1,000 repetitions, of fewer within three standard errors of that; the naive ones in less than 75%."""
    covered = dict(
        zip(COLUMNS, np.mean([repeat(QUEUES[name], k) for k in range(num_repetitions)], axis=0), strict=True)
    )
    slack = 0.0 if num_repetitions >= 1000 else 3 * np.sqrt(0.95 * 0.05 / num_repetitions)
    for column in ("capacity", "capacity, control variate", "mean"):
        assert 0.93 - slack <= covered[column] <= 0.97 + slack
    for column in ("capacity", "mean"):
        assert covered[f"{column}, naive"] < 0.75


@pytest.mark.parametrize("name", CURVES)
def test_curves_have_one_percent_of_violations_at_a_rate_of_1(name: str) -> None:
    """Within three standard errors; at a rate of 2 ** -0.125, half as many."""
    for rate, share in ((1.0, 0.01), (2**-0.125, 0.005)):
        served = [CURVES[name].serve(seed, rate, 0) for seed in range(400)]
        bad = np.array([1 - good / counted for good, counted, _ in served])
        assert bad.mean() == pytest.approx(share, abs=3 * bad.std() / 20)


@pytest.mark.long
@pytest.mark.parametrize("name", TRUTHS)
def test_whole_searches_cover_the_truth(name: str, num_repetitions: int) -> None:
    """In at least 94%, within three standard errors of 200 searches or fewer."""
    truth, number = TRUTHS[name].capacity, min(num_repetitions, 200)
    ended = [search(name, name in QUEUES, k) for k in range(number)]
    covered = np.mean([low <= truth <= high for low, high, _ in ended])
    assert covered >= 0.94 - 3 * np.sqrt(0.94 * 0.06 / number)


@pytest.mark.long
def test_a_whole_search_stops_near_the_truth() -> None:
    """At ±3%, so that the truth lies within three widths even where the interval misses it."""
    queue = QUEUES["M/M/1"]
    low, high, _ = search("M/M/1", False, 0)
    assert 0 < high - low <= 2 * 0.03 * 1.1 * queue.capacity
    assert abs((low + high) / 2 - queue.capacity) < 3 * (high - low) / 2


def test_mean_of_values_has_the_t_interval() -> None:
    """1, 2, 3: the mean 2, its error 1 / sqrt(3), and 4.303 errors to each side with 2 degrees of freedom."""
    assert mean_of([1.0, 2.0, 3.0]) == (2.0, pytest.approx(4.3027 / np.sqrt(3), rel=1e-4), 3)
    assert np.isnan(mean_of([5.0]).half)
