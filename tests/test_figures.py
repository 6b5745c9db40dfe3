"""Every figure of a run that was made by hand (`hand_made`), and each under its own name wherever it is shown."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made import end, make_record, make_summary, write_run

from cbatch import FinishReason, Request, RunRecord, StepRecord
from cbatch.results.metrics import Objectives, Served, arrival_of, collect_served, step_columns
from cbatch.results.summary import summarize
from experiments.plots import table
from experiments.store.tables import load, load_requests, load_steps, load_tokens, time_between_tokens
from experiments.store.text import (
    format_number,
    format_share,
    name_of,
    origin_of,
    outside_text,
    run_line,
    run_text,
    sweep_text,
)

RANKS = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = {  # of requests 0, 3 and 1 in the order of their ends; NaN: a single token has no time per further token
    "scheduling_delay": (1.0 - 0.25, 5.5 - 5.5, 3.25 - 1.5),
    "ttft": (3.0 - 0.25, 8.0 - 5.5, 11.0 - 1.5),
    "tpot": ((8 - 3) / 2, float("nan"), (12 - 11) / 1),
    "end_to_end": (8.0 - 0.25, 8.0 - 5.5, 12.0 - 1.5),
    "normalized_latency": (7.75 / 3, 2.5 / 1, 10.5 / 2),
}
SHARES = {  # a percentile of three values lies between the two upper ones: P90 at 0.8 of the way, P95 at 0.9, P99 at 0.98
    "scheduling_delay_seconds": (2.5 / 3, 0.75, 0.75 + 0.8, 0.75 + 0.9, 0.75 + 0.98),
    "ttft_seconds": (14.75 / 3, 2.75, 2.75 + 0.8 * 6.75, 2.75 + 0.9 * 6.75, 2.75 + 0.98 * 6.75),
    "tbt_seconds": ((2 + 3 + 1) / 3, 2, 2.8, 2.9, 2.98),
    "tpot_seconds": (1.75, 1.75, 1 + 0.9 * 1.5, 1 + 0.95 * 1.5, 1 + 0.99 * 1.5),
    "end_to_end_seconds": (20.75 / 3, 7.75, 7.75 + 0.8 * 2.75, 7.75 + 0.9 * 2.75, 7.75 + 0.98 * 2.75),
    "normalized_latency_seconds_per_token": (
        (7.75 / 3 + 2.5 + 5.25) / 3,
        *(7.75 / 3 + way * (5.25 - 7.75 / 3) for way in (0, 0.8, 0.9, 0.98)),
    ),
}
FIGURES: dict[str, dict[str, float]] = {  # measured from the first plan, at 1 s, to the last token, at 12 s
    "run": {
        "requests": 4,
        "rejected_requests": 1,
        "counted_requests": 3,
        "iterations": 5,
        "seconds": 12.75 - 1,
        "counted_seconds": 11,
        "preemptions": 1,
        "recomputed_tokens": 4,
        "overshoot_tokens": 6,
    },
    "throughput": {
        "total_tokens_per_second": (5 + 7 + 3 + 3 + 2 + 1) / 11,
        "prefill_tokens_per_second": (5 + 7 + 3) / 11,
        "decode_tokens_per_second": (3 + 2 + 1) / 11,
        "requests_per_second": 3 / 11,
    },
    "iterations": {
        "batch_requests": (1 + 2 + 2 + 1 + 1) / 5,
        "batch_occupancy": (1 + 2 + 2 + 1 + 1) / 5 / 4,
        "batch_tokens": (8 + 5 + 4 + 8 + 1) / 5,
        "padding_share": (3 + 1) / (8 + 5 + 4 + 8 + 1),
        "kv_use_mean": (2 + 5 + 6 + 3 + 3) / 5 / 20,
        "kv_use_peak": 6 / 20,
        "device_active_share": (1.75 + 1.5 + 2 + 2.5 + 0.5) / 11,
        # plans, then what it takes in; of the last iteration only after the last token, which is not measured
        "host_active_share": (0.25 + 0.25 + 0.5 + 0.25 + 0.25 + 0.25 + 0.5 + 0.25 + 0.25) / 11,
    },
    "goodput": {},
    **{name: dict(zip(RANKS, values, strict=True)) for name, values in SHARES.items()},
}


@pytest.fixture(scope="module")
def served() -> Served:
    return collect_served(make_record())


@pytest.mark.parametrize("name", LATENCIES)
def test_latencies_of_requests(name: str, served: Served) -> None:
    assert served.id.tolist() == [0, 3, 1]
    assert getattr(served, name).tolist() == pytest.approx(LATENCIES[name], nan_ok=True)


@pytest.mark.parametrize("group", FIGURES)
def test_figures_of_the_summary(group: str) -> None:
    assert make_summary(make_record())[group] == pytest.approx(FIGURES[group])


def test_nothing_is_left_out_unless_it_is_asked_for() -> None:
    summary = summarize(make_record(), num_blocks=20, max_batch=4)
    assert (summary["run"]["overshoot_tokens"], summary["run"]["counted_requests"]) == (0, 3)


def test_every_figure_of_the_summary_is_held_against_one_made_by_hand() -> None:
    assert set(make_summary(make_record())) == {"about", *FIGURES}


def test_tokens_of_a_request_that_is_rejected_later_count_nowhere() -> None:
    """Request 2 is admitted at 3.25 s, receives a token at 5 s, is preempted and then rejected."""
    record = make_record()
    record.receivers[1] = np.array([2, 0])
    record.requests[0].admitted_at = 3.25
    summary = make_summary(record)
    assert {group: summary[group] for group in FIGURES} == {
        group: pytest.approx(values) for group, values in FIGURES.items()
    }


def test_a_request_rejected_before_its_iteration_came_has_arrived_by_then() -> None:
    request = end(Request(4, 9, 9, arrival_iteration=9), None, 5.5, FinishReason.REJECTED)
    assert arrival_of(request, make_record().steps) == 5.5


def test_a_run_that_rejects_everything_has_no_latencies() -> None:
    record = make_record()
    record.requests, record.steps, record.receivers = record.requests[:1], [], []
    summary = make_summary(record, warmup_requests=1, objectives=Objectives(ttft=1.0))
    assert (summary["run"]["rejected_requests"], summary["run"]["seconds"]) == (1, 0.0)
    assert all(math.isnan(value) for value in (*summary["ttft_seconds"].values(), *summary["iterations"].values()))
    assert math.isnan(summary["goodput"]["attained_share"])


def test_time_per_output_token_of_tokens_within_a_second(served: Served) -> None:
    fast = replace(served, first_token=served.first_token / 16, last_token=served.last_token / 16)
    assert fast.tpot.tolist() == pytest.approx([value / 16 for value in LATENCIES["tpot"]], nan_ok=True)


@pytest.mark.parametrize(("first", "second"), [(70_000, 5_000), (65_536, 3), (3, -1)])
def test_tokens_belong_to_their_requests_whatever_the_ids(first: int, second: int) -> None:
    """Also ids that would be smaller, or larger, if only their lowest 16 bits counted."""
    record = RunRecord()
    record.requests = [end(Request(id_, 1, 2), 0.0, 3.0) for id_ in (first, second)]
    for index, receivers in enumerate(([first], [first, second], [second])):
        record.add_step(make_record().steps[index], np.array(receivers))
    served = collect_served(record)
    assert list(zip(served.first_token, served.last_token, strict=True)) == [(3, 5), (5, 8)]
    assert served.output_tokens.tolist() == [2, 2]


def test_tokens_of_a_request_stay_in_the_order_of_their_times() -> None:
    """Of two requests that receive one in each of a hundred iterations, a second apart."""
    record = RunRecord()
    record.requests = [end(Request(id_, 1, 100), 0.0, 100.0) for id_ in (0, 1)]
    for second in range(100):
        record.add_step(make_record().steps[0]._replace(received_at=second), np.array([1, 0]))
    assert set(collect_served(record).gaps()[0].tolist()) == {1.0}


def test_columns_of_iterations_are_all_but_the_note() -> None:
    columns = step_columns(make_record().steps)
    assert list(columns) == [name for name in StepRecord._fields if name != "note"]
    assert columns["num_running"].tolist() == [1, 2, 0, 1, 0]
    assert list(step_columns([])) == list(columns)


@pytest.mark.parametrize(
    ("objectives", "attained"),
    [
        (Objectives(ttft=2.75), 2),  # requests 0, exactly, and 3
        (Objectives(ttft=2.7), 1),
        (Objectives(tpot=1.0), 2),  # 1 and 3, whose single token cannot come late
        (Objectives(end_to_end=7.75), 2),  # 0 and 3
        (Objectives(ttft=9.5, tpot=1.0, end_to_end=10.5), 2),  # 1 and 3
        (Objectives(ttft=9.5, tpot=2.5, end_to_end=10.5), 3),
    ],
)
def test_goodput_counts_a_rejected_request_as_one_that_attained_nothing(objectives: Objectives, attained: int) -> None:
    found = make_summary(make_record(), objectives=objectives)["goodput"]
    assert found == {"requests_per_second": pytest.approx(attained / 11), "attained_share": attained / 4}


def test_goodput_leaves_out_a_request_rejected_during_warm_up() -> None:
    """The window begins when the first request, number 0, has ended, at 8 s: 3 ended with it, 2 was rejected before."""
    options: dict[str, Any] = {"warmup_requests": 1, "objectives": Objectives(ttft=9.5)}
    assert make_summary(make_record(), **options)["goodput"] == {"requests_per_second": 1 / 4, "attained_share": 1.0}


# -- the same figures in files and texts ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("by_hand") / "run")


def test_a_row_of_requests_csv_says_what_was_asked_and_what_came_of_it(folder: Path) -> None:
    with (folder / "requests.csv").open() as file:
        rows = {row["id"]: {key: value for key, value in row.items() if value} for row in csv.DictReader(file)}
    assert list(rows) == ["2", "0", "3", "1"]  # in the order of their ends
    asked = {
        "id": "1",
        "max_new_tokens": "2",
        "client": "ann",
        "tier": "gold",
        "priority": "0",
        "slo_ttft_seconds": "4.0",
    }
    times = {"arrival": "1.5", "admitted": "3.25", "first_token": "11.0", "last_token": "12.0"}
    outcome = {"prompt_tokens": "7", "output_tokens": "2", "finish_reason": "length", "preemptions": "1"}
    latencies = {"scheduling_delay": "1.75", "ttft": "9.5", "tpot": "1.0", "end_to_end": "10.5"}
    latencies = {f"{name}_seconds": value for name, value in latencies.items()}
    assert rows["1"] == {**asked, **times, **outcome, "recomputed_tokens": "4", **latencies}
    assert rows["0"]["priority"] == "7"
    single = {"arrival": "5.5", "finish_reason": "stop", "output_tokens": "1", "scheduling_delay_seconds": "0.0"}
    assert single.items() <= rows["3"].items() and "tpot_seconds" not in rows["3"]
    assert rows["2"] == {
        "id": "2",
        "max_new_tokens": "9",
        "priority": "0",
        "arrival": "2.0",
        "prompt_tokens": "9",
        "output_tokens": "0",
        "finish_reason": "rejected",
        "reject_reason": "too long",
        "preemptions": "0",
        "recomputed_tokens": "0",
    }


def test_the_tables_of_a_run_hold_its_record(folder: Path) -> None:
    steps, requests, tokens = load_steps(folder), load_requests(folder), load_tokens(folder)
    assert {name: steps[name].iloc[2] for name in steps} == pytest.approx(
        make_record().steps[2]._asdict() | {"note": steps["note"].iloc[2]}, nan_ok=True
    )
    assert requests["ttft_seconds"].dropna().to_list() == [2.75, 2.5, 9.5]
    assert list(zip(tokens["request_id"], tokens["time"], strict=True)) == [
        (0, 3),
        (0, 5),
        (0, 8),
        (1, 11),
        (1, 12),
        (3, 8),
    ]
    assert time_between_tokens(folder).to_list() == [2, 3, 1]


REPORT = """\
prefill_first on closed, llama-13b, async: measured on a computer

tokens/s    1.91, of them 1.36 prefill and 0.545 decode
requests/s  0.273: 3 served in 11.8 s, 1 rejected
goodput     0.182 requests/s, 50.0% attain the objectives
iterations  5 of 1.4 requests (35.0% of the batch) and 5.2 tokens (15.4% padding)
KV cache    19.0% used, at most 30.0%; 1 preemptions
active      device 75.0%, host 25.0%

                                 mean    p50    p90    p95    p99
-----------------------------  ------  -----  -----  -----  -----
time to first token [s]          4.92   2.75   8.15   8.82   9.37
scheduling delay [s]            0.833   0.75   1.55   1.65   1.73
time between tokens [ms]        2,000  2,000  2,800  2,900  2,980
time per output token [ms]      1,750  1,750  2,350  2,425  2,485
end to end [s]                   6.92   7.75   9.95   10.2   10.4
normalized latency [ms/token]   3,444  2,583  4,717  4,983  5,197"""


def cells(text: str) -> list[list[str]]:
    """The lines of a table, rules left out, as cells."""
    lines = [line for line in text.splitlines() if set(line) - set("|-: ")]
    return [[cell for cell in map(str.strip, line.replace("|", "  ").split("  ")) if cell] for line in lines]


def test_the_printed_report_shows_each_figure_under_its_name() -> None:
    assert run_text(make_summary(make_record(), objectives=Objectives(ttft=2.75))) == REPORT
    without = [line for line in REPORT.splitlines() if not line.startswith("goodput")]
    assert run_text(make_summary(make_record())).splitlines() == without


def test_the_line_of_a_run_in_a_sweep() -> None:
    simulated = {"simulated": True, "execution": {}}
    assert run_line("a", make_summary(make_record())) == "a: 1.91 tokens/s, TTFT p50 2.75 s (measured)"
    assert run_line("a", make_summary(make_record(), simulated)).endswith(" (simulated)")


def test_the_printed_table_of_a_sweep_shows_each_figure_under_its_name() -> None:
    summary = make_summary(make_record())
    head, first, second, origin = cells(sweep_text([("chunk=1,x=2,~ab", summary), ("chunk=2,x=2,~cd", summary)]))
    assert (first[0], second[0]) == ("chunk=1", "chunk=2")
    assert dict(zip(head[1:], first[1:], strict=True)) == {
        "tokens/s": "1.91",
        "requests/s": "0.273",
        "TTFT p50 [s]": "2.75",
        "TTFT p99 [s]": "9.37",
        "TBT p50 [ms]": "2,000",
        "TBT p99 [ms]": "2,980",
    }
    assert origin == ["measured on a computer"]
    assert cells(sweep_text([("chunk=1", summary)]))[1][0] == "chunk=1"


def test_the_table_of_a_plot_shows_each_figure_under_its_name(folder: Path) -> None:
    head, row, origin = cells(table.text(folder))
    assert dict(zip(head, row, strict=True)) == {
        "run": "prefill_first",
        "tokens/s": "1.91",
        "requests/s": "0.273",
        "TTFT p50 [s]": "2.75",
        "TTFT p99 [s]": "9.37",
        "TBT p50 [ms]": "2,000",
        "TBT p99 [ms]": "2,980",
        "end to end p50 [s]": "7.75",
        "end to end p99 [s]": "10.4",
        "batch [requests]": "1.4",
        "KV cache peak [%]": "30",
        "preemptions": "1",
        "device active [%]": "75",
    }
    assert origin == ["measured on a computer"]


def test_a_row_of_the_frame_has_every_setting_and_figure(folder: Path) -> None:
    [row] = load(folder).to_dict("records")
    expected = {f"{group}.{name}": value for group, values in FIGURES.items() for name, value in values.items()}
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert (row["name"], row["workload.length"], row["limits.batch"]) == ("prefill_first", 8, 4)
    assert row["folder"] == str(folder)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (float("nan"), "-"),
        (30960.4, "30,960"),
        (1000, "1,000"),
        (999.6, "1,000"),
        (4.756, "4.76"),
        (0.03841, "0.0384"),
        (-1234.5, "-1,234"),
    ],
)
def test_numbers_have_three_digits_or_all_before_the_point(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (float("nan"), "-"), (0.0384, "3.8%"), (1.0, "100.0%")])
def test_shares_are_percentages(value: float | None, text: str) -> None:
    assert format_share(value) == text


@pytest.mark.parametrize(
    ("policy", "chunking", "chunk", "name"),
    [
        ("orca", None, 256, "orca"),
        ("sarathi", "tile_aligned", 256, "sarathi 256"),
        ("sarathi", "fixed", 256, "sarathi 256, fixed"),
        ("sarathi", "pd_aware", None, "sarathi, pd_aware"),
    ],
)
def test_a_run_is_named_by_its_policy_and_chunk(policy: str, chunking: str | None, chunk: int, name: str) -> None:
    assert name_of({"policy": policy, "chunking": chunking, "chunk": chunk}) == name


def simulated(outside: int, others: tuple[str, ...] = ()) -> dict[str, Any]:
    execution = {"profile": "h200", "error": "5%", "not_measured": others, "iterations_outside_measured_range": outside}
    return {"simulated": True, "hardware": "NVIDIA H200", "execution": execution}


def test_a_simulated_result_says_with_which_profile_and_how_far_it_may_be_off() -> None:
    assert origin_of(simulated(0)) == "SIMULATED with profile h200 (error: 5%)"
    says = "SIMULATED with profile h200 (error: 5%; not measured: power (derived), host (fallback))"
    assert origin_of(simulated(0, ("power (derived)", "host (fallback)"))) == says
    summary = make_summary(make_record(), simulated(3))
    assert run_text(summary).splitlines()[0].endswith("(error: 5%); iterations outside the measured range: 3")


def test_iterations_outside_the_measured_range_are_summed_over_simulated_runs() -> None:
    measured = {"simulated": False}
    assert outside_text([simulated(0), measured]) == ""
    assert outside_text([simulated(3), measured]) == "iterations outside the measured range: 3"
    several = [simulated(3), simulated(0), simulated(4)]
    assert outside_text(several) == "iterations outside the measured range: 7, in 2 of 3 runs"
    origin, outside = sweep_text(
        [(name, make_summary(make_record(), about)) for name, about in zip("abc", several, strict=True)]
    ).splitlines()[-2:]
    assert origin.startswith("SIMULATED") and outside.endswith(": 7, in 2 of 3 runs")
