"""What `make mutants` and the planted faults of `make test-nightly` read: lists of modules and tests."""

import pytest
import yaml
from places import ROOT, file_of_test


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
