"""`python -m experiments.run backend=cuda`, from the command line to the folder that a run leaves."""

from pathlib import Path

import pytest
from commands import command, summary

REQUESTS = ("model=tiny", "workload.num_requests=6", "workload.length=96", "workload.pd_ratio=2", "chunk=64", "batch=4")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("runtime.asynchronous=false",),
        ("drafting=fixed", "drafter=ngram"),
        ("drafting=fixed", "drafter=model", "drafter.model=tiny"),
        (
            "prefix_cache=true",
            "backend.devices=[0,0]",
            "backend.pools={p:{role:prefill},d:{role:decode}}",
            "kv_tokens=4096",
        ),
    ],
    ids=" ".join,
)
def test_the_command_serves_on_a_gpu(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = command("run", "policy=sarathi_serve", "backend=cuda", *REQUESTS, *arguments, "output=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "out")["run"]["num_finished"] == 6
