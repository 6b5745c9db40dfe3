"""Comparisons of two things: means in pairs by hand, and the command on runs and searches."""

import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hand_made import ABOUT, write_run
from in_process import outcome

from cbatch import ConfigError
from experiments.compare import main, pairs_of, report, table_of
from experiments.report.conditions import ratio_error
from experiments.report.intervals import Compared, compare, holm, holm_text
from experiments.report.text import disagree
from experiments.settings.compose import compose_run
from experiments.settings.error_lines import one_line
from experiments.settings.settings import Settings
from experiments.store.replications import read_replications

ROOT = Path(__file__).parents[2]
OUTSIDE, LAUNCHES = {"iterations_outside_measured_range": 0}, ", with launches without a graph"

T4 = 2.7764
"""Standard errors of an interval with 4 degrees of freedom."""


def numbered(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_folders_with_unlike_columns_are_read_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """pandas warns of a frame that is put together of more than 100 blocks."""
    for place in (0, 1):
        values = {f"k{number}": (1, 0.5)[(number + place) % 2] for number in range(300)}
        write_run(tmp_path / f"{place}" / "run", settings={"seed": place}, figures={"own": values})
    rows = read_replications([tmp_path / "0", tmp_path / "1"])
    assert len(rows) == 2 and not [*recwarn]


def test_p_values_are_those_of_t_and_holm_corrects_them() -> None:
    """Differences of 1 and 3 have t = 2 with 1 degree of freedom: p = 1 - 2 atan(2) / pi. Of three tests 3, 2 and 1 are left."""
    found = compare(numbered(0, 0), numbered(1, 3), paired=True)
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    assert compare(numbered(1, 2), numbered(1, 2), paired=True).p == 1
    assert compare(numbered(1, 2), numbered(2, 3), paired=True).p == 0
    weak, strong, sure = (
        compare(numbered(0, 0), numbered(*ends), paired=True) for ends in ((9, 11), (99, 101), (999, 1001))
    )
    assert [weak.p, strong.p, sure.p] == pytest.approx([6.35e-2, 6.37e-3, 6.37e-4], rel=0.01), "t = 10, 100, 1000"
    assert holm([strong, weak, sure]) == pytest.approx([2 * strong.p, weak.p, 3 * sure.p])
    assert holm([found, weak]) == pytest.approx([found.p, 2 * weak.p]) and holm([]) == []


def test_equal_outcomes_need_no_correction() -> None:
    """Two of five comparisons are the same test, as of policies with equal schedules; one compares equals, and one single replications."""
    outcomes = ((9, 11), (9, 11), (30, 31), (0, 0))
    results = [compare(numbered(0, 0), numbered(*ends), paired=True) for ends in outcomes]
    ends = 1.0, math.nan, math.nan
    results.append(Compared(ends, ends, 1, paired=True))
    other, same, less, equal, single = holm(results)
    assert less == pytest.approx(2 * results[2].p) and other == same == pytest.approx(results[0].p)
    assert equal == 1 and math.isnan(single)
    assert holm_text(results).startswith("1 of 4 differences are significant, 1 of them corrected for 2 tests (Holm; ")
    few = holm_text(results[2:])
    assert few.startswith("1 of 2 differences are significant, 1 of them corrected for 1 test (Holm; ")
    assert not holm_text(results[3:])


def test_pairs_take_out_what_replications_share() -> None:
    """Differences of 1, 2, 3, 2, 2: 2 on average, their deviation sqrt(1/2), among values that scatter by tens."""
    first, second = numbered(10, 20, 30, 40, 50), numbered(11, 22, 33, 42, 52)
    error = math.sqrt(0.5 / 5)
    found = compare(first, second, paired=True)
    assert found.difference == pytest.approx((2, 2 - T4 * error, 2 + T4 * error), rel=1e-4)
    assert found.ratio[0] == pytest.approx(160 / 150)
    assert found.significant
    assert (found.paired, found.number) == (True, 5)
    unpaired = compare(first, second, paired=False)  # variances of 250 and 260.5 around 30 and 32
    error, relative = math.sqrt(250 / 5 + 260.5 / 5), math.sqrt(250 / 5 / 30**2 + 260.5 / 5 / 32**2)
    assert unpaired.difference == pytest.approx((2, 2 - T4 * error, 2 + T4 * error), rel=1e-4)
    bounds = [32 / 30 * math.exp(sign * T4 * relative) for sign in (0, -1, 1)]
    assert unpaired.ratio == pytest.approx(bounds, rel=1e-4)


def test_ratio_of_values_that_are_proportional_is_exact() -> None:
    found = compare(numbered(1, 2, 5), numbered(1.5, 3, 7.5), paired=True)
    assert found.ratio == pytest.approx((1.5, 1.5, 1.5))


def test_only_common_replications_are_paired() -> None:
    assert compare({3: 1.0, 4: 2.0, 5: 9.0}, {4: 3.0, 5: 10.0, 6: 7.0}, paired=True).difference == pytest.approx(
        (1, 1, 1)
    )


def rows(label: str, values: Sequence[float], served: str = "w", others: str = "") -> pd.DataFrame:
    """Makes replications of one label, whose figure is `metric`."""
    summary = {"about": {**ABOUT, "number": 1}, "metric": 0.0}
    columns = dict.fromkeys(("label", "policy", "folder"), label)
    columns |= {"served": served, "others": [(("other", others),)] * len(values)}
    figures = {
        "replication": range(len(values)),
        "metric": values,
        "figures": values,
        "summary": [summary] * len(values),
    }
    return pd.DataFrame({**figures, **columns})


def compared(*things: pd.DataFrame, baseline: str = "") -> str:
    return report(pd.concat(things, ignore_index=True), ["metric"], baseline)


@pytest.mark.parametrize(
    ("key", "ratio", "num_eager", "remark", "error"),
    [
        ("tpot_seconds.p99", 1.058, 3, f"significant; below 9%{LAUNCHES}", 0.09),
        ("tpot_seconds.p99", 0.92, None, f"significant; below 9%{LAUNCHES}", 0.09),
        ("tpot_seconds.p99", 1.11, 3, "significant", 0.09),
        ("tpot_seconds.p99", 0.905, 3, "significant", 0.09),
        ("tpot_seconds.p99", 1.058, 0, "significant", 0.04),
        ("tpot_seconds.p99", 1.036, 0, "significant; below 4%", 0.04),
        ("tpot_seconds.p99", 1.058, -1, "significant", math.nan),
        ("clients.a.b.ttft_seconds.mean", 1.06, 0, "significant; below 7%", 0.07),
        ("run.seconds", 1.008, 0, "significant; below 1%", 0.01),
        ("throughput.requests_per_second", 1.02, 3, "significant", 0.01),
        ("run.iterations", 1.01, 0, "significant; no known error", math.nan),
        ("energy.joules_per_token", 1.01, 0, "significant; no known error", math.nan),
        ("sessions.job_seconds.mean", 1.012, 0, "significant; below 2%", 0.02),
        ("sessions.turn_seconds.p90", 1.05, 3, "significant", 0.02),
        ("sessions.job_seconds.geometric_mean", 1.01, 0, "significant; no known error", math.nan),
    ],
)
def test_a_significant_difference_below_the_error_of_simulation_says_so(
    key: str, ratio: float, num_eager: int | None, remark: str, error: float
) -> None:
    """As docs/hardware-profiles.md says: TPOT P99 from 9% on, the larger over the smaller, or from 4% if all iterations of both fit graphs.

    num_eager: of `b`, iterations without a graph; None: a run of an earlier version, which did not count them; -1: measured runs.
    """
    *_, name = groups = key.rpartition(".")
    both = []
    for label, factor, number in (("a", 1.0, 0), ("b", ratio, num_eager)):
        counted = {} if number is None else {"eager_iterations": number}
        execution = {"profile": "h200", "error": "", **OUTSIDE, **counted}
        about = {**ABOUT, "simulated": num_eager != -1, "execution": execution}
        values = {key: [factor * value for value in (20.0, 20.1, 19.9)]}
        summaries = [{"about": about, groups[0]: {name: 0.0}}] * 3
        both.append(rows(label, [20.0, 20.1, 19.9]).assign(summary=summaries, **values))
    text = report(pd.concat(both, ignore_index=True), [key])
    assert f"]  {remark}\n" in text and ("hardware-profiles.md" in text) == ("below" in remark)
    assert ("not compared with real runs" in text) == ("no known error" in remark)
    [row] = table_of(pairs_of(pd.concat(both, ignore_index=True), [key])).to_dict("records")
    assert row["ratio_error"] == pytest.approx(error, nan_ok=True)
    assert key != "tpot_seconds.p99" or (row["unit"], row["better"]) == ("s", "lower")


def test_the_errors_of_ratios_are_those_of_the_document() -> None:
    """The limits of runs with launches without a graph are in brackets, where they differ."""
    page = (ROOT / "docs" / "hardware-profiles.md").read_text().partition("### How small a difference counts")[2]
    lines = page.partition("**Where the numbers come from.**")[0].splitlines()
    stated = {
        cells[0]: cells[1:] for line in lines if len(cells := [cell.strip() for cell in line.split("|")[1:-1]]) == 5
    }

    def cell(key: str, profile: str) -> str:
        inside, other = (f"{ratio_error(key, in_graphs, [profile]):.0%}" for in_graphs in (True, False))
        return inside if inside == other else f"{inside} ({other})"

    names = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TPOT", "end_to_end": "end-to-end latency"}
    for profile, prefix in (("h200", ""), ("h200-vllm", "with a profile of vLLM: ")):
        for group, name in names.items():
            cells = [cell(f"{group}_seconds.{rank}", profile) for rank in ("mean", "p50", "p90", "p99")]
            assert cells == stated[prefix + name]
        both = {cell(key, profile) for key in ("run.seconds", "throughput.decode_tokens_per_second")}
        assert both == {stated[f"{prefix}throughput, makespan"][0]}
    for group, name in (
        ("busy", "session, without its pauses"),
        ("job", "session, without its pauses"),
        ("turn", "turn of a session"),
    ):
        assert [cell(f"sessions.{group}_seconds.{rank}", "h100") for rank in ("mean", "p50", "p90")] == stated[name][:3]


def test_no_error_is_known_of_a_ratio_of_two_profiles_or_of_figures_that_no_two_policies_were_measured_by() -> None:
    assert ratio_error("ttft_seconds.mean", True, {"h100", "h200"}) == 0
    assert ratio_error("sessions.busy_seconds.mean", True, {"h100-vllm"}) == 0
    assert ratio_error("energy.joules_per_token", True, {"h200"}) == 0


@pytest.mark.parametrize(
    ("effect", "needed"), [(2.0, 5), (1.0, 10), (0.8, 15), (0.5, 34), (0.2, 199), (0.001, 7_848_900)]
)
@pytest.mark.parametrize("seeds", [2, 10])
def test_how_many_replications_would_tell(effect: float, needed: int, seeds: int) -> None:
    """Pairs for a power of 80% by the noncentral t, as G*Power 3.1 gives them; they don't depend on how many have been run.

    The last: (1.959964 + 0.841621)^2 / 0.001^2, where t is normal.
    """
    apart = math.sqrt((seeds - 1) / seeds)  # a deviation of 1
    differences = numbered(*[effect - apart, effect + apart] * (seeds // 2))
    for sign in (1, -1):
        second = {key: sign * value for key, value in differences.items()}
        assert compare(dict.fromkeys(differences, 0.0), second, paired=True).needed == pytest.approx(needed, rel=1e-5)


def test_a_difference_that_is_not_significant_says_how_many_replications_would_tell() -> None:
    """Differences of 1 and -0.8 five times each: mean 0.1, deviation sqrt(0.9), 8.5 x 90 and two more."""
    text = compared(rows("a", [5.0] * 10), rows("b", [6.0, 4.2] * 5))
    assert "b over a: 10 replications, paired, on the same requests" in text
    assert "not significant; about 709 replications would show this difference (80%" in text


def test_equal_runs_of_several_seeds_are_one_replication() -> None:
    """A deterministic policy on a recorded trace: 100 and 150 with every seed; 1.5 times, and 50 more."""
    lines = compared(rows("a", [100.0] * 3), rows("b", [150.0] * 3)).splitlines()
    assert lines[0] == "b over a: 1 replication, on the same requests"
    assert lines[3].split() == ["metric", "1.5x", "+50"]
    assert lines[4].startswith("the seed changes nothing here: 1 replication, no interval; ")
    [row] = table_of(pairs_of(pd.concat([rows("a", [100.0] * 3), rows("b", [150.0] * 3)]), ["metric"])).to_dict(
        "records"
    )
    assert (row["difference"], row["replications"], row["apart"]) == (50, 1, False)
    assert np.isnan([row[key] for key in ("ratio_low", "difference_high", "p", "p_holm")]).all()
    text = compared(
        rows("a", [10.0, 10.0]), rows("b", [12.0, 14.0])
    )  # 2 and 4 more: 3, of which 12.706 errors are 12.706
    assert text.splitlines()[1].split() == ["figure", "better", "ratio", "difference", "remark"]
    assert "b over a: 2 replications, paired" in text and "+3 [-9.71, 15.7]" in text
    assert "the seed changes nothing" not in text


def test_a_line_says_which_interval_decides_where_the_two_disagree() -> None:
    """10 and 20 against 19 and 41: differences 9 and 21 reach below 0; as parts of the means they hardly scatter."""
    line = "where the intervals disagree"
    text = compared(rows("a", [10, 20]), rows("b", [19, 41]))
    assert "2x [1.309, 3.055]" in text and "not significant" in text and line in text
    text = compared(rows("a", [100, 101]), rows("b", [200, 202]))  # 94.1 to 106.9 above 0, and exactly 2
    assert line not in text and "]  significant" in text


def test_a_figure_that_some_replications_lack_states_how_many_have_it() -> None:
    """As a P99 of gaps where outputs are single tokens: 1 and 2 more in two of five pairs."""
    lacks = [math.nan] * 3
    both = [
        rows(label, values).assign(other=[*others, *lacks])
        for label, values, others in (("a", [1, 2, 3, 4, 5], (1, 2)), ("b", [2, 3, 4, 6, 7], (2, 4)))
    ]
    for part in both:
        part["summary"] = [{"about": {**ABOUT, "number": 1}, "metric": 0.0, "other": 0.0}] * 5
    for keys in (["metric", "other"], ["other", "metric"]):
        text = report(pd.concat(both, ignore_index=True), keys)
        assert "b over a: 5 replications, paired" in text
        assert [line.split()[0] for line in text.splitlines() if "2 replications have it" in line] == ["other"]


def test_other_requests_are_not_paired_and_equal_ones_are_said_to_be() -> None:
    text = compared(rows("a", [1.0, 2.0]), rows("b", [1.0, 2.0], served="v"))
    assert "NOT paired" in text and "equal in every replication" not in text
    assert "equal in every replication" in compared(rows("a", [1.0, 2.0]), rows("b", [1.0, 2.0]))


def test_what_cannot_be_compared() -> None:
    for things, said in (
        ([rows("a", [1, 2])], "compare: there is only a; add the folder of another run"),
        ([rows("a", [1]), rows("b", [1])], "run again with more seeds: experiments.run -m seeds=20"),
        ([rows("a", [1, 2]), rows("b", [math.nan, math.nan])], "b over a: no figure in common"),
    ):
        with pytest.raises(ConfigError, match=said):
            compared(*things)
    both = pd.concat([rows("a", [1, 2]), rows("b", [1, 2])])
    for key, said in (
        ("metrics", "did you mean metric"),
        ("goodput.attained_share", "this run has no goodput"),
        ("drafts.acceptance_length", "this run has no drafts"),
        ("run.recomputed_after_moves", "this run has no run.recomputed_after_moves;"),
        ("about.number", ""),
    ):
        with pytest.raises(ConfigError, match=f"^metric={key}: .*{said}"):
            report(both, [key])


def test_unlike_settings_of_two_policies_are_named() -> None:
    """Also where one seed gives no interval; where the settings are equal, the lines say so."""
    said, equal = "they differ beside the policy: other=2 over 1", "policies are compared at equal settings"
    for second in ("b(x=1)", "a(x=1)"):
        things = [rows(label, [1, 2], others=of).assign(**{"but z": 1}) for label, of in (("a", "1"), (second, "2"))]
        assert (said in compared(*things)) == (second[0] == "b") and equal not in compared(*things)
    assert equal in compared(things[0], rows("b", [1, 2], others="1"))
    with pytest.raises(ConfigError) as error:
        compared(rows("a", [1], others="1"), rows("b", [1], others="2"))
    assert one_line(error.value) == f"{error.value}; {said}"


def titles(*things: tuple[str, str, str], baseline: str = "") -> list[str]:
    """What is compared with what, and in pairs or not. things: label, requests that they served, other settings."""
    text = compared(*(rows(label, [1, 2], *others) for label, *others in things), baseline=baseline)
    return [
        line.replace(": 2 replications", "").partition(", on ")[0]
        for line in text.splitlines()
        if " over " in line.partition("differ")[0] or "not compared" in line
    ]


def test_the_baseline_is_the_first_of_the_same_settings() -> None:
    """Two policies at two rates, and a third at one; then one policy at two rates and batches; then nothing shared."""
    rates = [(f"{policy}@{rate}", rate, rate) for policy in "ab" for rate in "12"]
    assert titles(*rates, ("c@2", "2", "2")) == ["b@1 over a@1, paired", "b@2 over a@2, paired", "c@2 over a@2, paired"]
    assert titles(*rates, ("c@3", "3", "3"))[-1] == "not compared: nothing else has the settings of c@3"
    assert titles(*rates, baseline="b@2")[0] == "a@2 over b@2, paired"
    batches = [(f"{rate}/{batch}", rate, rate + batch) for rate in "12" for batch in "xy"]
    assert titles(*batches) == ["1/y over 1/x, paired", "2/y over 2/x, paired"]
    assert titles(*rates[:2]) == ["a@2 over a@1, NOT paired: they served different requests"]


def test_with_one_policy_each_setting_is_compared_at_equal_values_of_the_other(tmp_path: Path) -> None:
    """Evictions at equal sizes of host memory, and sizes with equal evictions: 6 tokens per second are those of the size."""
    for number, (eviction, size, seed) in enumerate(itertools.product(("lru", "lfu"), (0, 6), (0, 1))):
        settings = {"workload": {"seed": seed}, "kv": {"host_tokens": size}, "eviction": eviction}
        given = [f"eviction={eviction}", f"kv.host_tokens={size}"]
        about = {"policy": "a", "overrides": given, "number": number}
        write_run(tmp_path / f"{eviction} {size} {seed}", about, settings, speed=1.0 + size + seed)
    said = [line for line in printed(str(tmp_path), SPEED).splitlines() if " over " in line]
    evictions, sizes = said[:2], said[2:]
    assert all("lfu" in line and "lru" in line for line in evictions)
    assert [f"host_tokens={size}" in line for line, size in zip(evictions, (0, 6), strict=True)] == [True, True]
    assert len(sizes) == 2 and all(
        eviction in line and "=6" in line for line, eviction in zip(sizes, ("lru", "lfu"), strict=True)
    )
    assert re.findall(r"([+-]\d) \[", "\n".join(printed(str(tmp_path), SPEED).split(sizes[0])[1:])) == ["+6", "+6"]
    complaint = printed(str(tmp_path), SPEED, "baseline=lru 6")
    assert complaint.partition("or a label: ")[2].count("eviction=lru") == 2, "those that are known"


def test_layouts_are_one_setting_and_a_class_of_ones_own_is_no_further_one(tmp_path: Path) -> None:
    """Roles or not with each router: `backend.replicas` follows from the pools, and only runs with `Sticky` import `mine`.

    1 for the router and 10 for the pools: no comparison has both.
    """
    layouts = {"{p: 1, d: 1}": {"p": {"role": "prefill", "replicas": 1}, "d": {"role": "decode", "replicas": 1}}}
    layouts["{all: 3}"] = {"all": {"role": None, "replicas": 3}}
    for number, (pools, router, seed) in enumerate(itertools.product(layouts, ("rr", "mine.Sticky"), (0, 1))):
        backend = {"pools": layouts[pools], "router": router, "replicas": 3 if "all" in pools else 2}
        settings = {"workload": {"seed": seed}, "backend": backend}
        given = ["backend.pools=null", f"++backend.pools={pools}", f"backend.router={router}"]
        own = {"mine": "0"} if "mine" in router else {}
        about = {"policy": "a", "overrides": given, "number": number, "code": {"framework": "0", "own": own}}
        speed = 1.0 + 10 * ("all" in pools) + ("mine" in router)
        write_run(tmp_path / str(number), about, settings, speed=speed + seed)
    for baseline, sign in ((), "+"), (("baseline=pools=3 both",), "-"):
        text = printed(str(tmp_path), SPEED, *baseline)
        said = [line for line in text.splitlines() if " over " in line]
        assert [line.partition(": 2 replications, paired")[1] != "" for line in said] == [True] * 4
        assert re.findall(r"([+-]\d+) \[", text) == [f"{sign}10", f"{sign}10", "+1", "+1"]
        assert ["3 both" in line.partition(" over ")[2] for line in said[:2]] == [bool(baseline)] * 2


def printed(*arguments: str) -> str:
    ended = outcome(main, list(arguments))
    return ended.complaint or ended.printed


def test_searches_are_compared_by_their_replications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = [10.0, 20.0, 30.0], [12.0, 24.0, 36.0]
    for name, values, requests in (("one", two[0], 100), ("other", two[1], 100), ("more/few", two[1], 50)):
        found: dict[str, Any] = {
            "about": {**ABOUT, "policy": name, "identity": {"policy": name, "workload.length": 8}},
            "capacity": {"requests_per_second": 1.0, "requests": requests},
            "by_replication": values,
            "settings": {"workload": {"seed": 0, "length": 8}},
        }
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "capacity.json").write_text(json.dumps(found))
    with chdir(tmp_path):
        said = printed("one", "other")
        assert "other over one: 3 replications, paired" in said and "1.2x [1.2, 1.2]" in said
        assert "more/few over one: 3 replications, NOT paired" in printed("one", "more")
        assert printed("one", "nowhere").startswith("compare nowhere: no such folder")
        assert printed("no/where", "orca").startswith("compare no/where: no such folder")
        assert printed("one", "other", "chunk=2").startswith("compare: chunk=2 is for policies; folders take metric=")
        (cut := Path("more", "cut", "capacity.json")).parent.mkdir()
        cut.write_text(Path("one", "capacity.json").read_text()[:-9])
        assert printed("one", "more/cut") == f"{cut}: holds no finished search; run it again"
        assert main(["one", "more"]) == 0
        assert f"capacity.json is damaged; run it again\n  {cut}\n" in capsys.readouterr().err


def test_the_last_bits_of_figures_are_no_difference() -> None:
    """Sums of the same terms in another order: neither a difference nor an interval, in pairs or not."""
    first, second = numbered(0.3, 0.6, 0.9), numbered(0.1 + 0.2, 0.6, 0.9)
    for paired in (True, False):
        found = compare(first, second, paired)
        assert (found.ratio[0], found.difference[0], found.significant, disagree(found)) == (1.0, 0.0, False, False)
    assert compare(first, second, paired=True).difference == (0, 0, 0)


def write_sweep(folder: Path, policies: Sequence[str], rates: Sequence[int], seeds: Sequence[int] = (0, 1)) -> None:
    """Runs of hand-made throughput: 100 * rate + 10 * seed + the place of the policy."""
    runs = itertools.product(enumerate(policies), rates, seeds)
    for number, ((place, policy), rate, seed) in enumerate(runs):
        given = [f"policy={policy}", f"workload.rate={rate}", f"workload.seed={seed}"]
        about = {"policy": policy, "overrides": given, "number": number}
        settings = {"workload": {"rate": rate, "seed": seed}, "policy": {"_target_": f"policies.{policy}"}}
        write_run(folder / ",".join(given), about, settings, speed=100.0 * rate + 10 * seed + place)


SPEED = "metric=throughput.total_tokens_per_second"


def test_equal_settings_in_two_folders_are_two_things(tmp_path: Path) -> None:
    """As before and after an edit of the framework."""
    for name, seeds in (("before", (0, 1)), ("after", (0, 1))):
        write_sweep(tmp_path / name, ["a"], [1], seeds)
    with chdir(tmp_path):
        assert "a in after over a in before: 2 replications, paired" in printed("before", "after", SPEED)


def test_runs_measured_again_with_the_same_seed_are_replications(tmp_path: Path) -> None:
    for name, speed in (("a", 1.0), ("b", 1.0)):
        for again in range(3):
            about = {"policy": name, "overrides": ["seed=0"]}
            write_run(tmp_path / f"{name}{again}", about, {"workload": {"seed": 0}, "seed": 0}, speed=speed + again)
    write_sweep(tmp_path / "c", ["c"], [1])
    assert "b over a: 3 replications, paired" in printed(str(tmp_path), SPEED)


@pytest.mark.parametrize(
    ("given", "policies"),
    [
        (["vllm_v1", "orca"], ["vllm_v1", "orca"]),
        (["sarathi", "mine.Two(budget=256, short=8)"], ["sarathi", "Two(budget=256, short=8)"]),
        (["sarathi(chunking=fixed)", "orca"], ["sarathi(chunking=fixed)", "orca"]),
        (["mine.Two(budget=256,128)"], ["Two(budget=256)", "Two(budget=128)"]),
    ],
)
def test_policies_are_run_first_and_the_first_is_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], policies: list[str]
) -> None:
    """With arguments as in a sweep. Folders are in the order of their names, which is another one."""
    commands, settings = [], compose_run()

    def run_sweep(arguments: list[str], check: Callable[[Settings], object]) -> Path:
        check(settings)
        commands.append(arguments)
        write_sweep(folder := Path("multirun") / arguments[-1].partition("=")[2], policies, [1])
        return folder

    monkeypatch.setattr("experiments.compare.run_sweep", run_sweep)
    base, other = policies
    with chdir(tmp_path):
        said = printed(*given, "seeds=2", "workload=open_loop(arrivals.rate=4)", SPEED, "sweep=mine")
        name = base.partition("(")[0]
        for key, values in (
            ("metric", (f"baseline={name}", "metric=nothing")),
            ("metric", (f"baseline={base}", "metric=nothing")),
            ("baseline", ("baseline=nothing",)),
        ):
            assert printed(*given, *values).startswith(f"{key}=nothing: ") and len(commands) == 1, (
                "before the first run"
            )
    keys = [f"policy={','.join(given)}", "seeds=2", "workload=open_loop(arrivals.rate=4)", "sweep=mine"]
    assert commands[0] == keys, "as an interrupted comparison says to resume it"
    assert f"{other} over {base}: 2 replications, paired" in said
    assert "+1 [1, 1]" in said
    with chdir(tmp_path):
        assert main([*given, "--config-dir=conf", "~workload.load", "sweep=again"]) == 0
        assert printed("multirun", "~workload.load").startswith("compare: ~workload.load is for policies"), (
            "not a folder"
        )
    assert "~workload.load" in commands[-1], "Hydra removes the key"
    assert f"hydra.searchpath=['file://{tmp_path / 'conf'}']" in commands[-1]
