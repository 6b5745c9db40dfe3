"""Seeds as an axis: `seeds=N` on the command line, and intervals of means over several runs."""

import math

import pytest

from experiments.settings.overrides import with_seeds
from experiments.store.intervals import Mean, log_ends, share_ends


def test_seeds_are_a_sweep() -> None:
    assert with_seeds(["policy=orca", "seeds=3"]) == ["-m", "policy=orca", "seed=0,1,2"]
    assert with_seeds(["-m", "seeds=2", "seed=7"]) == ["-m", "seed=7,8"]
    assert with_seeds(["seed=7"]) == ["seed=7"]


def test_intervals_of_latencies_and_shares_stay_where_these_can_be() -> None:
    assert log_ends(Mean(2.0, 3.0, 2)) == pytest.approx((2 * math.exp(-1.5), 2 * math.exp(1.5)))
    assert log_ends(Mean(0.0, 0.0, 2)) == (0.0, 0.0)
    assert share_ends(Mean(0.75, 0.5, 2)) == (0.25, 1.0) and share_ends(Mean(0.25, 0.5, 2)) == (0.0, 0.75)
