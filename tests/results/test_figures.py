"""Every figure of a run that was made by hand (`hand_made`), and each under its own name wherever it is shown."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hand_made import end, make_record, make_summary

from cbatch import SLO, Request, RunRecord, StepRecord
from cbatch.results.metrics import Served, collect_served, step_columns
from cbatch.results.summary import summarize

RANKS = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = {  # of requests 0, 3 and 1 in the order of their ends; NaN: a single token has no time per further token
    "scheduling_delay": (1.0 - 0.25, 5.5 - 5.5, 3.25 - 1.5),
    "ttft": (3.0 - 0.25, 8.0 - 5.5, 11.0 - 1.5),
    "longest_gap": (8.0 - 5.0, float("nan"), 12.0 - 11.0),
    "tpot": ((8 - 3) / 2, float("nan"), (12 - 11) / 1),
    "end_to_end": (8.0 - 0.25, 8.0 - 5.5, 12.0 - 1.5),
    "normalized_latency": (7.75 / 3, 2.5 / 1, 10.5 / 2),
}
SHARES = {  # a percentile of three values lies between the two upper ones: P90 at 0.8 of the way, P95 at 0.9, P99 at 0.98
    "scheduling_delay_seconds": (2.5 / 3, 0.75, 0.75 + 0.8, 0.75 + 0.9, 0.75 + 0.98),
    "ttft_seconds": (14.75 / 3, 2.75, 2.75 + 0.8 * 6.75, 2.75 + 0.9 * 6.75, 2.75 + 0.98 * 6.75),
    "tbt_seconds": ((2 + 3 + 1) / 3, 2, 2.8, 2.9, 2.98),
    "longest_gap_seconds": (2, 2, 1 + 0.9 * 2, 1 + 0.95 * 2, 1 + 0.99 * 2),
    "tpot_seconds": (1.75, 1.75, 1 + 0.9 * 1.5, 1 + 0.95 * 1.5, 1 + 0.99 * 1.5),
    "end_to_end_seconds": (20.75 / 3, 7.75, 7.75 + 0.8 * 2.75, 7.75 + 0.9 * 2.75, 7.75 + 0.98 * 2.75),
    "normalized_latency_seconds_per_token": (
        (7.75 / 3 + 2.5 + 5.25) / 3,
        *(7.75 / 3 + way * (5.25 - 7.75 / 3) for way in (0, 0.8, 0.9, 0.98)),
    ),
}
FIGURES: dict[str, dict[str, float]] = {  # measured from the first arrival, at 0.25 s, to the last token, at 12 s
    "run": {
        "requests": 4,
        "rejected_requests": 1,
        "counted_requests": 3,
        "iterations": 5,
        "seconds": 12.75 - 0.25,
        "counted_seconds": 11.75,
        "preemptions": 1,
        "recomputed_tokens": 4,
        "recomputed_share": 4 / (5 + 5 + 3 + 7 + 1 + 1),  # of prompt and decode tokens, padding left out
        "offered_requests_per_second": 3 / (5.5 - 0.25),  # also the one that is rejected, at 2 s
        "overshoot_tokens": 6,
    },
    "throughput": {
        "total_tokens_per_second": (5 + 7 + 3 + 3 + 2 + 1) / 11.75,
        "prefill_tokens_per_second": (5 + 7 + 3) / 11.75,
        "decode_tokens_per_second": (3 + 2 + 1) / 11.75,
        "requests_per_second": 3 / 11.75,
    },
    "iterations": {
        "batch_requests": (1 + 2 + 2 + 1 + 1) / 5,
        "batch_occupancy": (1 + 2 + 2 + 1 + 1) / 5 / 4,
        "batch_tokens": (8 + 5 + 4 + 8 + 1) / 5,
        "padding_share": (3 + 1) / (8 + 5 + 4 + 8 + 1),
        "kv_use_mean": (2 + 5 + 6 + 3 + 3) / 5 / 20,
        "kv_use_peak": 6 / 20,
        "device_active_share": (1.75 + 1.5 + 2 + 2.5 + 0.5) / 11.75,
        # plans, then what it takes in; of the last iteration only after the last token, which is not measured
        "host_active_share": (0.25 + 0.25 + 0.5 + 0.25 + 0.25 + 0.25 + 0.5 + 0.25 + 0.25) / 11.75,
    },
    "goodput": {"requests_per_second": 0.0, "attained_share": 0.0},  # request 1 alone has an objective, and misses it
    **{name: dict(zip(RANKS, values, strict=True)) for name, values in SHARES.items()},
}


@pytest.fixture(scope="module")
def served() -> Served:
    return collect_served(make_record())


def test_the_idle_tail_is_of_requests_that_are_queued_at_once() -> None:
    """Two ran together in iteration 1, and two ran or waited until its end at 5 s."""
    record = make_record()
    assert "tail_share" not in make_summary(record)["run"]
    for request in record.requests:
        request.arrive(0.25)
    assert make_summary(record)["run"]["tail_share"] == pytest.approx((12 - 5) / 11.75)


@pytest.mark.parametrize("name", LATENCIES)
def test_latencies_of_requests(name: str, served: Served) -> None:
    assert served.id.tolist() == [0, 3, 1]
    assert getattr(served, name).tolist() == pytest.approx(LATENCIES[name], nan_ok=True)


@pytest.mark.parametrize("group", FIGURES)
def test_figures_of_the_summary(group: str) -> None:
    assert make_summary(make_record())[group] == pytest.approx(FIGURES[group])


def test_every_figure_of_the_summary_is_held_against_one_made_by_hand() -> None:
    assert set(make_summary(make_record())) == {"about", *FIGURES, "attainment", "clients", "service"}, (
        "those three: test_service.py"
    )
    summary = summarize(make_record(), num_blocks=20, max_batch=4)
    assert (summary["run"]["overshoot_tokens"], summary["run"]["counted_requests"]) == (0, 3)


def test_the_price_of_a_run_and_of_a_million_tokens() -> None:
    """3 requests with 15 prompt and 6 output tokens in 11.75 s. 5 dollars per hour are 120 a day (the asynchronous batching post)."""
    cost, paid = make_summary(make_record(), prices=[5.0])["cost"], 5.0 * 11.75 / 3600
    per_million = {"tokens": 21, "prompt_tokens": 15, "output_tokens": 6}
    prices = {f"dollars_per_million_{name}": paid / (number / 1e6) for name, number in per_million.items()}
    assert cost == pytest.approx({"dollars_per_hour": 5.0, "dollars": paid, "dollars_per_request": paid / 3, **prices})
    day = make_summary(make_record(), prices=[5.0 * 86_400 / 11.75])["cost"]
    assert day["dollars"] == pytest.approx(120)
    nothing = make_record()
    nothing.requests, nothing.steps, nothing.receivers = [], [], []
    assert math.isnan(make_summary(nothing, prices=[5.0])["cost"]["dollars_per_million_tokens"])


def test_tokens_of_a_request_that_is_rejected_later_count_nowhere() -> None:
    """Request 2 is admitted at 3.25 s, receives a token at 5 s, is preempted and then rejected."""
    record = make_record()
    record.receivers[1] = np.array([2, 0])
    record.requests[0].admitted_at = 3.25
    summary = make_summary(record)
    assert {group: summary[group] for group in FIGURES} == {
        group: pytest.approx(values) for group, values in FIGURES.items()
    }


def test_a_run_that_rejects_everything_has_no_latencies() -> None:
    record = make_record()
    record.requests, record.steps, record.receivers = record.requests[:1], [], []
    summary = make_summary(record, warmup_requests=1, objectives=SLO(ttft=1.0))
    assert (summary["run"]["rejected_requests"], summary["run"]["seconds"]) == (1, 0.0)
    assert all(math.isnan(value) for value in (*summary["ttft_seconds"].values(), *summary["iterations"].values()))
    assert summary["goodput"]["attained_share"] == 0.0


def test_time_per_output_token_of_tokens_within_a_second(served: Served) -> None:
    fast = replace(served, first_token=served.first_token / 16, last_token=served.last_token / 16)
    assert fast.tpot.tolist() == pytest.approx([value / 16 for value in LATENCIES["tpot"]], nan_ok=True)


@pytest.mark.parametrize(("first", "second"), [(70_000, 5_000), (65_536, 3), (65_539, 3), (3, -1)])
def test_tokens_belong_to_their_requests_whatever_the_ids(first: int, second: int) -> None:
    """Also ids that would be smaller, equal or larger, if only their lowest 16 bits counted."""
    record = RunRecord()
    record.requests = [end(Request(id_, 1, 2), 0.0, 3.0) for id_ in (first, second)]
    for index, receivers in enumerate(([first], [first, second], [second])):
        record.add_step(make_record().steps[index], np.array(receivers))
    served = collect_served(record)
    assert list(zip(served.first_token, served.last_token, strict=True)) == [(3, 5), (5, 8)]
    assert served.output_tokens.tolist() == [2, 2]


def test_columns_of_iterations_are_all_but_the_note() -> None:
    columns = step_columns(make_record().steps)
    assert list(columns) == [name for name in StepRecord._fields if name != "note"]
    assert columns["num_running"].tolist() == [1, 2, 0, 1, 0]
    assert list(step_columns([])) == list(columns)


def test_goodput_leaves_out_a_request_rejected_during_warm_up() -> None:
    """The window begins when the first request, number 0, has ended, at 8 s: 3 ended with it, 2 was rejected before."""
    options: dict[str, Any] = {"warmup_requests": 1, "objectives": SLO(ttft=9.5)}
    found = make_summary(make_record(slo=SLO()), **options)["goodput"]
    assert found == {"requests_per_second": 1 / 4, "attained_share": 1.0}
