"""Golden schedules, the cases of `schedules.yaml`: small enough to check by hand against the paper. Settings: `settings.yaml`."""

import inspect
import re
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import yaml
from unit_machine import golden

import policies
from cbatch import SLO, ConfigError, Limits

CASES, SETTINGS = (
    yaml.safe_load(Path(__file__).with_name(name).read_text()) for name in ("schedules.yaml", "settings.yaml")
)
NAMES: dict[str, Any] = {
    "SLO": SLO,
    "inf": float("inf"),
    "of_tokens": lambda shape: float(shape.num_tokens),  # an iteration takes as many seconds as it has tokens
    "by_tokens": lambda shape: shape.num_tokens / 100,
    "Limits": Limits,
    "TIGHT": Limits(4, 100, 100, tile=64),
    "WIDE": Limits(4, 1000, 100, tile=64),
    "FULL": Limits(65, 1000, 100, tile=64),
}
for module in iter_modules(policies.__path__, "policies."):
    if module.name not in ("policies.autoscalers", "policies.drafting"):  # `Fixed` is the chunking
        NAMES.update(inspect.getmembers(import_module(module.name), inspect.isclass))


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{case['case']}" for place, case in enumerate(CASES)])
def test_a_policy_makes_its_golden_schedule(case: dict[str, str]) -> None:
    machine = eval(f"dict({case.get('machine', '')})", NAMES)
    made = golden(eval(case["policy"], NAMES), case["requests"], **machine)
    ends = ", ".join(f"{name} {seconds:g}" for name, seconds in made.ends.items())
    assert (made.schedule, ends) == (case["schedule"], case["ends"]), case.get("why", "")
    if "counters" in case:
        assert made.policy.counters == pytest.approx(eval(case["counters"]))


@pytest.mark.parametrize(("make", "says"), SETTINGS["refused"].items())
def test_settings_out_of_range_are_refused(make: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        eval(make, NAMES)


@pytest.mark.parametrize("make", SETTINGS["taken"])
def test_settings_at_their_limits_are_taken(make: str) -> None:
    eval(make, NAMES)


@pytest.mark.parametrize(("name", "expected"), SETTINGS["defaults"].items())
def test_defaults_are_those_of_the_papers_and_their_code(name: str, expected: str) -> None:
    parameters = inspect.signature(NAMES[name]).parameters.values()
    made = [f"{each.name}={each.default!r}" for each in parameters if each.default is not each.empty]
    assert " ".join(made) == expected
