"""Figures about the published policies: small cases computed by hand, and runs that are kept as they end."""

from itertools import product
from pathlib import Path
from random import Random
from shutil import copytree, ignore_patterns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from places import RESULTS

from cbatch import CostFunction, Limits, Request, Server
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from experiments.settings.compose import compose_run
from policies.chunking import Fixed, Slack
from reproduction.papers import gallery
from reproduction.papers.figures.landscape import mc_sf, past_future, sarathi_serve, served, vtc
from reproduction.papers.jobs import crossing


def test_a_crossing_lies_between_two_rates() -> None:
    assert crossing([1, 2, 3], [0.0, 0.5, 1.0], 0.75) == 2.5
    assert crossing([1, 2, 3], [0.0, 0.8, 0.1], 0.4) == 1.5, "the first one"
    assert np.isnan(crossing([1, 2], [0.9, 1.0], 0.5)) and np.isnan(crossing([1, 2], [0.1, 0.2], 0.5))


def test_the_optimum_is_the_least_of_all_start_times() -> None:
    """By counting the memory of every combination round by round, apart from the search."""
    for seed in range(12):
        asked = list(mc_sf.draw_instance(Random(seed), 3))[:3]
        horizon = max(a for a, _, _ in asked) + sum(o for _, _, o in asked)
        best = min(
            sum(start + o - a for start, (a, _, o) in zip(starts, asked, strict=True))
            for starts in product(*(range(a, horizon - o + 1) for a, _, o in asked))
            if all(
                sum(p + t - start for start, (_, p, o) in zip(starts, asked, strict=True) if start < t <= start + o)
                <= 10
                for t in range(1, horizon + 1)
            )
        )
        assert mc_sf.optimum(asked) == best <= mc_sf.latency(asked, "shortest")


def test_a_row_of_past_futures_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the table's lengths and memory: aggressive evicts, conservative reserves 410 + 307 of 717 tokens a request."""
    for name, value in (("MEMORY", 12_000), ("LIMIT", 410), ("LENGTHS", {"D3": ((205, 410), (3, 410))})):
        monkeypatch.setattr(past_future, name, value)
    conservative, aggressive = (past_future.run("D3", rule, 60) for rule in ("conservative", "aggressive"))
    assert conservative["evicted"] == 0 < aggressive["evicted"]
    assert conservative["peak"] == pytest.approx(61.66, abs=4) and aggressive["peak"] == pytest.approx(100.38, abs=4)
    assert conservative["steps"] > 1.3 * aggressive["steps"]
    row = pd.DataFrame(
        [{"lengths": "D3", "admission": "optimum", "steps": 1020, "use": 96.0, "peak": 98.0, "evicted": 0.0}]
    )
    asked = {"lengths": "D3", "admission": "optimum"}
    assert past_future.row_error(row, **asked, steps=1000, use=95.5, peak=98, evicted=0) == pytest.approx(2.0)
    assert past_future.row_error(row, **asked, steps=1020, use=97.5, peak=98, evicted=0) == 1.5
    assert past_future.row_error(row, **asked, steps=1020, use=96, peak=98, evicted=2) == 2.0


def test_a_limit_per_client_and_minute_counts_the_last_minute() -> None:
    times = [0.0, 1.0, 2.0, 59.0, 60.5, 61.5, 70.0]
    requests = [Request(i, 1, 1, arrival_time=time, client="a") for i, time in enumerate(times)]
    kept = vtc.limited([*requests, Request(9, 1, 1, arrival_time=2.5, client="b")], 2)
    assert [request.id for request in kept] == [0, 1, 4, 5, 9], "at 60.5 s the one of 0 s no longer counts"


def test_the_spread_of_waiting_clients() -> None:
    """Prompts of 10; a waits throughout, b from the second iteration on. Service: a prompt 10, a token 2."""
    requests = [Request(0, 10, 5, client="a"), Request(1, 10, 5, client="b")]
    spread = vtc.Spread(requests)
    policy: Any = SimpleNamespace(counters={"a": 3.0, "b": 10.0})
    record = SimpleNamespace(receivers=[])
    engine: Any = SimpleNamespace(record=record, view=SimpleNamespace(waiting=requests[:1]))
    record.receivers.append(np.array([0]))
    spread.note(policy, engine)  # a 12, b 0
    assert (spread.widest, spread.ahead) == (0.0, {"pair": 0.0, "any": 0.0})
    engine.view.waiting = requests
    for receivers in ([1], [1, 1], [0]):  # a 12, 12, 14; b 12, 16, 16
        record.receivers.append(np.array(receivers))
        spread.note(policy, engine)
        spread.note(policy, engine)  # an idle turn adds nothing
    assert spread.widest == 7.0
    assert spread.ahead == {"pair": 4.0, "any": 16.0}


@pytest.mark.parametrize("study", served.STUDIES)
def test_the_settings_of_every_run_are_composed_and_make_its_policy(study: str) -> None:
    policies = {}
    for series in served.STUDIES[study].runs:
        config = compose_run(*served.overrides(study, 0.5, series, "folder"))
        policies[series] = config.policy()
        assert config.workload.arrivals.rate == served.STUDIES[study].capacity / 2
    if study == "TRAIL":
        assert [policies[series].predictor.mae for series in ("c = 0.8", "SRPT", "SJF, MAE 400")] == [33.9, 33.9, 400.0]
    if study == "QoServe":
        assert type(policies["EDF"].chunking) is Fixed and type(policies["+ hybrid"].chunking) is Slack


def test_sarathi_serves_figures_by_hand() -> None:
    """The median delay passes 2 s at rate 3 for both; gaps pass 0.1 s at 2.5 and 1.25, 0.5 s at 1.5 for vLLM alone."""
    gaps = {"Sarathi-Serve 512": [0.04, 0.05, 0.25], "Sarathi-Serve 2048": [0.1, 0.2, 0.3], "vLLM": [0.0, 1.0, 0.9]}
    columns = {"model": "mistral-7b", "rate": [1.0, 2.0, 4.0], "delay_p50": [0.0, 1.0, 3.0]}
    data = pd.concat(pd.DataFrame({**columns, "series": series, "tbt_p99": each}) for series, each in gaps.items())
    assert sarathi_serve.capacity(data, "mistral-7b", "Sarathi-Serve 512", "strict") == pytest.approx(2.5)
    assert sarathi_serve.capacity(data, "mistral-7b", "vLLM", "strict") == pytest.approx(1.1)
    assert sarathi_serve.capacity(data, "mistral-7b", "Sarathi-Serve 512", "relaxed") == pytest.approx(3.0)
    gains = 2.5 / 1.1, 3.0 / 1.5
    assert sarathi_serve.capacity_over(data, "mistral-7b", "strict", "vLLM") == pytest.approx(gains[0])
    assert sarathi_serve.strict_over_relaxed(data, "mistral-7b", "vLLM") == pytest.approx(gains[0] / gains[1])
    at_rate = sarathi_serve.at_rate(data, "mistral-7b", "tbt_p99", "vLLM", "Sarathi-Serve 512")
    assert at_rate == pytest.approx(1.0 / 0.05), "at 2, 0.8 x 2.5"


def test_chunks_and_decodes_take_turns() -> None:
    """Budget 4, A 6/3 at 0, B 3/1 at 0: chunks of 4 while nothing decodes, then in turns."""
    asked = [Request(0, 6, 3), Request(1, 3, 2)]
    cost = CostFunction(lambda shape: 1.0)
    server = Server(SimExecutor(cost), Limits(4, 100, 100), cost, KVSize(100, 1), asynchronous=False)
    record = server.serve(sarathi_serve.ChunksOnly(4), asked)
    held = [(step.num_prefill_tokens, step.num_decode_tokens) for step in record.steps]
    assert held == [(4, 0), (4, 0), (0, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize("figure", ["landscape/served", "landscape/vtc"])
def test_stored_figures_are_drawn_from_their_numbers(figure: str, tmp_path: Path) -> None:
    copytree(RESULTS / "paper", tmp_path / "paper", ignore=ignore_patterns("*.png"))
    gallery.redraw(figure, str(tmp_path))
    assert (tmp_path / "paper" / figure).with_suffix(".png").stat().st_size > 10_000
