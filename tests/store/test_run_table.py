"""The table of a sweep: each figure under its name, means with intervals, and notes that plots and comparisons share."""

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from hand_made import ABOUT, make_record, make_summary, write_run
from test_figures_shown import simulated

from cbatch import SLO
from experiments import plot
from experiments.compare import report
from experiments.plots import curves, latency_cdf
from experiments.report.headings import COLUMNS, MORE_COLUMNS
from experiments.report.intervals import few_text, mean_of
from experiments.settings.overrides import with_seeds
from experiments.store.replications import read_replications
from experiments.store.runs import ONE_REPLICATION, Omitted, frame_of, run_table

SHOWN = {
    "tokens/s": "1.79",
    "requests/s": "0.255",
    "goodput [requests/s]": "0.17",
    "attained [%]": "50",
    "gold attained [%]": "0",
    "TTFT P50 [s]": "2.75",
    "TTFT P99 [s]": "9.37",
    "TBT P50 [ms]": "2,000",
    "TBT P99 [ms]": "2,980",
    "client ann: attained [%]": "0",
    "client ann: TTFT P99 [s]": "9.5",
    "no client: TTFT P99 [s]": "2.75",
    "client ann: TPOT P99 [ms]": "1,000",
    "no client: TPOT P99 [ms]": "2,500",
    "preemptions": "1",
    "recomputed [%]": "18.2",
}
"""What the tables of a sweep and of a plot print of the run made by hand."""


def runs(*summaries: dict[str, Any]) -> pd.DataFrame:
    """Makes a frame; runs of one policy differ in the seed."""
    for seed, each in enumerate(summaries):
        each["about"]["identity"] = {"policy": each["about"]["policy"], "seed": seed}
    return frame_of((Path(f"{seed}"), each) for seed, each in enumerate(summaries))


def summary(policy: str = "a", slo: SLO | None = None, **figures: dict[str, Any]) -> dict[str, Any]:
    """Makes a summary. figures: by group, in place of the run's own."""
    record = make_record() if slo is None else make_record(slo=slo)
    made = make_summary(record, {"policy": policy}, objectives=SLO(ttft=2.75) if slo is None else SLO())
    return {**made, **{group: {**made.get(group, {}), **values} for group, values in figures.items()}}


def cells(text: str) -> list[list[str]]:
    """Returns the lines of a table, rules left out, as cells."""
    lines = [line for line in text.splitlines() if set(line) - set("|-: ")]
    return [[cell for cell in map(str.strip, line.replace("|", "  ").split("  ")) if cell] for line in lines]


def test_rows_that_differ_in_no_shown_figure_are_named_as_such() -> None:
    """a and b differ in a figure that the table lacks, d in the fourth digit of one that it has; c is a, and e differs in a shown figure."""
    rows = [
        summary("a", throughput={"requests_per_second": 2.0}),
        summary("b", iterations={"kv_use_mean": 0.01007}, throughput={"requests_per_second": 2.0}),
        summary("c", throughput={"requests_per_second": 2.0}),
        summary("d", throughput={"requests_per_second": 2.001}),
        summary("e", throughput={"requests_per_second": 2.1}),
    ]
    notes = run_table(runs(*rows)).splitlines()
    assert notes[7:9] == ["equal in every figure: a = c", "equal in every figure shown: a = b = d"]


def test_each_figure_stands_under_its_name() -> None:
    head, first, second, *notes = cells(run_table(runs(summary(), summary("b")), [Omitted("x", "a reason")]))
    assert [first[0], second[0]] == ["a", "b"] and dict(zip(head[1:], first[1:], strict=True)) == SHOWN
    few = "a P99 of 3 requests is nearly the maximum; serve more requests"
    assert notes == [
        ["equal in every figure: a = b"],
        [few],
        ["1 run not shown: a reason"],
        ["x"],
        ["measured on a computer"],
    ]
    head, row, _ = cells(run_table(runs(summary("a", SLO()), summary("b")))[:-1])[:3]
    assert dict(zip(head, row, strict=True))["gold attained [%]"] == "-", "the first run has no objectives"
    regret = {"latency": 1.5, "makespan": 1.25, "violations": 3}
    head, row, _ = cells(run_table(runs(summary(regret=regret))))[:3]
    columns = ("latency / bound", "makespan / bound", "violations over bound")
    assert [dict(zip(head, row, strict=True))[name] for name in columns] == ["1.5", "1.25", "3"]


def test_runs_with_transfers_show_the_longest_gap() -> None:
    """It has the wait at a decoder. Tables that have the column anyway get no second one."""
    gaps, sent = {"p99": 2.5}, {"number": 3}
    table = runs(summary(transfers=sent, longest_gap_seconds=gaps), summary("b", longest_gap_seconds=gaps))
    head, first, *_ = cells(run_table(table))
    assert dict(zip(head, first, strict=False))["longest gap P99 [ms]"] == "2,500"
    assert "longest gap" not in run_table(table[1:].dropna(axis="columns", how="all"))
    assert run_table(table, columns=[*COLUMNS, *MORE_COLUMNS]).count("longest gap P99") == 1


@pytest.mark.parametrize("number", [6, 7])
def test_a_table_shows_the_latencies_of_up_to_8_clients(number: int) -> None:
    """Two of the 8 are ann and no client."""
    latencies = {"ttft_seconds": {"p99": 2.0}, "tpot_seconds": {"p99": 0.02}}
    clients = {f"a.{name}": latencies for name in range(number)}
    head, row, *_ = cells(run_table(runs(summary(clients=clients), summary("b"))))
    named = {name: value for name, value in zip(head, row, strict=True) if name.startswith("client a.0: ")}
    assert named == ({"client a.0: TTFT P99 [s]": "2", "client a.0: TPOT P99 [ms]": "20"} if number == 6 else {})


def test_a_row_says_in_how_many_of_its_runs_the_server_was_overloaded_or_times_were_extrapolated() -> None:
    """Two runs of a, of which one waits with 9 requests where 4 may run, and one of b, extrapolated; of all runs the notes say it."""
    waiting, outside = (9, 0, 0), (0, 0, 3)
    rows = [summary("a"), summary("a"), summary("b")]
    for row, number, extrapolated in zip(rows, waiting, outside, strict=True):
        row["about"] |= {**simulated(extrapolated, compared={"batches": []}), "mean_waiting": number}
    table = runs(*rows)
    head, first, second, *_ = cells(run_table(table))
    assert head[-2:] == ["overload [runs]", "extrapolated [runs]"]
    assert (first[-2:], second[-2:]) == (["1 of 2", "0 of 2"], ["0 of 1", "1 of 1"])
    assert "[runs]" not in run_table(table[:1]) + run_table(table[1:2])


def test_figures_that_are_0_in_all_rows_stand_below_the_table() -> None:
    """In one of several rows, in a single row and in Markdown they are columns; a run without a prefix cache has no share of it."""
    none = {"run": {"preemptions": 0, "recomputed_share": 0.0}}
    rows = [summary("a", prefix_cache={"hit_share": 0.0}, **none), summary("b", **none)]
    lines = run_table(runs(*rows)).splitlines()
    assert "preemptions" not in lines[0] and "TTFT P50 [s]" in lines[0]
    assert lines[4] == "0 in all rows: found in cache [%], preemptions, recomputed [%]"
    sent = [summary(policy, transfers={"hidden_share": 0.0}) for policy in "ab"]
    assert "0 in all rows: share of transfers hidden by prefills" in run_table(runs(*sent))
    for shown in (runs(*rows[:1]), runs(*rows, summary("c"))):
        assert "preemptions" in run_table(shown).splitlines()[0]
    assert "preemptions" in run_table(runs(*rows), tablefmt="github")


def test_the_interval_of_a_share_ends_at_100() -> None:
    """Two seeds of 90 and 100%: 95 ± 12.7 * 5; 50 and 51%: 50.5 ± 12.7 * 0.5."""
    shares = [("a", 0.9), ("b", 0.5), ("a", 1.0), ("b", 0.51)]
    lines = run_table(runs(*(summary(policy, goodput={"attained_share": share}) for policy, share in shares)))
    head, first, second, note, *_ = cells(lines)
    place = head.index("attained [%]")
    assert (first[place], second[place]) == ("95 [31.5, 100]", "50.5 ± 6.4")
    assert note[0].startswith("mean ± half of the 95% interval (of shares near 0 or 100%: [its ends, cut there]) over")


def test_runs_of_one_label_are_a_mean_with_its_interval() -> None:
    """Two runs of 1 and 3 requests/s: 2 ± 12.7 * 1; the others of equal figures. Three requests count."""
    rates = [
        summary(policy, throughput={"requests_per_second": rate})
        for policy, rate in (("a", 1.0), ("b", 7.0), ("a", 3.0))
    ]
    lines = run_table(runs(*rates)).splitlines()
    assert [row[:3] for row in cells("\n".join(lines[2:4]))] == [["a", "1.79", "2 ± 13"], ["b", "1.79", "7"]]
    assert lines[4].startswith("mean ± half of the 95% interval over 2 runs")
    assert lines[5].startswith("with 2 runs a 95% interval reaches 12.7 standard errors to each side, 6.5 times as far")
    assert [bool(few_text(numbers)) for numbers in ([9, 4], [5, 5], [1])] == [True, False, False], (
        "t of 4: 3.18, of 5: 2.78"
    )
    assert lines[6] == "a P99 of 3 requests is nearly the maximum; serve more requests"
    of = {number: [summary("a", run={"counted_requests": number}) for _ in range(2)] for number in (999, 1000)}
    unreliable = "P99s over requests are unreliable: only 999 requests; serve 1,000 or more"
    assert unreliable in run_table(runs(*of[999])).splitlines() and "P99s" not in run_table(runs(*of[1000]))
    assert unreliable in run_table(runs(of[999][0])).splitlines(), "a single run's P99 is no better"


def test_runs_that_the_seed_does_not_change_have_no_interval() -> None:
    """One row of equal runs; then beside one whose runs differ."""
    equal = [summary("a"), summary("a")]
    text = run_table(runs(*equal))
    assert ONE_REPLICATION in text and "95% interval" not in text and "±" not in text
    both = run_table(runs(*equal, summary("b"), summary("b", run={"preemptions": 3})))
    assert "mean ± half of the 95% interval over 2 runs" in both and f"{ONE_REPLICATION}; so in 1 of 2 rows" in both


def test_the_last_bits_of_figures_make_no_interval() -> None:
    """0.1 + 0.2 in 2 of 5 seeds, 0.3 in the others: the same figure, summed in another order."""
    sums = [summary("a", throughput={"requests_per_second": rate}) for rate in (0.3, 0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2)]
    text = run_table(runs(*sums))
    assert ONE_REPLICATION in text and "95% interval" not in text and "±" not in text
    assert mean_of([1e6, 1e6 + 2e-10, 1e6]).half == 0 and mean_of([1.0, 1.0 + 1e-6]).half > 0


def test_figures_of_fewer_runs_than_the_row_are_named() -> None:
    """A third seed's outputs are single tokens, which have no gaps."""
    gaps = [summary("a", tbt_seconds={"p50": gap}) for gap in (0.1, 0.2, math.nan)]
    text = run_table(runs(*gaps))
    assert "runs that have the figure, where some lack it: a: TBT P50 [ms] 2\n" in text
    assert "where some lack it" not in run_table(runs(*gaps[:2]))


def test_rows_of_fewer_runs_than_others_are_named() -> None:
    """As a sweep leaves them that is resumed with more seeds for one policy."""
    rates = [("a", 1.0), ("a", 2.0), ("a", 3.0), ("b", 1.0), ("b", 2.0), ("c", 1.0)]
    text = run_table(runs(*(summary(policy, throughput={"requests_per_second": rate}) for policy, rate in rates)))
    assert "mean ± half of the 95% interval over 3 runs (fewer: b: 2; c: 1); percentiles" in text


def test_the_table_of_a_plot_has_more_columns_and_its_file_an_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy, commit in (("orca", "aaa"), ("vtc", "bbb")):
        write_run(tmp_path / policy, {"policy": policy, "commit": commit, "date": "2026-01-02T03:04:05+0000"})
    text = plot.table(tmp_path)[0]
    turned = cells(text[: text.index("\n\n")])  # two runs are columns, and their figures lines that fit a terminal
    assert [len(line) for line in turned] == [3] * len(turned) and max(map(len, text.splitlines()[:9])) < 80
    head, row, _ = zip(*turned, strict=True)
    more = ["4", "12.5", "2,000", "2,980", "7.75", "10.4", "1.4", "30", "70.2"]
    assert dict(zip(head, row, strict=True)).items() >= SHOWN.items() and [*row[-len(more) :]] == more
    monkeypatch.setattr("sys.argv", ["plot", "table", "multirun/x"])
    assert plot.main(["table", str(tmp_path)]) == 0
    *_, line = (tmp_path / "plots" / "table.md").read_text().splitlines()
    assert line == "`python -m experiments.plot table multirun/x`; runs of 2026-01-02, commit aaa, bbb; numpy 2"


@pytest.mark.long
def test_tables_plots_and_comparisons_have_the_same_notes(tmp_path: Path) -> None:
    """Two policies at two rates with two seeds: those of one policy with 3 iterations outside the measured range."""
    for (policy, outside), rate, seed in product((("a", 3), ("b", 0)), (1, 2), (0, 1)):
        execution = {"profile": "h200", "error": "error: 5%", "iterations_outside_measured_range": outside}
        code = {"framework": "c", "own": {"mine": policy}}
        about = {**ABOUT, "policy": policy, "simulated": True, "execution": execution, "code": code}
        settings = {"workload": {"arrivals": {"rate": rate}, "seed": seed}, "seed": seed}
        write_run(tmp_path / f"{policy},{rate},{seed}", about, settings, speed=float(seed))
    notes = [
        "SIMULATED with profile h200 (error: 5%)",
        "iterations outside the measured range: 12, in 4 of 8 runs; their times are extrapolated",
        "made by different versions of mine; see about.code in summary.json",
    ]
    tail = "a P99 of 3 requests is nearly the maximum"
    *_, last, first, second, third = plot.table(tmp_path)[0].splitlines()
    assert [first, second, third] == notes and last.startswith(tail)
    comparison = report(read_replications([tmp_path])).splitlines()
    assert comparison[-3:] == notes and comparison[-4].startswith(tail)
    for figure in (curves.latency_vs_rate(tmp_path), curves.attainment(tmp_path), latency_cdf.draw(tmp_path)):
        assert figure.get_label().splitlines()[:3] == notes
    assert tail in curves.latency_vs_rate(tmp_path).get_supxlabel()
    assert tail not in curves.latency_vs_rate(tmp_path, percentiles=(50,)).get_supxlabel()


def test_seeds_are_a_sweep() -> None:
    assert with_seeds(["policy=orca", "seeds=3"]) == ["-m", "policy=orca", "seed=0,1,2"]
    assert with_seeds(["-m", "seeds=2", "seed=7"]) == ["-m", "seed=7,8"]
    assert with_seeds(["seed=7"]) == ["seed=7"]


def test_runs_are_columns_in_a_terminal_if_that_is_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = runs(summary("a"), summary("b"))
    assert run_table(pair).split()[:2] == ["run", "tokens/s"]
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: True))
    assert run_table(pair).split()[:3] == ["run", "a", "b"]
