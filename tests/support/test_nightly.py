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
        assert (ROOT / module).read_text().count(entry.get("before", "")) == 1 or name == "mutants", entry["before"]
    for test in {test for entry in entries.values() for test in entry["tests"]}:
        file, _, function = test.partition("::")
        source = file_of_test(file).read_text()
        assert f"def {function.partition('[')[0]}(" in source if function else source, test


def test_survivors_are_judged_again_beside_those_that_were_killed() -> None:
    """Of 10, three survived: the line of one is gone, one is killed now, and one still survives."""
    import mutate  # it loads a parser
    from mutations import Mutant

    before = {
        "mutants": 90,
        "judged": 10,
        "killed": 6,
        "equivalent": 1,
        "survivors": ["3: a -> b", "4: c -> d", "9: gone -> g"],
    }
    found = [Mutant(3, "a", "b", ""), Mutant(5, "c", "d", ""), Mutant(5, "c", "e", "")]
    assert mutate.survivors_of(before, found) == found[:2]
    now = {"mutants": 88, "judged": 2, "killed": 1, "equivalent": 0, "survived": 1, "survivors": ["5: c -> d"]}
    assert mutate.add_to(before, now) == {**now, "judged": 9, "killed": 7, "equivalent": 1}
    assert mutate.add_to(None, now) is now


def test_a_sample_is_one_mutant_of_each_few_and_others_by_its_draw() -> None:
    from mutations import Mutant, sample

    found = [Mutant(line, "", "", "") for line in range(90)]
    samples = [[mutant.line for mutant in sample(found, 30, draw)] for draw in (1, 1, 2)]
    assert all([line // 3 for line in lines] == list(range(30)) for lines in samples)
    assert samples[0] == samples[1] != samples[2]
    assert sample(found, 0) == sample(found, 100) == found


def record(folder: Path, cases: list[str]) -> dict[str, Any]:
    """What the file says after one process has drawn these cases, the first of which fails."""
    tally = Tally("cases", len(cases), "drawn", str(folder))
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
    tally = Tally("cases", 3, "drawn", str(tmp_path))
    with tally.found("one"):
        tally.count({}, {})
    tally.count({}, {})
    with pytest.raises(KeyboardInterrupt), tally.found("two"):
        raise KeyboardInterrupt
    assert json.loads((tmp_path / "cpu" / "drawn.json").read_text())["cases"] == 2


def test_a_process_of_several_knows_the_whole_command(request: pytest.FixtureRequest) -> None:
    given = getattr(request.config, "workerinput", {"mainargv": sys.argv})["mainargv"]
    assert sys.argv == given and sys.argv[1:]
