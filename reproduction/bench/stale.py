"""Which stored results rest on modules whose code has changed since they were measured, from git's history.

    python -m reproduction.bench stale [results=FOLDER]

A result's age is the commit that it was measured at; where none of this history was recorded, the one that stored it, in brackets. Listed
are modules of `RESTS_ON` that differ from that commit in more than comments, docstrings and layout, or are gone: what to
look at before the figure is cited, and what the command stored in the file measures again.
"""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from reproduction import RESULTS
from reproduction.bench.tables import Json


def _modules(folder: str, names: str) -> set[str]:
    return {f"{folder}/{name}.py" for name in names.split()}


KERNELS = {"cbatch/runtime/fast"} | _modules("cbatch/runtime", "graphs model sampling")
HOST = _modules("cbatch", "engine view plan_builder plan_check state")
LOOP = KERNELS | HOST | _modules("cbatch/runtime", "batch executor iteration")
PREDICTED = _modules(
    "cbatch/sim", "attention cost executor interpolation links op_counts power profile roofline stages"
)
COST = PREDICTED | {"policies"}
H200 = COST | {"cbatch/sim/profiles/h200.json"}
RESTS_ON = {
    "/peers": {"reproduction/bench/peers"},
    "/paper/landscape/": COST,
    "/paper/": PREDICTED | {"policies/chunking"} | _modules("policies", "orca request_level sarathi"),
    "simulated": H200,
    "/(attention|graph|tiles)": KERNELS,
    "h100/": COST | {"cbatch/sim/profiles/h100.json", "reproduction/validation"},
    "/(capacity|fidelity|held_out)": H200 | {"reproduction/validation"},
    "/coverage": {"reproduction/bench/coverage.py", "experiments/capacity", "experiments/store/intervals.py"},
    "/fuzz": {"cbatch/validation.py", "experiments/settings", "experiments/workloads", "tests/commands/test_fuzz.py"},
    "/host": HOST | {"policies"},
    "/(million|sim|vidur)": HOST | COST | {"cbatch/leap.py"},
    "/mutants": {"cbatch/results", "reproduction/validation", "experiments/plots", "experiments/store", "policies"},
    "/random_schedules": LOOP | {"tests/support/any_order.py", "tests/runtime/test_random_schedules.py"},
    "": LOOP,
}
"""What figures rest on, as git reads paths; the first pattern found in a file's path counts."""


class Age(NamedTuple):
    """A results file and what has changed since it was measured.

    commit: short; in brackets if it is that which stored the file; empty if the file is not stored. changed: modules; None:
        not known.
    """

    path: str
    date: str
    commit: str
    changed: list[str] | None


def main(results: str = RESULTS) -> None:
    """Prints a row per results file, those with the most changed modules first."""
    ages = sorted(find_ages(Path(results)), key=lambda age: (-len(age.changed or ()), age.path))
    if not ages:
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m reproduction.bench")
    rows = [[*age[:3], *_shown(age.changed)] for age in ages]
    print(tabulate(rows, ["result", "date", "commit", "changed", "modules whose code changed since"]))
    older = sum(bool(age.changed) for age in ages)
    say = "git diff COMMIT -- MODULE says how, and the command in the file measures again"
    print(f"\n{older} of {len(ages)} results rest on code that changed since: {say}")


def _shown(changed: list[str] | None) -> tuple[int | str, str]:
    if changed is None:
        return "?", ""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return len(changed), " ".join(path.removeprefix("cbatch/") for path in changed[:3]) + more


def find_ages(results: Path) -> Iterator[Age]:
    """The age of every JSON file in the folder that a command wrote; raises ConfigError if it is in no git checkout."""
    tree = Path(_git(results if results.is_dir() else Path(), "rev-parse", "--show-toplevel"))
    git = partial(_git, tree)
    for path in sorted(results.rglob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(file, dict) and {"date", "command"} <= file.keys():
            shown = path.resolve().relative_to(tree.resolve()).as_posix()
            yield _age(git, shown, file)


def _age(git: partial[str], path: str, file: Json) -> Age:
    stored = git("log", "-1", "--format=%h", "--", path)
    measured = str(file.get("commit") or "").partition(" ")[0]
    known = bool(measured) and git("merge-base", measured, "HEAD", missing=True).startswith(measured)
    if not (known or stored):
        return Age(path, file["date"], "", None)
    since = measured if known else stored
    code = rests_on(path, file["command"])
    found = git("diff", "--name-only", "--no-renames", "--diff-filter=MD", since, "HEAD", "--", *code)
    changed = [name for name in found.splitlines() if _code(git, since, name) != _code(git, "HEAD", name)]
    return Age(path, file["date"], measured[:7] if known else f"({stored})", changed)


def rests_on(path: str, command: str) -> set[str]:
    """Paths, as git reads them, of the code that a results file rests on."""
    if "hardware=gpu" in command:
        return LOOP
    return next(code for pattern, code in RESTS_ON.items() if re.search(pattern, path))


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node


@cache
def _code(git: partial[str], commit: str, path: str) -> str:
    """What a file says at a commit; of Python, without comments, docstrings and layout."""
    text = git("show", f"{commit}:{path}", missing=True)
    return ast.dump(_WithoutDocstrings().visit(ast.parse(text))) if path.endswith(".py") else text


def _git(folder: Path, *arguments: str, missing: bool = False) -> str:
    """What git prints, stripped. missing: an error is an empty answer."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    if done.returncode and not missing:
        raise ConfigError(f"stale: git has no history here ({done.stderr.strip()}); run it in a clone")
    return done.stdout.strip()
