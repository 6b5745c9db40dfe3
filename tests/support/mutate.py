"""`make mutants`: changes the code that makes figures, one change at a time, and reports which changes no test notices.

    python tests/support/mutate.py [MODULE ...] [--sample N [--draw N]] [--jobs N] [--record FOLDER]
    python tests/support/mutate.py --planted        the faults of `planted.yaml` alone

Each mutant runs the tests that `mutants.yaml` names for its module, in a process of its own over a copy of the repository. A
mutant that no test notices is a missing test, unless `mutants.yaml` says why nothing can: such mutants are equivalent.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import hydra  # noqa: F401 - loaded once here, not again by the tests of each mutant
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401
import uvicorn  # noqa: F401
import yaml
from hypothesis import Phase, settings
from mutations import Mutant, mutants_of, sample
from places import ROOT, file_of_test
from tabulate import tabulate

FORK = multiprocessing.get_context("fork")
TARGETS, PLANTED = (Path(__file__).with_name(name) for name in ("mutants.yaml", "planted.yaml"))
COPIED = ("cbatch", "policies", "experiments", "reproduction", "tests")
MOST_SURVIVORS = 0.03
COUNTS = ("mutants", "judged", "killed", "equivalent", "survived")
Row = dict[str, Any]
settings.register_profile(  # a failure is enough: it need not be made small
    "mutants", derandomize=True, deadline=None, database=None, phases=(Phase.explicit, Phase.generate)
)


@dataclass
class Target:
    """tests: files of tests that cover the module, or tests in them.

    equivalent: why no test can notice, and the lines after such changes; "..." ends the beginning of one.
    """

    module: str
    tests: list[str]
    equivalent: dict[str, list[str]] = field(default_factory=dict)

    def explains(self, mutant: Mutant) -> bool:
        known = [line for lines in self.equivalent.values() for line in lines]
        return any(
            mutant.after.startswith(line[:-3]) if line.endswith("...") else mutant.after == line for line in known
        )


def read_targets(chosen: Sequence[str]) -> list[Target]:
    entries = yaml.safe_load(TARGETS.read_text())
    targets = [Target(module, **entry) for module, entry in entries.items()]
    return [target for target in targets if not chosen or any(name in target.module for name in chosen)]


def own_copy(temporary: str) -> Path:
    """This process's copy of the repository: the code to change and its tests; everything else is linked."""
    if (folder := Path(temporary) / str(os.getpid())).is_dir():
        return folder
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


def run_tests(folder: Path, tests: Sequence[str], seconds: float | None = None, *, keep: bool = False) -> str:
    """Returns "passed", "failed" or "too slow". keep: the compiled modules, for later runs."""
    process = FORK.Process(target=_pytest, args=(folder, tests, keep))
    process.start()
    process.join(seconds)
    slow = process.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)  # and what its tests have started
    process.join()
    return "too slow" if slow else "failed" if process.exitcode else "passed"


def _pytest(folder: Path, tests: Sequence[str], keep: bool) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder), str(folder / "tests" / "support")]
    sys.dont_write_bytecode = not keep
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", "--tb=no", "--hypothesis-profile=mutants"]
    os._exit(pytest.main([*options, f"--rootdir={folder}", *map(_path, tests)]))


def _path(tests: str) -> str:
    """The tests of a file, as in "test_kv", or one of them, as in "test_kv::test_a"."""
    name, *one = tests.split("::")
    return "::".join([str(file_of_test(name).relative_to(ROOT)), *one])


def judge(target: Target, mutants: Sequence[Mutant], temporary: str) -> list[str]:
    """What the tests say of each mutant, in this process's copy; raises RuntimeError if they fail without one."""
    folder = own_copy(temporary)
    path, began = folder / target.module, time.monotonic()
    if run_tests(folder, target.tests, keep=True) != "passed":
        raise RuntimeError(f"{target.module}: its tests fail without any mutant: {' '.join(target.tests)}")
    seconds = 10 + 4 * (time.monotonic() - began)
    if not (compiled := Path(cache_from_source(str(path)))).is_file():
        raise RuntimeError(f"{target.module}: its tests do not import it: {' '.join(target.tests)}")
    compiled.unlink()  # a mutant may be as long, and written in the same second
    original, said = path.read_text(), []
    for mutant in mutants:
        path.write_text(mutant.source)
        said.append(run_tests(folder, target.tests, seconds))
    path.write_text(original)
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="parts of their paths; default: all")
    parser.add_argument("--sample", type=int, default=0, help="about as many mutants of each module; default: all")
    parser.add_argument("--draw", type=int, default=0, help="another number samples other mutants")
    parser.add_argument("--jobs", type=int, default=2, help="modules at a time")
    parser.add_argument("--planted", action="store_true", help="the faults of planted.yaml alone")
    parser.add_argument(
        "--record", metavar="FOLDER", help="write the numbers under this folder, where those of other modules stay"
    )
    given = parser.parse_args()
    rows, failed = stored_rows(given.record), False
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(given.jobs, FORK) as pool:
        if not given.modules:
            failed = missed_faults(pool, temporary)
        targets = [] if given.planted else read_targets(given.modules)
        judging = [pool.submit(judge_module, target, given.sample, given.draw, temporary) for target in targets]
        for done in as_completed(judging):
            if error := done.exception():
                failed = True
                print(error, flush=True)
            else:
                row = done.result()
                print("".join(f"{row['module']}:{line}\n" for line in row["survivors"]), end="", flush=True)
                rows[row["module"]] = row
                if given.record:
                    record(rows, given.record)
    return int(failed) or (0 if given.planted else conclude(rows))


def judge_module(target: Target, number: int, draw: int, temporary: str) -> Row:
    """Returns a row of the table, with the surviving mutants that no entry explains."""
    found = mutants_of((ROOT / target.module).read_text())
    mutants = sample(found, number, draw)
    said = judge(target, mutants, temporary)
    passed = [mutant for mutant, outcome in zip(mutants, said, strict=True) if outcome == "passed"]
    left = sorted((mutant for mutant in passed if not target.explains(mutant)), key=lambda mutant: mutant.line)
    shown = [f"{mutant.line}: {mutant.before} -> {mutant.after}" for mutant in left]
    counts = (len(found), len(said), len(said) - len(passed), len(passed) - len(left), len(left))
    return {"module": target.module, **dict(zip(COUNTS, counts, strict=True)), "survivors": shown}


def missed_faults(pool: ProcessPoolExecutor, temporary: str) -> bool:
    """Plants each fault; prints those that no test notices, and the number of all. True if there are any."""
    faults = yaml.safe_load(PLANTED.read_text())
    missed = [
        what for what in pool.map(partial(_missed, temporary=temporary), *zip(*faults.items(), strict=True)) if what
    ]
    print("".join(f"planted, not noticed: {what}\n" for what in missed), end="")
    print(f"{len(faults) - len(missed)} of {len(faults)} planted faults are noticed", flush=True)
    return bool(missed)


def _missed(what: str, fault: dict[str, Any], temporary: str) -> str:
    source = (ROOT / fault["module"]).read_text()
    if source.count(fault["before"]) != 1:
        raise RuntimeError(f"planted.yaml: {what}: {fault['before']} does not stand once in {fault['module']}")
    mutant = Mutant(0, fault["before"], fault["after"], source.replace(fault["before"], fault["after"]))
    said = judge(Target(fault["module"], fault["tests"]), [mutant], temporary)
    return what if said == ["passed"] else ""


def totals(rows: Iterable[Row]) -> Row:
    return {"module": "all", **{name: sum(row[name] for row in rows) for name in COUNTS}}


def survived_share(total: Row) -> float:
    """Returns the share of survivors among the mutants that are not equivalent."""
    return float(total["survived"] / max(total["judged"] - total["equivalent"], 1))


def stored_rows(folder: str | None) -> dict[str, Row]:
    """The rows of earlier runs, of modules that are still judged: a run that is cut short goes on with the other modules."""
    path = next(Path(folder or os.devnull).glob("*/mutants.json"), None)
    rows = json.loads(path.read_text())["modules"] if path else []
    known = {target.module for target in read_targets(())}
    return {row["module"]: row for row in rows if row["module"] in known}


def record(rows: dict[str, Row], folder: str) -> None:
    """Writes all rows, each with the date, commit and machine at which it was judged."""
    from experiments.settings.hardware import cpu_name  # not earlier: each mutant imports a copy of its own
    from experiments.store.provenance import commit, today, write_benchmark

    judged = {"date": today(), "commit": commit(), "hardware": cpu_name()}
    rows |= {name: {**judged, **row} for name, row in rows.items()}
    total = totals(list(rows.values()))
    figures = {"survived_share": survived_share(total), "all": total, "modules": list(rows.values())}
    write_benchmark("mutants", cpu_name(), figures, Path(folder), command="python tests/support/mutate.py")


def conclude(rows: dict[str, Row]) -> int:
    """Prints the table; returns 1 if too many mutants survived."""
    total = totals(list(rows.values()))
    print(
        tabulate([[row[name] for name in ("module", *COUNTS)] for row in (*rows.values(), total)], ("module", *COUNTS))
    )
    share = survived_share(total)
    print(f"{share:.1%} of the mutants that are not equivalent survived, at most {MOST_SURVIVORS:.0%} may")
    return int(share > MOST_SURVIVORS)


if __name__ == "__main__":
    sys.exit(main())
