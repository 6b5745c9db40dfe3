"""Whole simulated runs as processes: their cost is measured, and what they served is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_traces import LENGTHS

from cbatch import ConfigError
from experiments.workloads import ServeGen
from reproduction.bench.__main__ import main
from reproduction.bench.process import measured, million

MEASURE = """
import sys
from reproduction.bench.process import measured
process, summary = measured(sys.argv[1:])
print(summary["run"]["requests"], process.cpu_seconds, process.peak_memory_mb)
"""


def test_a_process_is_measured_and_its_errors_are_told() -> None:
    """Measured from a small process: a child counts the memory of its parent as its own until it starts its program."""
    setting = [
        "backend=sim",
        "hardware=h200",
        "workload.num_requests=4",
        "workload.length=64",
        "progress=off",
        "timeline=false",
        "chunk=256",
        "batch=4",
    ]
    told = subprocess.run([sys.executable, "-c", MEASURE, *setting], capture_output=True, text=True, check=True)
    num_requests, cpu, memory = map(float, told.stdout.split())
    assert num_requests == 4
    assert 0 < cpu < 60 and 20 < memory < 400
    with pytest.raises(ConfigError, match="tensor_parallel=3"):
        measured([*setting, "backend.tensor_parallel=3"])


def test_a_million_requests_write_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text(
        "client,window_start_s,rate_req_per_s,iat_cv,arrival_family,arg1,arg2\n7,0,0.5,1.0,Gamma,1.0,2.0\n"
    )
    (tmp_path / "d.jsonl").write_text(json.dumps({"client": 7, "dataset": {"0": LENGTHS}}) + "\n")
    paths = str(tmp_path / "t.csv"), str(tmp_path / "d.jsonl")
    million(*paths, num_requests=40, folder=str(tmp_path), policy="orca", rate=0.4)
    assert "generated_tokens" in capsys.readouterr().out
    written = json.loads((tmp_path / "cpu" / "million.json").read_text())
    trace = ServeGen(path=str(tmp_path / "t.csv"), dataset=str(tmp_path / "d.jsonl"), duration=1305.0, rate=0.4).trace()
    assert written["figures"]["requests"] == 40
    assert written["figures"]["generated_tokens"] == trace.first(40).output_tokens.sum()
    assert written["seconds"]["ttft_seconds"]["p50"] > 0
    capsys.readouterr()
    assert main(["million", "path=t.csv", "dataset=d.jsonl", "rate=0"]) == 2
    assert capsys.readouterr().err.startswith("error: million: rate=0")
