"""How old stored results are: the commits since that changed the code under a folder, from git's history.

    python -m reproduction.bench stale [results=FOLDER] [code=cbatch,policies]

The command stored in a results file measures its figures again; `git diff COMMIT -- MODULE` says what changed.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from cbatch import ConfigError
from reproduction import RESULTS


class Age(NamedTuple):
    """commit: at which the result was measured; if it is not known here, that which stored the file, in brackets.

    changes: commits since that changed the code; None: the file is not stored.
    """

    path: str
    date: str
    commit: str
    changes: int | None


def main(results: str = RESULTS, code: tuple[str, ...] = ("cbatch", "policies")) -> None:
    """Prints a row per results file, the oldest first."""
    ages = sorted(find_ages(Path(results), code), key=lambda age: (-(age.changes or 0), age.path))
    if not ages:
        raise ConfigError(f"results={results}: no results there; run a benchmark first: python -m reproduction.bench")
    head = ("result", "date", "commit", f"commits to {' and '.join(code)} since")
    print(tabulate(ages, head, missingval="?"))


def find_ages(results: Path, code: tuple[str, ...]) -> Iterator[Age]:
    """Yields the age of every JSON file in the folder that a command wrote.

    Raises:
        ConfigError: the folder is in no git checkout.
    """
    tree = Path(_git(results if results.is_dir() else Path(), "rev-parse", "--show-toplevel"))
    for path in sorted(results.rglob("*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if {"date", "command"} <= file.keys():
            shown = path.resolve().relative_to(tree.resolve()).as_posix()
            stored = _git(tree, "log", "-1", "--format=%h", "--", shown)
            measured = str(file.get("commit") or "").partition(" ")[0]
            known = bool(measured) and _git(tree, "merge-base", measured, "HEAD", missing=True).startswith(measured)
            since = measured if known else stored
            changes = int(_git(tree, "rev-list", "--count", f"{since}..HEAD", "--", *code)) if since else None
            yield Age(shown, file["date"][:10], measured[:7] if known else stored and f"({stored})", changes)


def _git(folder: Path, *arguments: str, missing: bool = False) -> str:
    """Returns what git prints, stripped. missing: an error is an empty answer."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    if done.returncode and not missing:
        raise ConfigError(f"stale: git has no history here ({done.stderr.strip()}); run it in a clone")
    return done.stdout.strip()
