"""Seeds as an axis: `seeds=N` on the command line, and what tables and plots say of several runs."""

import copy
import math
from typing import Any

import pandas as pd
import pytest
from hand_made import make_record, make_summary

from cbatch import ConfigError
from experiments.plots.series import describe_points, summarize_series
from experiments.settings.overrides import with_seeds
from experiments.store.intervals import Mean, log_ends, share_ends
from experiments.store.text import ONE_REPLICATION, sweep_text

HALF = 12.706 * math.sqrt(2) / math.sqrt(2)
"""Of the interval of 1 and 3: one degree of freedom, and an error of sqrt(2) / sqrt(2)."""


def test_seeds_are_a_sweep() -> None:
    assert with_seeds(["policy=orca", "seeds=3"]) == ["-m", "policy=orca", "seed=0,1,2"]
    assert with_seeds(["-m", "seeds=2", "seed=7"]) == ["-m", "seed=7,8"]
    assert with_seeds(["seed=7"]) == ["seed=7"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["seeds=0"], "seeds=0: give a whole number, at least 1"),
        (["seeds="], "seeds=: give a whole number, at least 1"),
        (["seeds=3", "seed=1,2"], "seeds=3 seed=1,2: give one of the two, or the first seed as a number"),
    ],
)
def test_seeds_that_cannot_be_used(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        with_seeds(given)


def summary(throughput: float, counted: int) -> dict[str, Any]:
    made = copy.deepcopy(make_summary(make_record()))
    made["throughput"]["total_tokens_per_second"] = throughput
    made["run"]["counted_requests"] = counted
    return made


def test_intervals_of_latencies_and_shares_stay_where_these_can_be() -> None:
    assert log_ends(Mean(2.0, 3.0, 2)) == pytest.approx((2 * math.exp(-1.5), 2 * math.exp(1.5)))
    assert log_ends(Mean(0.0, 0.0, 2)) == (0.0, 0.0)
    assert share_ends(Mean(0.75, 0.5, 2)) == (0.25, 1.0) and share_ends(Mean(0.25, 0.5, 2)) == (0.0, 0.75)


def test_a_table_has_a_row_for_the_runs_of_several_seeds() -> None:
    lines = sweep_text([("a", summary(1.0, 900)), ("b", summary(5.0, 900)), ("a", summary(3.0, 2000))]).splitlines()
    assert lines[2].split()[:4] == ["a", "2", "±", f"{HALF:.2g}"]
    assert lines[3].split()[:2] == ["b", "5"]
    assert lines[4] == "mean ± half of the 95% interval over 2 runs; percentiles are those of each run, averaged"
    assert lines[5].startswith(
        "beyond a run's P99 lie 9 of its requests, fewer than 10: the P99s of TTFT are unreliable"
    )
    enough = sweep_text([("a", summary(1.0, 1000)), ("a", summary(3.0, 1000))])
    assert "beyond a run's P99 lie 10 of its requests\n" in enough
    assert "±" not in sweep_text([("a", summary(1.0, 900)), ("b", summary(5.0, 900))])


def test_rows_of_equal_runs_have_no_interval() -> None:
    """One row of equal runs; then beside one whose runs differ."""
    equal = [("a", summary(2.0, 900)), ("a", summary(2.0, 900))]
    text = sweep_text(equal)
    assert ONE_REPLICATION in text and "95% interval" not in text and "±" not in text
    both = sweep_text([*equal, ("b", summary(1.0, 900)), ("b", summary(3.0, 900))])
    assert "mean ± half of the 95% interval over 2 runs" in both
    assert f"{ONE_REPLICATION}; so in 1 of 2 rows" in both
    assert ONE_REPLICATION not in sweep_text([("a", summary(2.0, 900)), ("a", summary(2.0, 901))])


def test_points_of_equal_runs_have_no_interval() -> None:
    frame = pd.DataFrame({"label": ["p", "p"], "rate": [2.0, 2.0], "figures": ["same", "same"]})
    assert describe_points(frame, "rate") == "2 equal runs per point: the seed changes nothing"
    assert describe_points(frame.assign(figures=["same", "other"]), "rate").startswith("mean and 95% interval of 2")


def test_a_band_is_the_interval_of_the_mean() -> None:
    frame = pd.DataFrame({"label": ["p", "p", "q"], "rate": [2.0, 2.0, 2.0], "y": [1.0, 3.0, 4.0]})
    found = summarize_series(frame, "rate", "y")
    assert found.loc["p", ["rate", "mean", "low", "high"]].tolist() == pytest.approx(
        [2, 2, 2 - HALF, 2 + HALF], rel=1e-4
    )
    assert found.loc["q", ["mean", "low", "high"]].tolist() == [4, 4, 4]
    assert describe_points(frame, "rate") == "mean and 95% interval of up to 2 runs per point"
