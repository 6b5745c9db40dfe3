"""The benchmarks' scheduler: one engine takes turns between vLLM's own class and policies."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cbatch import Limits, Request
from cbatch.policy_calls import check_policy
from experiments.config.presets import load_spec


def test_an_idle_engine_changes_what_serves_the_next_requests(
    vllm_rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each turn is timed by itself, also one of the side that was served before it."""
    from experiments.bench.in_vllm.turns import SETTLING, TurnsScheduler

    monkeypatch.setenv("CBATCH_TIMES", str(tmp_path / "times.json"))
    rig = vllm_rig.Rig(None, Limits(4, 64, 80), 80, 4, asynchronous=True)
    rig.scheduler = rig.make(TurnsScheduler)
    policy = "policy=sarathi_serve chunking=fixed chunk=8"
    chunks, timed = [], []
    for turn, side in enumerate(("vllm", policy, policy, "vllm")):
        for number in range(3):
            begin = {"turn": 1} if number == 0 else {}
            rig.scheduler.add_request(rig.request(Request(10 * turn + number, 20, 60), cbatch=side, **begin))
        first = rig.schedule()
        chunks.append(sum(first.num_scheduled_tokens.values()))
        while rig.in_flight or rig.scheduler.has_requests():
            rig.step()
        timed.append(json.loads((tmp_path / "times.json").read_text())["host"])
    assert chunks == [60, 8, 8, 60]
    assert [list(each) for each in timed] == 4 * [["3"]], "one or two decode too seldom to be timed"
    assert timed[0]["3"]["iterations"] == timed[3]["3"]["iterations"] == 59 - SETTLING
    assert timed[1]["3"]["iterations"] == timed[2]["3"]["iterations"] < 59 - SETTLING, "its prompts end one by one"
    for each in timed:
        assert each["3"]["milliseconds"] > each["3"]["schedule"] > 0 and each["3"]["cpu"] >= 0
        assert each["3"].keys() >= {"young", "old", "waits", "preempted"}


def test_what_is_recorded_for_a_profile_fits_vllms_limits(vllm_rig: Any) -> None:
    from experiments.bench.in_vllm.model import BATCH, BUDGET, LONGEST
    from experiments.bench.in_vllm.offline import _coverage
    from experiments.vllm import make_adapter

    sizes = set()
    for side, requests in _coverage(load_spec("llama-3.1-8b")):
        adapter = make_adapter(shlex.split(side))
        check_policy(adapter.policy, Limits(adapter.batch or BATCH, BUDGET, LONGEST, tile=adapter.tile))
        assert len(requests) <= (adapter.batch or BATCH) and max(request.max_tokens for request in requests) <= LONGEST
        sizes.add(side)
    assert len(sizes) == 9, "vLLM's own rule, and eight sizes of chunks"
