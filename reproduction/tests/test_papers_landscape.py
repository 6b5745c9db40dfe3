"""Figures about the published policies: small cases computed by hand, and runs that are kept as they end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cbatch import CostFunction, Limits, Request, Server
from cbatch.kv import KVSize
from cbatch.sim.executor import SimExecutor
from experiments.settings.compose import compose_run
from policies.chunking import Fixed, Slack
from reproduction.papers.figures.landscape import sarathi_serve, served, vtc
from reproduction.papers.jobs import crossing


def test_a_crossing_lies_between_two_rates() -> None:
    assert crossing([1, 2, 3], [0.0, 0.5, 1.0], 0.75) == 2.5
    assert crossing([1, 2, 3], [0.0, 0.8, 0.1], 0.4) == 1.5, "the first one"
    assert np.isnan(crossing([1, 2], [0.9, 1.0], 0.5)) and np.isnan(crossing([1, 2], [0.1, 0.2], 0.5))


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


@pytest.mark.long
def test_the_studies_settings_make_their_policies() -> None:
    def policy(study: str, series: str) -> Any:
        return compose_run(*served.overrides(study, 0.5, series, "folder")).policy()

    maes = [policy("TRAIL", series).predictor.mae for series in ("c = 0.8", "SRPT", "SJF, MAE 400")]
    assert maes == [33.9, 33.9, 400.0]
    chunking = [type(policy("QoServe", series).chunking) for series in ("EDF", "+ hybrid")]
    assert chunking == [Fixed, Slack]


def test_sarathi_serves_figures_by_hand() -> None:
    """The median delay passes 2 s at rate 3 for both; gaps pass 0.1 s at 2.5 and 1.25, 0.5 s at 1.5 for vLLM alone."""
    gaps = {"Sarathi-Serve 512": [0.04, 0.05, 0.25], "Sarathi-Serve 2048": [0.1, 0.2, 0.3], "vLLM": [0.0, 1.0, 0.9]}
    columns = {"model": "mistral-7b", "rate": [1.0, 2.0, 4.0], "delay_p50": [0.0, 1.0, 3.0]}
    data = pd.concat(pd.DataFrame({**columns, "series": series, "tbt_p99": each}) for series, each in gaps.items())
    assert sarathi_serve.capacity(data, "mistral-7b", "Sarathi-Serve 512", "strict") == pytest.approx(2.5)
    assert sarathi_serve.capacity(data, "mistral-7b", "vLLM", "strict") == pytest.approx(1.1)
    assert sarathi_serve.capacity(data, "mistral-7b", "Sarathi-Serve 512", "relaxed") == pytest.approx(3.0)
    gains = 2.5 / 1.1, 3.0 / 1.5
    leads = [sarathi_serve.lead(data, "mistral-7b", slo, "vLLM") for slo in ("strict", "relaxed")]
    assert leads == pytest.approx(gains)
    assert sarathi_serve.at_rate(data, "mistral-7b", "tbt_p99", "vLLM") == 1.0, "at 2, 0.8 x 2.5"


def test_chunks_and_decodes_take_turns() -> None:
    """Budget 4, A 6/3 at 0, B 3/1 at 0: chunks of 4 while nothing decodes, then in turns."""
    asked = [Request(0, 6, 3), Request(1, 3, 2)]
    cost = CostFunction(lambda shape: 1.0)
    server = Server(SimExecutor(cost), Limits(4, 100, 100), cost, KVSize(100, 1), asynchronous=False)
    record = server.serve(sarathi_serve.ChunksOnly(4), asked)
    held = [(step.num_prefill_tokens, step.num_decode_tokens) for step in record.steps]
    assert held == [(4, 0), (4, 0), (0, 1), (1, 0), (0, 2)]
