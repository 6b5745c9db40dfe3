"""The list of planted faults: each still fits the code, so that `make test-nightly` can plant it."""

from typing import Any

import pytest
import yaml
from places import ROOT, file_of_test

FAULTS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "support" / "planted.yaml").read_text())


@pytest.mark.parametrize("what", FAULTS)
def test_a_planted_fault_fits_the_code(what: str) -> None:
    fault = FAULTS[what]
    source = (ROOT / fault["module"]).read_text()
    assert source.count(fault["before"]) == 1
    compile(source.replace(fault["before"], fault["after"]), fault["module"], "exec")
    for tests in fault["tests"]:
        file, *name = tests.split("::")
        assert not name or f"def {name[0]}(" in file_of_test(file).read_text()
