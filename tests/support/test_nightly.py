"""What `make test-nightly` and `make mutants` read and write: lists of tests, and what drawn cases have counted."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT, file_of_test
from tally import Tally


@pytest.mark.parametrize("name", ["mutants", "planted"])
def test_modules_and_tests_of_mutants_exist(name: str) -> None:
    """Else it would be found only after an hour of other modules."""
    entries = yaml.safe_load((ROOT / "tests" / "support" / f"{name}.yaml").read_text())
    modules = [entry.get("module", key) for key, entry in entries.items()]
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    for module, entry in zip(modules, entries.values(), strict=True):
        source = (ROOT / module).read_text()
        if name == "planted":
            assert source.count(entry["before"]) == 1, entry["before"]
            compile(source.replace(entry["before"], entry["after"]), module, "exec")
    for test in {test for entry in entries.values() for test in entry["tests"]}:
        file, _, function = test.partition("::")
        source = file_of_test(file).read_text()
        assert f"def {function.partition('[')[0]}(" in source if function else source, test


def record(folder: Path, cases: list[str]) -> dict[str, Any]:
    """What the file says after one process has drawn these cases, the first of which fails."""
    tally = Tally("cases", "drawn", str(folder))
    with suppress(ZeroDivisionError), tally.found("one"):
        for case in cases:
            tally.count({"tokens": 10}, {"policy": case})
        with tally.failing(cases[0]):
            raise ZeroDivisionError
    with tally.found("another"):
        tally.count({"preemptions": 1}, {"policy": cases[-1], "chunk": 8})
    return json.loads((folder / "cpu" / "drawn.json").read_text())  # type: ignore[no-any-return]


def test_processes_of_one_run_add_up_and_a_new_run_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)
    assert record(tmp_path, ["orca"])["cases"] == record(tmp_path, ["orca"])["cases"] == 2
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", str(tmp_path.name))
    assert record(tmp_path, ["orca", "orca"])["cases"] == 3
    whole = record(tmp_path, ["orca", "lars", "lars"])
    assert (whole["cases"], whole["tokens"], whole["preemptions"]) == (7, 50, 2)
    assert whole["by"] == {"chunk": {"8": 2}, "policy": {"lars": 3, "orca": 4}}
    assert [failure["case"] for failure in whole["failures"]] == ["orca", "orca"]
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", f"{tmp_path.name}-second")
    assert record(tmp_path, ["lars"])["by"] == {"policy": {"lars": 2}, "chunk": {"8": 1}}


def test_a_run_that_is_cut_short_keeps_what_it_has_counted(tmp_path: Path) -> None:
    tally = Tally("cases", "drawn", str(tmp_path))
    with tally.found("one"):
        tally.count({}, {})
    tally.count({}, {})
    with pytest.raises(KeyboardInterrupt), tally.found("two"):
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "cpu" / "drawn.json").read_text())["cases"] == 2


def test_a_process_of_several_knows_the_whole_command(request: pytest.FixtureRequest) -> None:
    given = getattr(request.config, "workerinput", {"mainargv": sys.argv})["mainargv"]
    assert sys.argv == given and sys.argv[1:]
