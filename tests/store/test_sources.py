"""Results know which code and files made them; a resumed sweep does not take those of other code for its own."""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import markupsafe
import pytest
from commands import QUICK, ROOT, command, summary

from experiments.store import sources
from experiments.store.runs import read_runs
from experiments.store.sources import differences, sources_of

POLICY = """
from policies.orca import Orca

class Mine(Orca):
    def plan(self, view):
        from limits import MOST
        plan = view.plan()
        for request in [*view.running, *view.waiting][:MOST]:
            plan.add(request)
        return plan.build()
"""
MINE = "policy=mine.Mine"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(POLICY)
    (tmp_path / "limits.py").write_text("MOST = 4\n")
    (tmp_path / "profile.json").write_text((ROOT / "cbatch" / "sim" / "profiles" / "h200.json").read_text())
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "100,20\n" * 20)
    return tmp_path


def test_a_result_names_its_policy_with_what_it_imports_and_no_other(folder: Path) -> None:
    once = ("run", "output=out", "hardware=profile.json", MINE, *QUICK)
    assert command(*once, cwd=folder).returncode == 0
    about = summary(folder / "out")["about"]
    assert set(about["code"]["own"]) == {"mine", "limits", "policies", "policies.orca", "profile.json"}
    assert len(about["code"]["framework"]) == 16
    (folder / "limits.py").write_text("MOST = 2\n")
    done = command(*once, cwd=folder)
    assert done.returncode == 2 and done.stderr.startswith("error: out holds this run, made by other code (limits); ")
    kept = command(*once, "other_code=keep", cwd=folder)
    assert kept.stdout.endswith("out holds this run already, by other code (limits); remove it to run again\n")
    assert summary(folder / "out")["about"] == about


@pytest.mark.long
def test_files_that_a_finished_run_lacks_are_named_or_made(tmp_path: Path) -> None:
    """A single run may be of real tokens, whose figures would be other ones; a sweep runs again."""
    once, sweep = ("run", "output=out", "policy=orca", *QUICK), ("run", "-m", "sweep=s", "policy=orca,vtc", *QUICK)
    for given in (once, sweep):
        assert command(*given, "tables=false", cwd=tmp_path).returncode == 0
        assert "finished before\n" in (done := command(*given, cwd=tmp_path)).stdout or "already" in done.stdout
    for asked, file in {"decisions=true": "decisions.jsonl.gz", "tables=true": "requests.csv"}.items():
        refused = command(*once, asked, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.startswith(f"error: out holds this run without {file}; ")
    both = ("decisions=true", "timeline=true")
    assert command(*sweep, *both, cwd=tmp_path).stdout.count(": runs again, lacks decisions.jsonl.gz\n") == 2
    assert command(*sweep, *both, cwd=tmp_path).stdout.count(": finished before\n") == 2


@pytest.mark.parametrize(
    "changed",
    [
        *("cbatch/state.py", "experiments/setup/pools.py", "experiments/text.py"),
        *("experiments/trials/load.py", "experiments/capacity/simulation.py"),
    ],
)
def test_the_framework_is_the_code_that_makes_a_record(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("cbatch", "experiments"):
        copytree(ROOT / part, tmp_path / part, ignore=ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    before = sources._framework.__wrapped__()
    (tmp_path / changed).write_text("")
    assert sources._framework.__wrapped__() != before


def test_a_router_that_is_named_counts() -> None:
    """The router of the cluster, and that of a pool."""
    backend = {"router": "dynamo", "pools": {"a": {"router": "preble"}, "b": {"router": {"_target_": "mine.Mine"}}}}
    assert {"policies.routers.dynamo", "policies.routers.preble"} <= set(sources_of({"backend": backend})["own"])
    assert sources_of({"backend": {"router": {"_target_": "cbatch.cluster.RoundRobin"}}})["own"] == {}


def test_an_eviction_counts_where_there_is_a_prefix_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    settings = {"eviction": {"_target_": "mine.Mine"}}
    assert {"mine", "limits"} <= set(sources_of({**settings, "prefix_cache": True})["own"])
    assert "mine" not in sources_of({**settings, "prefix_cache": False})["own"]


def test_modules_of_packages_without_a_file_of_their_own_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {
        "parcel/policy.py": "import parcel.parts.sizes\nfrom parcel.parts import more",
        "parcel/parts/sizes.py": "",
        "parcel/parts/more.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = sources_of({"policy": {"_target_": "parcel.policy.Mine"}})["own"]
    assert {*own} == {"parcel.policy", "parcel.parts.sizes", "parcel.parts.more"}


def test_a_compiled_module_is_hashed_and_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy in C or Cython, or one that imports such a module: the bytes of an extension are no source."""
    [extension] = Path(markupsafe.__file__).parent.glob("_speedups.*" + EXTENSION_SUFFIXES[-1])
    (folder / extension.name).write_bytes(extension.read_bytes())
    (folder / "mine.py").write_text(f"import _speedups\n{POLICY}")
    monkeypatch.syspath_prepend(folder)
    names = {"mine", "limits", "_speedups", "policies", "policies.orca"}
    assert set(sources_of({"policy": {"_target_": "mine.Mine"}})["own"]) == names
    settings = {"policy": {"_target_": "_speedups.Mine"}}
    before = sources_of(settings)
    with (folder / extension.name).open("ab") as file:
        file.write(b"\0")
    assert set(before["own"]) == {"_speedups"} and differences(before, sources_of(settings)) == "_speedups"


@pytest.mark.parametrize(
    ("edited", "name"),
    [
        ("mine.py", "mine"),
        ("limits.py", "limits"),
        ("profile.json", "profile.json"),
        ("lengths.csv", "lengths.csv"),
        ("tiny/config.json", "tiny"),
    ],
)
def test_whatever_is_edited_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, edited: str, name: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    settings = {
        "policy": {"_target_": "mine.Mine"},
        "workload": {"lengths": [{"path": "lengths.csv"}]},
        "hardware": "profile.json",
        "model": {"path": "tiny"},
        "output": "notes.txt",
    }
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "notes.txt").touch()
    before = sources_of(settings)
    assert sources_of(settings) == before
    with (folder / edited).open("a") as file:
        file.write("\n")
    assert differences(before, sources_of(settings)) == name


SWEEP = ("-m", "sweep=grid", "batch=18")


@pytest.mark.long
def test_a_resumed_sweep_runs_again_what_other_code_made_unless_it_is_to_be_kept(folder: Path) -> None:
    sweep = ("run", *SWEEP, MINE, *QUICK)
    first = command(*sweep, cwd=folder)
    assert (first.returncode, first.stderr) == (0, "")
    assert command(*sweep, cwd=folder).stdout.count(": finished before\n") == 1
    (folder / "limits.py").write_text("MOST = 2\n")
    kept = command(*sweep, "other_code=keep", cwd=folder)
    assert kept.stdout.count(": finished before, by other code (limits)\n") == 1
    again = command(*sweep, cwd=folder)
    assert again.stdout.count(": runs again, was made by other code (limits)\n") == 1
    (row,) = read_runs(folder / "multirun" / "grid").to_dict("records")
    assert row["iterations.batch_requests"] <= 2


def test_a_file_that_is_edited_after_its_import_counts_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep in one process goes on with the code that it has loaded."""
    file = tmp_path / "loaded_policy.py"
    file.write_text("class Mine: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: dict[str, Any] = {"policy": {"_target_": "loaded_policy.Mine"}}
    before = sources_of(settings)
    __import__("loaded_policy")
    try:
        assert sources_of(settings) == before
        file.write_text("class Mine: pass\n")
        assert sources_of(settings) == before
    finally:
        del sys.modules["loaded_policy"]
    assert differences(before, sources_of(settings)) == "loaded_policy"
