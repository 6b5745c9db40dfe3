"""The benchmarks' scheduler: one engine takes turns between vLLM's own class and policies."""

import json
from pathlib import Path
from typing import Any

import pytest

from cbatch import Limits, Request


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
