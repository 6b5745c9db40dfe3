"""`python tests/support/concurrent_runs.py FOLDER PAIRS KILLS [SEED]`: runs at the same moment, and runs killed in between.

Two processes, forked with everything imported, begin the same kind of command at once: both with a folder of their own
choice, both with one `output=`, both with one `sweep=`, or both with a sweep of their own choice. Others are killed at
a random moment, and their command is given again. Afterwards each folder must hold one whole run, or say that it is
unfinished.
"""

import csv
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from experiments.run import main

POLICIES = ("orca", "sarathi", "prefill_first", "request_level")
WORK = ("workload.num_requests=60", "workload.length=256", "backend=sim", "progress=off")
KINDS = {
    "own folders": (),
    "one output": ("output=out",),
    "one sweep": ("-m", "sweep=grid", "chunk=128,256"),
    "own sweeps": ("-m", "chunk=128,256"),
}
"""What two commands at the same moment have in common."""

REFUSED = ("is in use since", "contains this run already", "contains a complete run", "holds this run already")


def begin(arguments: Sequence[str], start: float, folder: Path, said: Path) -> int:
    """Starts a command in a child at a time of the monotonic clock; returns its process number."""
    if (child := os.fork()) != 0:
        return child
    os.chdir(folder)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.argv = ["run", *arguments]
    time.sleep(max(0.0, start - time.monotonic()))
    status = 1
    try:
        status = main()
    finally:
        sys.stdout.flush()
        os._exit(status)


def check(folder: Path) -> int:
    """Checks every folder of a run below; returns how many are complete."""
    complete = 0
    for path in {file.parent for file in folder.rglob("*.*") if "plots" not in file.parts}:
        names = {file.name for file in path.iterdir()}
        if "config.yaml" not in names or "summary.json" not in names:
            assert not names & {"summary.json"}, (path, names)
            continue
        complete += 1
        config = yaml.safe_load((path / "config.yaml").read_text())
        summary = json.loads((path / "summary.json").read_text())
        about, run = summary["about"], summary["run"]
        assert about["policy_target"] == config["policy"]["_target_"], path
        assert run["requests"] == config["workload"]["num_requests"] == rows(path / "requests.csv"), path
        assert run["iterations"] == rows(path / "steps.csv"), path
        assert about["chunk"] in (None, config["chunk"]), path
        with (path / "requests.csv").open() as file:  # times of another run would not add up to this summary
            last = max(float(row["last_token"]) for row in csv.DictReader(file))
        assert abs(last - run["seconds"]) < 0.5 * run["seconds"], path
    return complete


def rows(path: Path) -> int:
    text = path.read_text()
    assert text.endswith("\n"), path
    return len(text.splitlines()) - 1


def pair(kind: str, folder: Path, chance: random.Random) -> None:
    policies = chance.sample(POLICIES, 2)
    start = time.monotonic() + 0.02
    said = [folder.with_suffix(f".{number}") for number in range(2)]
    children = [
        begin([*KINDS[kind], f"policy={policy}", *WORK], start, folder, file)
        for policy, file in zip(policies, said, strict=True)
    ]
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = [file.read_text() for file in said]
    for end, text in zip(ends, texts, strict=True):
        assert end == 0 or any(words in text for words in REFUSED), (kind, end, text)
    served = {"own folders": 1, "one output": 1, "one sweep": 2, "own sweeps": 2}[kind] * ends.count(0)
    assert ends.count(0) == (1 if kind == "one output" else 2) or kind == "one sweep", (kind, ends, texts)
    assert check(folder) == served, (kind, ends, texts)
    assert not list(folder.rglob("unfinished.json")), kind


def kill(kind: str, folder: Path, chance: random.Random) -> str:
    arguments = [*KINDS[kind], f"policy={chance.choice(POLICIES)}", *WORK]
    said = folder.with_suffix(".0")
    child = begin(arguments, 0.0, folder, said)
    time.sleep(chance.uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    before = check(folder)
    again = os.waitstatus_to_exitcode(os.waitpid(begin(arguments, 0.0, folder, said), 0)[1])
    assert again == 0, (kind, said.read_text())
    after = check(folder)
    assert after >= max(before, 1), (kind, before, after)
    if kind in ("one output", "one sweep"):  # beside summary.json it is of a process killed after its run was complete
        assert all((file.parent / "summary.json").exists() for file in folder.rglob("unfinished.json")), kind
    return "killed" if end < 0 else "ended before"


def run(folder: Path, num_pairs: int, num_kills: int, seed: int) -> None:
    chance = random.Random(seed)
    kinds, ends = list(KINDS), []
    for number in range(num_pairs):
        place = folder / f"pair{number}"
        place.mkdir(parents=True)
        pair(kinds[number % len(kinds)], place, chance)
        shutil.rmtree(place)
    for number in range(num_kills):
        place = folder / f"kill{number}"
        place.mkdir(parents=True)
        ends.append(kill(kinds[number % len(kinds)], place, chance))
        shutil.rmtree(place)
    sys.stdout.write(f"{num_pairs} pairs, {num_kills} kills ({ends.count('killed')} in mid-run): every folder whole\n")


if __name__ == "__main__":
    where, *numbers = sys.argv[1:]
    pairs, kills, seed = (*map(int, numbers), 0)[:3]
    run(Path(where), pairs, kills, seed)
