"""Which stored results are older than the code that they are evidence of, from git's history.

    python -m experiments.bench stale [results=FOLDER]

A result's age is the commit that it was measured at; where none was recorded, the commit that stored it, in brackets. A
commit that came later and touched its code need not have changed what was measured: the list says where to look.
"""

import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from experiments.bench.tables import Json

ENGINE = (":(glob)cbatch/*.py", "policies")
RUNTIME, SIM = (*ENGINE, "cbatch/runtime"), (*ENGINE, "cbatch/sim")
TESTED = ("cbatch", "policies", "experiments", "tests/support")
CODE = {
    "coverage": (*SIM, "experiments/bench/coverage.py", "experiments/capacity", "experiments/store/intervals.py"),
    "fidelity": (*SIM, "cbatch/runtime", "experiments/fidelity"),
    "fuzz": (*TESTED, "tests/test_fuzz.py"),
    "host": ENGINE,
    "million": (*SIM, "experiments/bench/million.py", "experiments/store/streamed.py"),
    "mutants": ("cbatch", "policies", "experiments", "tests"),
    "paper": (*SIM, "experiments/paper"),
    "peers": ("experiments/bench/peers",),
    "random_schedules": (*RUNTIME, "tests/test_random_schedules.py", "tests/support"),
    "sim": SIM,
    "vidur": SIM,
}
"""The code that a benchmark measures, by the first word of its name; the runtime if it is not here."""


class Age(NamedTuple):
    """A results file and the commits that touched its code since.

    commit: short; in brackets if it is that which stored the file; empty if the file is not stored. newer: None: not
        known.
    """

    path: str
    date: str
    commit: str
    newer: int | None
    latest: str = ""


def main(results: str = "results") -> None:
    """Prints a row per results file, those with the most newer commits first."""
    ages = sorted(find_ages(Path(results)), key=lambda age: (-(age.newer or 0), age.path))
    if not ages:
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m experiments.bench")
    rows = [[*age[:3], "?" if age.newer is None else age.newer, age.latest] for age in ages]
    print(tabulate(rows, ["result", "date", "commit", "newer", "latest commit that touched its code"]))
    older = sum(bool(age.newer) for age in ages)
    print(f"\n{older} of {len(ages)} results are older than code that they are evidence of")


def find_ages(results: Path) -> Iterator[Age]:
    """The age of every JSON file in the folder that a command wrote; raises ConfigError if it is in no git checkout."""
    git = partial(_git, results if results.is_dir() else Path())
    tree = Path(git("rev-parse", "--show-toplevel"))
    for path in sorted(results.rglob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(file, dict) and {"date", "command"} <= file.keys():
            shown = path.resolve().relative_to(tree.resolve()).as_posix()
            yield _age(partial(_git, tree), shown, file)


def _age(git: partial[str], path: str, file: Json) -> Age:
    stored = git("log", "-1", "--format=%h", "--", path)
    measured = str(file.get("commit") or "").partition(" ")[0]
    known = bool(measured) and bool(git("rev-parse", "--quiet", "--verify", f"{measured}^{{commit}}", missing=True))
    if not (known or stored):
        return Age(path, file["date"], "", None)
    since = f"{measured if known else stored}..HEAD"
    found = git("log", "--format=%h %as %s", since, "--", *code_of(path, file)).splitlines()
    return Age(path, file["date"], measured[:7] if known else f"({stored})", len(found), found[0][:80] if found else "")


def code_of(path: str, file: Json) -> tuple[str, ...]:
    """Paths, as git reads them, of the code that a results file is evidence of."""
    if "experiments.paper" in file["command"]:
        return (*CODE["paper"], "cbatch/runtime") if "hardware=gpu" in file["command"] else CODE["paper"]
    if "/peers" in path:
        return CODE["peers"]
    name = str(file.get("benchmark", "")).partition("-")[0]
    return (*CODE.get(name, RUNTIME), *([f":(glob)experiments/bench/{name}*.py"] if name else []))


def _git(folder: Path, *arguments: str, missing: bool = False) -> str:
    """What git prints, stripped. missing: an error is an empty answer."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    if done.returncode and not missing:
        raise ConfigError(
            f"stale: git has no history here ({done.stderr.strip()}); run it in a clone of the repository"
        )
    return done.stdout.strip()
