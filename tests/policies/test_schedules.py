"""Golden schedules, the cases of `schedules.yaml`: small enough to check by hand against the paper."""

import inspect
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import yaml
from unit_machine import golden

import policies
from cbatch import SLO

CASES = yaml.safe_load(Path(__file__).with_name("schedules.yaml").read_text())
NAMES: dict[str, Any] = {
    "SLO": SLO,
    "inf": float("inf"),
    "of_tokens": lambda shape: float(shape.num_tokens),  # an iteration takes as many seconds as it has tokens
    "by_tokens": lambda shape: shape.num_tokens / 100,
}
for module in iter_modules(policies.__path__, "policies."):
    NAMES.update(inspect.getmembers(import_module(module.name), inspect.isclass))


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{case['case']}" for place, case in enumerate(CASES)])
def test_a_policy_makes_its_golden_schedule(case: dict[str, str]) -> None:
    machine = eval(f"dict({case.get('machine', '')})", NAMES)
    made = golden(eval(case["policy"], NAMES), case["requests"], **machine)
    ends = ", ".join(f"{name} {seconds:g}" for name, seconds in made.ends.items())
    assert (made.schedule, ends) == (case["schedule"], case["ends"]), case.get("why", "")
    if "counters" in case:
        assert made.policy.counters == pytest.approx(eval(case["counters"]))
