"""`python -m experiments.run backend=cuda` in a process of its own, from the command line to the folder that a run leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import PATIENCE, summary
from places import ROOT

REQUESTS = (
    "model=tiny",
    "workload.num_requests=6",
    "workload.length=384",
    "workload.pd_ratio=2",
    "chunk=128",
    "batch=4",
)
SMALL = ("kv_tokens=4096",)  # else a run takes all memory that is free, from the tests beside it
ROLES = ("prefix_cache=true", "backend.devices=[0,0]", "backend.pools={p: {role: prefill}, d: {role: decode}}")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), marks=pytest.mark.alone),
        ("runtime.asynchronous=false", *SMALL),
        ("drafting=fixed", "drafter=ngram", *SMALL),
        ("drafting=fixed", "drafter=model", "drafter.model=tiny", *SMALL),
        (*ROLES, *SMALL),
    ],
    ids=" ".join,
)
def test_the_command_serves_on_a_gpu(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.run", "policy=sarathi_serve", "backend=cuda", *REQUESTS, *arguments]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(
        [*command, "output=out"], cwd=tmp_path, env=found, text=True, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert summary(tmp_path / "out")["run"]["requests"] == 6
