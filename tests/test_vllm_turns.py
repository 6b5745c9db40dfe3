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
    from experiments.bench.in_vllm.turns import TurnsScheduler

    monkeypatch.setenv("CBATCH_TIMES", str(tmp_path / "times.json"))
    rig = vllm_rig.Rig(None, Limits(4, 64, 60), 60, 4, asynchronous=True)
    rig.scheduler = rig.make(TurnsScheduler)
    chunks = []
    for turn, side in enumerate(("vllm", "policy=sarathi_serve chunking=fixed chunk=8", "vllm")):
        for number in range(3):
            request = Request(10 * turn + number, 20, 30)
            rig.scheduler.add_request(rig.request(request, cbatch=side))
        first = rig.schedule()
        chunks.append(sum(first.num_scheduled_tokens.values()))
        while rig.in_flight or rig.scheduler.has_requests():
            rig.step()
    assert chunks == [60, 8, 60]
    written = json.loads((tmp_path / "times.json").read_text())
    assert set(written["host"]) == {"vllm", "policy=sarathi_serve chunking=fixed chunk=8"}
    assert all("3" in numbers for numbers in written["host"].values())


def test_what_is_recorded_for_a_profile_fits_vllms_limits(vllm_rig: Any) -> None:
    from experiments.bench.in_vllm.offline import BATCH, BUDGET, LONGEST, _coverage
    from experiments.vllm import make_adapter

    sizes = set()
    for side, requests in _coverage(load_spec("llama-3.1-8b")):
        adapter = make_adapter(shlex.split(side))
        check_policy(adapter.policy, Limits(adapter.batch or BATCH, BUDGET, LONGEST, tile=adapter.tile))
        assert len(requests) <= (adapter.batch or BATCH) and max(request.max_tokens for request in requests) <= LONGEST
        sizes.add(side)
    assert len(sizes) == 9, "vLLM's own rule, and eight sizes of chunks"
