"""Comparisons of two things: means in pairs by hand, and the command on runs and searches."""

import json
import math
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from hand_made import ABOUT
from in_process import outcome

from cbatch import ConfigError
from experiments.compare import Thing, compare, main, report

T4 = 2.7764
"""Standard errors of an interval with 4 degrees of freedom."""


def numbered(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_pairs_take_out_what_replications_share() -> None:
    """Differences of 1, 2, 3, 2, 2: 2 on average, their deviation sqrt(1/2), among values that scatter by tens."""
    first, second = numbered(10, 20, 30, 40, 50), numbered(11, 22, 33, 42, 52)
    error = math.sqrt(0.5 / 5)
    found = compare(first, second, paired=True)
    assert found.difference == pytest.approx((2, 2 - T4 * error, 2 + T4 * error), rel=1e-4)
    assert found.ratio[0] == pytest.approx(160 / 150)
    assert found.apart
    assert (found.paired, found.number) == (True, 5)
    unpaired = compare(first, second, paired=False)
    assert not unpaired.apart
    assert unpaired.difference[0] == 2


def test_ratio_of_values_that_are_proportional_is_exact() -> None:
    found = compare(numbered(1, 2, 5), numbered(1.5, 3, 7.5), paired=True)
    assert found.ratio == pytest.approx((1.5, 1.5, 1.5))


def test_only_common_replications_are_paired() -> None:
    assert compare({3: 1.0, 4: 2.0, 5: 9.0}, {4: 3.0, 5: 10.0, 6: 7.0}, paired=True).difference == pytest.approx(
        (1, 1, 1)
    )


def test_how_many_replications_would_tell() -> None:
    """Differences of 1 and -0.8 five times each: mean 0.1, error 0.3, t of 9 degrees of freedom 2.262."""
    found = compare(numbered(*[0.0] * 10), numbered(*[1.0, -0.8] * 5), paired=True)
    assert found.needed == pytest.approx(10 * ((2.262 + 0.84) * 0.3 / 0.1) ** 2, rel=2e-3)
    text = report(
        [Thing("a", {"x": numbered(*[5.0] * 10)}, "w"), Thing("b", {"x": numbered(*[6.0, 4.2] * 5)}, "w")], ["x"]
    )
    assert "b over a: 10 replications, in pairs, on the same requests" in text
    assert "cannot be told apart; about 867 replications would tell" in text


def test_other_requests_are_not_paired_and_equal_ones_are_said_to_be() -> None:
    things = [Thing(name, {"x": numbered(1.0, 1.0)}, served) for name, served in (("a", "w"), ("b", "v"))]
    text = report(things, ["x"])
    assert "NOT in pairs" in text
    assert "equal in every replication" in text


@pytest.mark.parametrize(
    ("things", "said"),
    [
        ([Thing("a", {"x": numbered(1, 2)}, "")], "compare: only a is there; give the folder of another one too"),
        ([Thing(name, {"x": numbered(1)}, "") for name in "ab"], "one replication has no interval; "),
        ([Thing(name, {"y": numbered(1, 2)}, "") for name in "ab"], "metric=x: no such figure; known: y"),
    ],
)
def test_what_cannot_be_compared(things: list[Thing], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        report(things, ["x"])


def printed(*arguments: str) -> str:
    ended = outcome(lambda: main(list(arguments)), [])
    return ended.complaint or ended.printed


def test_searches_are_compared_by_their_replications(tmp_path: Path) -> None:
    for name, values in (("one", [10.0, 20.0, 30.0]), ("other", [12.0, 24.0, 36.0])):
        found: dict[str, Any] = {
            "about": {**ABOUT, "policy": name, "code": {"own": {}, "framework": ""}},
            "capacity": {"requests_per_second": 1.0, "requests": 100},
            "by_replication": values,
            "settings": {"workload": {"seed": 0, "length": 8}},
        }
        (tmp_path / name).mkdir()
        (tmp_path / name / "capacity.json").write_text(json.dumps(found))
    with chdir(tmp_path):
        assert "other over one: 3 replications, in pairs" in printed("one", "other")
        assert "1.2x [1.2, 1.2]" in printed(".")
        assert (
            printed("one", "nowhere")
            == "compare nowhere: no such folder; give folders of runs, or at least two policies"
        )
        assert printed("one", "other", "chunk=2").startswith("compare: chunk=2 is for policies that are run first")
