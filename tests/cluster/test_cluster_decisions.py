"""Decisions of several replicas and of closed loops: each replica is replayed by itself, and the requests are served again."""

from pathlib import Path

import pytest
from commands import command

from experiments.store.tables import read_requests

pytestmark = pytest.mark.long

POOLS = "backend.pools={large: {batch: 8, policy: {chunking: {chunk: 512}}}, small: {replicas: 2, kv_tokens: 16000}}"
OPEN = ("workload=open_loop", "workload.num_requests=40", "workload.arrivals.rate=60")
FEW = ("workload=open_loop", "workload.num_requests=9", "workload.lengths.pd_ratio=16")
SHORT = ("workload.lengths.min_length=32", "workload.lengths.max_length=128", "block_size=16", "prefix_cache=true")
CHATS = ("workload=chat", "workload.num_requests=24", "workload.sessions=4", *SHORT)


def run(folder: Path, *settings: str) -> None:
    ended = command("run", *settings, "policy=sarathi", "chunk=256", cwd=folder)
    assert ended.returncode == 0, ended


def plans(folder: Path, *arguments: str) -> list[str]:
    """Replays a run; returns the lines that count plans."""
    ended = command("replay", "run", *arguments, cwd=folder)
    assert ended.returncode in (0, 1), ended
    return [line for line in ended.stdout.splitlines() if line.startswith("run")]


@pytest.mark.parametrize(
    "settings",
    [
        ("backend=sim", *OPEN, POOLS, "backend.router=least_loaded"),
        ("backend=sim", *CHATS, "backend.replicas=3", "backend.router=lmetric"),
        ("backend=cpu", *FEW, "backend.replicas=3", "batch=2"),
    ],
    ids=["pools", "chats", "real"],
)
def test_each_replica_makes_its_plans_again(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """The file holds every iteration of each replica, and the requests that each has served."""
    run(tmp_path, *settings, "decisions=true", "output=run")
    told = plans(tmp_path)
    assert [line.partition(" makes the same ")[0] for line in told] == [f"run, replica {i}: Sarathi" for i in range(3)]
    assert plans(tmp_path, "replica=1") == [told[1]]
    other, *more = plans(tmp_path, "policy=orca", "replica=0")
    assert other.startswith("run, replica 0: Orca decides differently at ") and not more
    assert command("replay", "run", "replica=3", cwd=tmp_path).stderr == (
        "error: replica=3: give a whole number from 0 to 2\n"
    )


def test_a_replay_refuses_replicas_that_get_blocks(tmp_path: Path) -> None:
    roles = ("prefix_cache=true", "backend.pools={p: {role: prefill}, d: {role: decode}}")
    run(tmp_path, "backend=sim", *OPEN, *roles, "decisions=true", "output=run")
    assert plans(tmp_path, "replica=0")[0].startswith("run, replica 0: Sarathi makes the same ")
    told = command("replay", "run", cwd=tmp_path).stderr
    assert told.startswith("error: run, replica 1: requests come here with KV blocks of other replicas")


@pytest.mark.parametrize("replicas", [1, 2])
def test_recorded_chats_are_served_again_as_a_list(tmp_path: Path, replicas: int) -> None:
    """The recording has the times at which the turns arrived, and the answers in their prompts: all times are the same."""
    host = ("backend=sim", f"backend.replicas={replicas}", *SHORT[2:])
    run(tmp_path, *host, *CHATS[:3], *SHORT[:2], "decisions=true", "output=run")
    run(tmp_path, *host, "workload=recorded", "workload.path=run/decisions.jsonl.gz", "output=again")
    columns = ["arrival", "admitted", "last_token", "prompt_tokens", "output_tokens", "cached_tokens"]
    first, again = (read_requests(tmp_path / name)[columns] for name in ("run", "again"))
    assert len(first) == 24 and first.equals(again) and first["cached_tokens"].any()
