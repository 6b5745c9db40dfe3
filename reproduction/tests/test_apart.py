"""Prefill and decode on two GPUs: the table in the documentation is of the stored runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cbatch import Request
from cbatch.record import RunRecord, StepRecord, Transfer
from cbatch.sim import load_profile
from cbatch.sim.profile import Card
from cbatch.sim.roofline import Affine
from reproduction.validation import handover, transfer
from reproduction.validation.apart import (
    AT_SPEED,
    cards_of,
    differences,
    elsewhere,
    figures,
    routed,
    simulate,
    simulated_server,
    table,
)
from reproduction.validation.transfer import parts

ROOT = Path(__file__).parents[2]


def test_the_tables_in_the_documentation_are_of_the_stored_runs() -> None:
    names = ("apart-repeated", "apart-both", "handover", "transfer")
    repeated, both, *others = (
        json.loads((ROOT / f"reproduction/results/h200-x2/{name}.json").read_text())["runs"] for name in names
    )
    page = (ROOT / "docs/cluster-results.md").read_text()
    assert all(table(runs, name) in page for runs in (repeated, both) for name in ("simulated", AT_SPEED))
    pulled = json.loads((ROOT / "reproduction/results/h200-x2/apart-pull.json").read_text())["runs"]
    assert table(pulled, "simulated") in page and table([run for run in pulled if AT_SPEED in run], AT_SPEED) in page
    one_card = json.loads((ROOT / "reproduction/results/h200/handover.json").read_text())["runs"]
    assert handover.way(one_card) in page
    assert differences(repeated) in page and handover.table(others[0]) in page and transfer.table(others[1]) in page


def test_a_run_is_simulated_at_the_speed_that_the_cards_had_in_others() -> None:
    """Prompts 1.2 and 1.4 times as long with seeds 1 and 2, in the same cell alone; a cell with one seed tells nothing."""
    cell = {"workload": "azure_conv_lengths", "rate": 36, "layout": "both"}
    slow = lambda prompts: [{"name": "a card", "prompts": prompts, "decodes": 1.0}]  # noqa: E731
    runs: list[dict[str, Any]] = [
        {**cell, "seed": seed, "cards": slow(prompts)} for seed, prompts in ((0, 9.0), (1, 1.2), (2, 1.4))
    ]
    runs.append({**cell, "rate": 24, "seed": 1, "cards": slow(5.0)})
    assert elsewhere(runs[0], runs) == [Card("a card", pytest.approx(1.3), 1.0)]  # type: ignore[arg-type]
    assert not elsewhere(runs[-1], runs)


def test_sends_do_not_count_as_the_speed_of_their_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations with prompts took 2 s where 1 was predicted, 0.5 s of it for sends of 2 and 3 bytes at 0.1 s each; the other card sent nothing."""
    errors = {"with prompts": {"seconds": 2.0, "total": -0.5}}
    monkeypatch.setattr("reproduction.validation.compare.iteration_errors", lambda run, profile: errors)
    sent: Any = [SimpleNamespace(sender=0, num_bytes=number) for number in (2, 3)]
    unused: Any = object()
    cards = cards_of([[unused], [unused]], sent, load_profile("h200"), Affine(0.0, 0.1))
    assert [card.prompts for card in cards] == [1.5, 2.0]


def test_a_cell_has_the_means_of_its_runs_and_the_error_of_the_mean() -> None:
    """Two runs of 40 and 60% (mean 50, half an interval 12.706 x 10, cut at 0 and 100), simulated as 44 and 66%: 10% too many, by a constant factor."""
    figures = {"relaxed": 1.0, "ttft_seconds mean": 0.1, "tpot_seconds mean": 0.005}
    cell = {"workload": "azure_conv_lengths", "rate": 36, "layout": "both"}
    runs = [
        {
            **cell,
            "seed": seed,
            "measured": {**figures, "strict": share},
            "simulated": {**figures, "strict": 1.1 * share},
        }
        for seed, share in enumerate((0.4, 0.6))
    ]
    row = table(runs, "simulated").splitlines()[2].split("|")
    for layout in ("both", "pull"):
        assert differences([{**run, "layout": layout} for run in runs]).count("\n") == 2, "no layout to compare"
    assert [text.strip() for text in row[4:9]] == [
        "2",
        "50 [0, 100]",
        "+10.0 [+10.0, +10.0]",
        "100",
        "+0.0 [+0.0, +0.0]",
    ]


def test_layouts_are_compared_on_the_same_requests() -> None:
    """Apart loses 30 and 50 points to both: -40 with an interval of 12.706 x 10 on either side; a single run has none."""
    shares = {("both", 0): 0.9, ("both", 1): 0.8, ("pull", 0): 0.6, ("pull", 1): 0.3}
    runs: list[dict[str, Any]] = [
        {
            "workload": "azure_conv_lengths",
            "rate": 36,
            "seed": seed,
            "layout": layout,
            "measured": {"strict": share, "relaxed": share},
        }
        for (layout, seed), share in shares.items()
    ]
    runs = [{**run, "simulated": run["measured"]} for run in runs]
    [first, second] = differences(runs).splitlines()[2:]
    assert first.split("|")[5].strip() == "-40.0 [-167.1, +87.1]" and "relaxed" in second
    one = differences([run for run in runs if run["seed"] == 0])
    assert one.splitlines()[2].split("|")[6].strip() == "-30.0"
    again = [{**run, "simulated": {**run["measured"], "steady": run["measured"]["strict"]}} for run in runs]
    _, steady, _ = differences(again).splitlines()[2:]
    assert [text.strip() for text in steady.split("|")[4:7]] == ["steady", "", "-40.0 [-167.1, +87.1]"], (
        "not judged as they were served"
    )


def test_a_transfer_is_the_hosts_until_its_copy_has_been_launched() -> None:
    """1 ms of 2 passes until the copy is asked for, and 0.5 until it is launched; the decoder took it half a millisecond after the first token."""
    sent = Transfer(7, 0, 1, 1920, 1000, 1.0, 1.002)
    found = parts([sent], {7: 0.9995}, [(1.001, 1.0015)])
    assert {name: round(value, 6) for name, (value,) in found.items()} == {
        "first token to turn": 0.5, "pull": 2.0, "reserved in": 1.0, "launched in": 0.5, "then copied in": 0.5, "host's share": 75.0
    }  # fmt: skip


def test_the_parts_of_the_time_to_a_second_token_are_those_of_the_decoders_first_iteration() -> None:
    """Token 1 at 1 s; planned at 1.5, launched at 1.75, computed from 2.75 to 4.75, received at 5 s. Token 3 comes at 9 s."""
    served: Any = RunRecord()
    request = Request(7, 200, 3, arrival_time=0.25)
    served.requests, served.transfers = [request], [Transfer(7, 0, 1, 128, 2**24, 1.5, 2.5)]
    times = (0, 0, 0, 1, 1, 0, 1), (1.5, 1.75, 2, 5, 5, 2.75, 4.75), (5, 6, 6, 9, 9, 6, 8)
    for index, (replica, each) in enumerate(zip((0, 1, 1), times, strict=True)):
        served.add_step(StepRecord(index, *each, 1, 1, 0, 0, 1, 0, 1, 0, 1, note=""), np.array([7]))
        served.replicas.append(replica)
    found = handover._figures(served)
    assert [found[name] for name in handover.WAY] == [500, 250, 1000, 2000, 250]
    assert (found["first to second token"], found["second to third token"]) == (4000, 4000)
    run = {"prompts": "200", "chunk": 512, "layout": "pull", "measured": found, "simulated": found}
    assert "| 200, 512, pull" in (shown := handover.way([run])) and "500.00 (500.00)" in shown
    assert handover.way([{**run, "measured": {}}]).count("\n") == 2, "an older run"


def test_requests_are_compared_with_their_simulation_until_one_is_elsewhere() -> None:
    """Requests 0 and 2 on one replica, 1 and 3 on the other; 3 is simulated elsewhere. TTFTs of 100, 210 and 200 ms before it, simulated 100 each."""
    cell = {"workload": "azure_code_lengths", "rate": 18, "seed": 2, "layout": "both"}
    times = {0: (0.0, 0.1), 1: (0.01, 0.22), 2: (0.3, 0.5), 3: (0.4, 0.9)}  # arrival and first token as served
    runs: Any = [
        SimpleNamespace(
            settings={**cell, "replica": replica, "ids": ids},
            columns={
                "request.arrival": np.array([1e6 * times[id_][0] for id_ in ids]),
                "request.first_token": np.array([1e6 * (times[id_][1] - times[ids[0]][0]) for id_ in ids]),
            },
        )
        for replica, ids in enumerate(([0, 2], [1, 3]))
    ]
    requests = [SimpleNamespace(id=id_, arrival_time=at, token_times=[at + 0.1]) for id_, (at, _) in times.items()]
    record: Any = SimpleNamespace(replica_of={0: 0, 1: 1, 2: 0, 3: 0}, requests=requests)
    assert routed(cell, runs, record) == "; 3 simulated where served; TTFT of the first 3 170.0 (100.0) ms"
    assert not routed({**cell, "seed": 3}, runs, record)


def test_a_prefiller_and_a_decoder_are_simulated_in_their_own_time() -> None:
    """Two prompts of 256 tokens, of which both blocks are sent; the second time alike."""
    server = simulated_server(load_profile("h200"), [Card()] * 2)
    keys = "workload=closed workload.num_requests=2 workload.length=260 workload.pd_ratio=64"
    first, again = (simulate(server, keys, "pull") for _ in range(2))
    assert first.transfers == again.transfers and [sent.num_tokens for sent in first.transfers] == [256, 256]
    size = 256 * 2 * 32 * 8 * 128 * 2
    first.transfers = [
        sent._replace(ended=sent.started + taken) for sent, taken in zip(first.transfers, (0.0, 0.5), strict=True)
    ]
    found = figures(first)
    assert (found["transfers"], found["GB"], found["GB/s"]) == (2, 2 * size / 1e9, size / 0.5 / 1e9), (
        "one was hidden whole"
    )
