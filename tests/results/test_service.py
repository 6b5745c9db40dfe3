"""Service of clients, attainment of requests' objectives, and the longest gap, of requests made by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hand_made import end, make_record, make_summary
from hypothesis import given, settings
from hypothesis import strategies as st
from places import published

from cbatch import SLO, FinishReason, Request, RunRecord
from cbatch.results.attainment import attainment, goodput, stated_objectives
from cbatch.results.metrics import Window, collect_served
from cbatch.results.service import Service, fairness, max_min_shares, measure_windows, service_of
from experiments.api import simulate
from experiments.report.run_text import run_text
from experiments.workloads.readers.table import parse_table, read_text

ALWAYS = Window(-math.inf, math.inf)
Row = tuple[str, float, float, float, int, int]


def service(*rows: Row) -> Service:
    """Rows of client, arrival, first and last token, prompt and output tokens."""
    return Service(*(np.array(column) for column in zip(*rows, strict=True)))


# -- service ----------------------------------------------------------------------------------------------------------

TWO = service(("ann", 0.0, 10.0, 20.0, 4, 3), ("bob", 5.0, 15.0, 15.0, 6, 1), ("ann", 8.0, 16.0, 36.0, 10, 5))
"""Services of 4 + 2 * 3 = 10 over 10 s, 6 + 2 = 8 at once, and 10 + 2 * 5 = 20 over 20 s."""


def test_service_comes_evenly_from_the_first_token_to_the_last() -> None:
    times = np.array([9.0, 12.0, 15.0, 18.0, 40.0])
    ann, bob = TWO.received(times).T.tolist()
    assert TWO.clients == ["ann", "bob"]
    assert ann == pytest.approx([0, 2, 5, 8 + 2, 10 + 20])
    assert bob == [0, 0, 8, 8, 8]
    assert TWO.requested(np.array([0.0, 4.9, 5.0, 8.0])).tolist() == [[10, 0], [10, 0], [10, 8], [30, 8]]
    assert service(("ann", 0.0, 1.0, 1.5, 1, 1)).received(np.array([1.25])).tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("bob", "mean", "least"),
    [
        # both in windows that begin before 50 s, at 3 to 48: index 1; bob alone from 51, 54 and 57: 1, as ann waits for nothing
        (("bob", 0.0, 59.0, 59.0, 60, 0), 1.0, 1.0),
        # ann alone in the windows 3 to 63, 6 to 66 and 9 to 69: her share is 30 of 60, x = (2, 0), index 1/2
        (("bob", 0.0, 70.0, 70.0, 60, 0), (3 * 0.5 + 16) / 19, 0.5),
    ],
)
def test_the_index_of_a_window_in_which_one_client_gets_all(bob: Row, mean: float, least: float) -> None:
    """Ann and bob wait for 60 from the start, and receive all at 50 s, and at 59 or 70 s.

    The last arrival, at 90 s, makes the middles 33, 36, ... 87 s: windows from 3 to 63 s, 6 to 66 s, ... 57 to 117 s.
    """
    found = fairness(service(("ann", 0.0, 50.0, 50.0, 60, 0), bob, ("bob", 90.0, 200.0, 200.0, 0, 0)))
    assert found["jain_index"] == {"mean": pytest.approx(mean), "min": pytest.approx(least)}


def test_windows_in_which_nothing_is_received_have_no_index() -> None:
    """Ann's 60 come at once at 10 s, in windows that begin before: 3, 6 and 9 s; the other 16 windows count as nothing."""
    found = fairness(service(("ann", 0.0, 10.0, 10.0, 60, 0), ("bob", 90.0, 200.0, 200.0, 60, 0)))
    assert found["jain_index"] == {"mean": pytest.approx(1.0), "min": pytest.approx(1.0)}


@pytest.mark.parametrize(("policy", "most", "mean"), [("fcfs", 759.97, 433.53), ("vtc", 368.40, 251.66)])
def test_differences_that_the_paper_prints_from_its_measurements(policy: str, most: float, mean: float) -> None:
    """VTC, table 2, the rows FCFS and VTC."""
    times = ("arrival_s", f"{policy}_ttft_s", f"{policy}_latency_s")
    path = published("vtc_real_27clients.csv.gz")
    table = parse_table(path, read_text(path))
    arrival, first, last = (table.amounts(name) for name in times)
    tokens = table.whole_numbers("prompt_tokens"), table.whole_numbers("output_tokens")
    clients = np.array(table.column("client"))
    found = fairness(Service(clients, arrival, arrival + first, arrival + last, *tokens))
    assert {key: round(value, 2) for key, value in found["service_difference"].items()} == {"max": most, "mean": mean}


@pytest.mark.parametrize(
    ("weights", "difference", "shares"),
    [
        (
            {},
            3 + 1 / 60,
            (539 / 2, 539 / 2, 61),
        ),  # bob receives 3 per second less than ann, and cat 1 less than it asks for
        ({"bob": 2.0}, 430 / 2 / 60 + 1 / 60, (539 / 3, 2 * 539 / 3, 61)),  # bob lacks 430, over 2: less than 6 - 3 / 2
    ],
)
def test_windows_of_three_clients_by_hand(
    weights: dict[str, float], difference: float, shares: tuple[float, ...]
) -> None:
    """For 630 s ann receives 6 per second, bob 3 and cat 1. Each second ann and bob ask for 10, and cat for 1.

    Both ends of a window count: 61 times as much is asked for as in a second. Cat waits for 61, the others share the rest.
    """
    longest = {"ann": (10 / 6, 0, 5), "bob": (10 / 3, 0, 5), "cat": (1.0, 1, 0)}
    asks = [(name, float(second)) for second in range(631) for name in longest]
    rows = [(name, at, at * longest[name][0], (at + 1) * longest[name][0], *longest[name][1:]) for name, at in asks]
    figures = fairness(replace(service(*rows), weights=weights))
    ratio = np.array([360, 180, 60]) / shares
    jain = ratio.sum() ** 2 / (3 * (ratio**2).sum())
    assert figures["service_difference"] == {"max": pytest.approx(difference), "mean": pytest.approx(difference)}
    assert figures["jain_index"] == {"mean": pytest.approx(jain), "min": pytest.approx(jain)}
    assert figures["clients"] == {"ann": 6310.0, "bob": 6310.0, "cat": 631.0}, "the service itself has no weight"


def test_windows_of_another_length() -> None:
    """The last arrival is at 8 s: 19 windows of 4 s around 2.3 to 7.7 s, before any request is served."""
    windows = measure_windows(TWO, 4.0)
    assert windows.middle.tolist() == pytest.approx([2 + 0.3 * tick for tick in range(1, 20)])
    assert not windows.difference.any() and np.isnan(windows.jain).all()
    assert measure_windows(TWO, 8.1).middle.tolist() == []


def test_without_windows_or_served_requests_there_are_totals_alone() -> None:
    found = fairness(TWO)
    assert found["clients"] == {"ann": 30.0, "bob": 8.0}
    for name, figures in {"service_difference": ["max", "mean"], "jain_index": ["mean", "min"]}.items():
        assert list(found[name]) == figures and all(math.isnan(value) for value in found[name].values())
    rejected = end(Request(0, 1, 1, client="ann"), None, 5.0, FinishReason.REJECTED)
    none = service_of([rejected], collect_served(RunRecord()))
    assert none is not None and fairness(none)["clients"] == {}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 3])), min_size=1, max_size=6), st.integers(0, 60))
def test_max_min_shares_are_those_of_giving_one_at_a_time(clients: list[tuple[int, int]], total: int) -> None:
    """Gives units of 1/60, one at a time, to the client with the least per weight among those that want more."""
    wanted, weight = [wanted for wanted, _ in clients], [weight for _, weight in clients]
    total = min(total, sum(wanted))
    given_out = [0] * len(wanted)
    for _ in range(60 * total):
        least = min((given_out[i] / weight[i], i) for i in range(len(wanted)) if given_out[i] < 60 * wanted[i])[1]
        given_out[least] += 1
    units = max(weight) * len(weight) / sum(weight)  # that a client may be off by: 1 if all weights are equal
    found = max_min_shares(float(total), np.array(wanted, np.float64), np.array(weight, np.float64))
    assert found.tolist() == pytest.approx([given / 60 for given in given_out], abs=units / 60)
    assert found.sum() == pytest.approx(total)


# -- attainment -------------------------------------------------------------------------------------------------------


def asked_of(record: RunRecord, **objectives: tuple[str | None, SLO]) -> list[Request]:
    """The requests of the run made by hand, with other objectives: (tier, SLO) by r and id; r9 has not ended with the run."""
    asked = []
    for old in [*record.requests, Request(9, 1, 1)]:
        tier, slo = objectives.get(f"r{old.id}", (None, SLO()))
        request = Request(old.id, old.num_prompt_tokens, old.max_new_tokens, tier=tier, slo=slo)
        if old.finished_at is not None:
            end(request, old.admitted_at, old.finished_at, old.finish_reason or FinishReason.LENGTH)
        asked.append(request)
    return asked


def shares(window: Window = ALWAYS, **objectives: tuple[str | None, SLO]) -> dict[str, Any]:
    record = make_record()
    return attainment(asked_of(record, **objectives), collect_served(record), window)


# request   first token   longest gap   last token   after its arrival, in seconds
#    0          2.75           3            7.75
#    1          9.5            1           10.5
#    3          2.5            -            2.5
# request 2 is rejected


WHOLE, LAX = SLO(ttft=2.75, tbt=3.0, total=7.75), SLO(ttft=100.0)


@pytest.mark.parametrize(
    ("objectives", "expected"),  # requests, share, and the shares by time to first token, longest gap and latency
    [
        ({"r0": WHOLE}, (1, 1, 1, 1, 1)),
        ({"r0": replace(WHOLE, ttft=2.74)}, (1, 0, 0, 1, 1)),
        ({"r0": replace(WHOLE, tbt=2.99)}, (1, 0, 1, 0, 1)),
        ({"r0": replace(WHOLE, total=7.74)}, (1, 0, 1, 1, 0)),
        ({"r0": SLO(ttft=9.0, tbt=2.0), "r1": SLO(ttft=9.0, tbt=2.0)}, (2, 0, 0.5, 0.5, None)),  # met by halves
        ({"r0": SLO(ttft=2.0), "r1": SLO(tbt=2.0)}, (2, 0.5, 0, 1, None)),  # each has one of the two
        ({"r3": SLO(tbt=0.001)}, (1, 1, None, 1, None)),  # a single token has no gap to miss
        (dict.fromkeys(("r0", "r1", "r2", "r3", "r9"), LAX), (5, 3 / 5, 3 / 5, None, None)),
    ],
)
def test_a_request_attains_its_objectives_together(objectives: dict[str, SLO], expected: tuple[float, ...]) -> None:
    found = shares(**{name: (None, slo) for name, slo in objectives.items()})
    names = ("requests", "share", "ttft_share", "tbt_share", "total_share")
    assert tuple(found.get(name) for name in names) == expected and found["tiers"] == {}


def test_a_tier_has_shares_of_its_own_objectives_alone() -> None:
    assert shares() == {}
    tiers = shares(r0=("gold", LAX), r2=("gold", LAX), r9=("rest", LAX), r1=("rest", SLO(tbt=2.0)))["tiers"]
    assert tiers == {
        "gold": {"requests": 2, "share": 0.5, "ttft_share": 0.5},
        "rest": {"requests": 2, "share": 0.5, "ttft_share": 0.0, "tbt_share": 1.0},
    }


NEVER = dict.fromkeys(("r1", "r2", "r3"), SLO(ttft=0.1))


@pytest.mark.parametrize(
    ("run", "own", "share"),
    [
        # only the requests' own objectives: of 0, which misses its own, 1, 2 (rejected) and 9 (has not ended)
        ({}, {"r0": SLO(ttft=2.7), "r1": SLO(ttft=9.5, total=11.0), "r2": LAX, "r9": SLO(total=100.0)}, 1 / 4),
        ({}, {"r0": SLO(tbt=2.9)}, 0),  # its longest gap takes 3 s
        # those of the run hold for requests without any of their own: 3 attains them, 0 and 1 are late
        ({"ttft": 2.6}, {}, 1 / 5),
        ({"ttft": 2.6}, {"r1": SLO(total=10.5)}, 2 / 5),
        ({"ttft": 2.6}, {"r3": SLO(ttft=2.4)}, 0),
        ({"tpot": 5.0 / 2}, NEVER, 1 / 5),  # request 0: from 2.75 to 7.75 after its arrival, 3 tokens
        ({"tpot": 5.0 / 2 - 0.01}, NEVER, 0),
        ({"ttft": 2.75}, {}, 2 / 5),  # 0, exactly, and 3
        ({"tpot": 1.0}, {}, 2 / 5),  # 1 and 3, whose single token cannot come late
        ({"total": 7.75}, {}, 2 / 5),  # 0 and 3
        ({"ttft": 9.5, "tpot": 1.0, "total": 10.5}, {}, 2 / 5),  # 1 and 3
        ({"ttft": 9.5, "tpot": 2.5, "total": 10.5}, {}, 3 / 5),
    ],
)
def test_goodput_counts_objectives_as_attainment_does(run: dict[str, float], own: dict[str, SLO], share: float) -> None:
    """Over 4 seconds."""
    record = make_record()
    asked = asked_of(record, **{name: (None, slo) for name, slo in own.items()})
    found = goodput(asked, collect_served(record), ALWAYS, SLO(**run), 4.0)
    assert found["attained_share"] == share
    if not run:
        assert found["requests_per_second"] == share * len(own) / 4
        assert shares(**{name: (None, slo) for name, slo in own.items()})["share"] == share
    assert goodput(asked_of(record), collect_served(record), ALWAYS, SLO(), 4.0) == {}


@pytest.mark.long
def test_the_line_on_goodput_says_how_many_requests_have_no_objective() -> None:
    """A default objective is of all of them."""
    gold = {"gold": {"share": 0.3, "slo": {"ttft": 0.5}}, "rest": {"share": 0.7}}
    some = simulate("orca", "open_loop", num_requests=40, rate=30, tiers=gold)
    every = simulate("orca", "open_loop", num_requests=40, rate=30, metrics={"objectives": {"ttft": 0.5}})
    assert (without := some.requests["slo_ttft_seconds"].isna().sum()) == 30
    of_some, of_every = (next(line for line in str(of).splitlines() if "goodput " in line) for of in (some, every))
    assert of_some.endswith(f" attain TTFT 0.5 s; {without} of 40 requests have no objective")
    assert of_every.endswith(" attain TTFT 0.5 s")


def test_objectives_are_named_where_all_requests_share_them() -> None:
    """Each tier has its own; requests without objectives have those of the run, or do not count."""
    fast, slow, run = SLO(ttft=0.5, tbt=0.05), SLO(total=20.0), SLO(ttft=2.0, tpot=0.1)
    gold = asked_of(make_record(), r0=("gold", fast), r1=("gold", fast))
    assert stated_objectives(gold, SLO()) == dict.fromkeys(("", "gold"), "TTFT 0.5 s, every gap 0.05 s")
    assert stated_objectives(gold, run) == {"gold": "TTFT 0.5 s, every gap 0.05 s"}
    both = asked_of(make_record(), r0=("gold", fast), r1=("free", slow), r2=("free", fast))
    assert stated_objectives(both, SLO()) == {"gold": "TTFT 0.5 s, every gap 0.05 s"}
    assert stated_objectives(asked_of(make_record()), run) == {"": "TTFT 2 s, TPOT 0.1 s"}
    assert stated_objectives(asked_of(make_record()), SLO()) == {}


def test_requests_count_by_when_they_ended() -> None:
    """Request 2 is rejected at 5.5 s, 0 and 3 end at 8 s, 1 at 12 s, 9 never."""
    lax, never = {f"r{id_}": (None, LAX) for id_ in (0, 1, 2, 3, 9)}, math.inf
    windows = ((-never, 5.0), (-never, 5.5), (5.5, 8.0), (8.0, 12.0), (8.0, never))
    assert [shares(Window(*window), **lax)["requests"] for window in windows] == [0, 1, 2, 1, 2]
    assert math.isnan(shares(Window(-never, 5.0), **lax)["share"])


# -- in the summary ---------------------------------------------------------------------------------------------------


def test_the_summary_has_them_where_the_requests_do() -> None:
    """Request 1, of client ann and tier gold, misses its TTFT of 4 s; the others have neither."""
    summary = make_summary(make_record())
    assert summary["attainment"]["tiers"] == {"gold": {"requests": 1, "share": 0.0, "ttft_share": 0.0}}
    assert summary["attainment"]["clients"] == {"ann": summary["attainment"]["tiers"]["gold"]}
    waits = {name: (of["ttft_seconds"]["mean"], of["tpot_seconds"]["mean"]) for name, of in summary["clients"].items()}
    assert waits == {"ann": (9.5, 1 / 1), "no client": ((2.75 + 2.5) / 2, (7.75 - 2.75) / 2)}
    later = make_summary(make_record(), drain_requests=1)["clients"]
    assert (later["ann"]["counted_requests"], later["no client"]["counted_requests"]) == (0, 2)
    assert summary["service"]["clients"] == {"ann": 7 + 2 * 2, "no client": (5 + 2 * 3) + (3 + 2 * 1)}
    assert "service " not in run_text(summary), "its arrivals span less than a window"
    record = make_record()
    record.requests = [request for request in record.requests if request.id != 1]
    without = make_summary(record)
    assert without["attainment"] == without["service"] == {} and "clients" not in without
    assert "SLOs" not in run_text(without)


def test_many_clients_have_no_figures_of_their_own() -> None:
    for number, shown in ((100, 100), (101, 0)):
        asked = [Request(id_, 1, 1, client=f"c{id_}", slo=SLO(ttft=1.0)) for id_ in range(number)]
        record = RunRecord()
        record.requests = [end(request, None, 1.0, FinishReason.REJECTED) for request in asked]
        assert len(attainment(asked, collect_served(record), ALWAYS).get("clients", {})) == shown
