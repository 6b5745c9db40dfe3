"""The benchmarks' scheduler: one engine takes turns between vLLM's own class and policies."""

import json
import shlex
from pathlib import Path

import pytest
from vllm_rig import Rig

from cbatch import Limits, Request
from cbatch.policy import check_policy
from experiments.setup.presets import load_spec
from experiments.vllm import make_adapter
from reproduction.bench.in_vllm.model import BATCH, BUDGET, LONGEST
from reproduction.bench.in_vllm.offline import _coverage
from reproduction.bench.in_vllm.turns import SETTLING, TurnsScheduler


def test_an_idle_engine_changes_what_serves_the_next_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each turn is timed by itself, also one of the side that was served before it."""
    monkeypatch.setenv("CBATCH_TIMES", str(tmp_path / "times.json"))
    rig = Rig(None, Limits(4, 64, 80), 80, 4, asynchronous=True)
    rig.scheduler = rig.make(TurnsScheduler)
    policy = "policy=sarathi_serve chunking=fixed chunk=8"
    chunks, timed = [], []
    for turn, side in enumerate(("vllm", policy, policy, "vllm")):
        for number in range(3):
            begin = {"turn": 0} if number == 0 else {}
            rig.scheduler.add_request(rig.request(Request(10 * turn + number, 20, 60), cbatch=side, **begin))
        first = rig.schedule()
        chunks.append(sum(first.num_scheduled_tokens.values()))
        while rig.in_flight or rig.scheduler.has_requests():
            rig.step()
        timed.append(json.loads((tmp_path / "times.json").read_text())["host"])
    assert chunks == [60, 8, 8, 60]
    assert [list(each) for each in timed] == 4 * [["3"]], "one or two decode too seldom to be timed"
    assert [side for each in timed for side in each["3"]] == ["vllm", policy, policy, "vllm"]
    own, first, second, again = [figures for each in timed for figures in each["3"].values()]
    assert own["iterations"] == again["iterations"] == 59 - SETTLING
    assert first["iterations"] == second["iterations"] < 59 - SETTLING, "its prompts end one by one"
    for figures in (own, first):
        assert figures["milliseconds"] > figures["schedule"] > 0 and figures["cpu"] >= 0
        assert figures.keys() >= {"young", "old", "waits", "preempted"}


def test_what_is_recorded_for_a_profile_fits_vllms_limits() -> None:
    sizes = set()
    for side, requests in _coverage(load_spec("llama-3.1-8b")):
        adapter = make_adapter(shlex.split(side))
        check_policy(adapter.policy, Limits(adapter.batch or BATCH, BUDGET, LONGEST, tile=adapter.tile))
        assert len(requests) <= (adapter.batch or BATCH) and max(request.max_tokens for request in requests) <= LONGEST
        sizes.add(side)
    assert len(sizes) == 9, "vLLM's own rule, and eight sizes of chunks"
