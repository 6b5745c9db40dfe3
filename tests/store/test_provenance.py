"""What stored results say of their origin, where they are kept, and how their files are written."""

import json
import math
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from experiments.store import provenance as store
from experiments.store.provenance import atomic_write, provenance, write_json


def test_a_result_says_what_wrote_it_when_and_with_which_versions() -> None:
    made = provenance("python -m bench")
    days = [f"{datetime.now(UTC) - timedelta(days=days):%Y-%m-%d}" for days in (0, 1)]
    assert made["commit"] == store.commit() and made["date"] in days, "midnight may lie between"
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    assert made["versions"].items() >= versions.items()


def test_changes_of_the_code_count_and_results_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the second figure of a command would be of other code than the first. Another repository around gives no commit."""
    monkeypatch.delenv("GIT_DIR", raising=False)
    monkeypatch.delenv("GIT_INDEX_FILE", raising=False)

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *who, *arguments], cwd=tmp_path, text=True).strip()

    commit_of = store.commit.__wrapped__  # not the kept one
    code, result = tmp_path / "site/x.py", tmp_path / "reproduction/results/sim.json"
    for file in (code, result):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    result.write_text("2")
    assert (commit_of(tmp_path), commit_of(tmp_path / "site")) == (head := git("rev-parse", "HEAD"), None)
    code.write_text("2")
    assert commit_of(tmp_path) == f"{head} + changes"


def test_a_stored_command_holds_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the last two parts of a path, also if they hold an equals sign; drops options that say where to write."""
    given = {"folder=/home/me/out": "", "--record=/home/me/out": "", "path=/home/me/a/b.gz": "path=.../a/b.gz"}
    given |= {
        "batch=2": "batch=2",
        "/home/me/b/c": ".../b/c",
        "a='b c'": """'a='"'"'b c'"'"''""",
        "trace=/a.csv": "trace=/a.csv",
    }
    given |= {"runs=/me/x/seed=1/r,/me/x/seed=2/r": "runs=.../seed=1/r,.../seed=2/r", "file=x/y/z": "file=.../y/z"}
    monkeypatch.setattr(sys, "argv", ["/home/me/bench", "tests/test_fuzz.py", *given])
    expected = " ".join(["python -m pytest tests/test_fuzz.py", *filter(None, given.values())])
    assert provenance("python -m pytest")["command"] == expected


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    assert write_json(path, {"a": 1}) == write_json(path, {"a": [math.nan, -math.inf, 2.0]}) == path
    with suppress(RuntimeError), atomic_write(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text(), parse_constant=repr) == {"a": [None, None, 2.0]}
    assert list(path.parent.iterdir()) == [path]
    with atomic_write(path) as first, atomic_write(path) as second:
        first.write_text("first")
        second.write_text("second")
        assert {first.suffix, second.suffix} == {".json"}, "by which libraries choose the format"
    assert path.read_text() == "first" and list(path.parent.iterdir()) == [path], "it was finished last"


# -- results of benchmarks --------------------------------------------------------------------------------------------


def test_a_benchmarks_figures_are_kept_in_a_folder_for_each_kind_of_card_and_one_for_all_cpus(tmp_path: Path) -> None:
    path = store.write_benchmark("sim", "NVIDIA H200", {"figures": 1}, tmp_path, command="pytest")
    assert path == tmp_path / "h200" / "sim.json"
    stored = json.loads(path.read_text())
    assert stored.items() >= {"benchmark": "sim", "hardware": "NVIDIA H200", "figures": 1}.items()
    assert stored["command"].startswith("pytest")
    folders = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100-sxm4-80gb"}
    folders |= {"NVIDIA H200 x2": "h200-x2", "NVIDIA H100 80GB HBM3 x2": "h100-x2"}
    folders |= {"GeForce RTX 4090": "rtx-4090", "AMD Instinct MI300X (OAM)": "instinct-mi300x-oam"}
    folders |= {"AMD EPYC 9654, 96 cores": "cpu", "Intel Xeon": "cpu"}
    assert {hardware: store.slug(hardware) for hardware in folders} == folders
