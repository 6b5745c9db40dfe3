"""`experiments.check` of a policy: its verdicts, its status, and the page of properties."""

import pytest
from places import ROOT
from test_check import CHUNK, NEEDED, few_scenarios

from cbatch import ConfigError, Limits, Plan, Request, View
from experiments.check.__main__ import main
from experiments.check.properties import NAMES, PROPERTIES
from experiments.check.scenario import Arrival, Scenario
from experiments.check.search import search
from experiments.settings.compose import policy_names
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

# -- the command ------------------------------------------------------------------------------------------------------


class Uncopied(Orca):
    """Cannot be copied: the command builds another one for each workload."""

    def __init__(self) -> None:
        self.served = 0
        self.rank = lambda: self.served

    def plan(self, view: View) -> Plan:
        self.served += self.rank() == self.served
        assert self.served <= 200, "served another workload before"
        return super().plan(view)


class Crowded(Orca):
    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        assert len(plan) < 2
        return plan


class Closed(Orca):
    def on_arrival(self, request: Request) -> None:
        raise ValueError("no request may enter")


class Refusing(Orca):
    def check(self, limits: Limits) -> None:
        raise ConfigError("give more")


@pytest.mark.parametrize(
    ("kind", "status", "verdicts"),
    [
        (Uncopied, 0, {"legal": "yes", "ends": "yes"}),
        (Crowded, 1, {"legal": "NO", "kv": "yes", "ends": "yes"}),
        (Closed, 1, {"legal": "NO", "kv": "-", "ends": "-"}),  # no run shows whether runs end
        (Refusing, 2, {}),
    ],
)
def test_the_command_judges_a_policy_from_outside(
    kind: type,
    status: int,
    verdicts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenarios = few_scenarios(CHUNK)[::3]
    monkeypatch.setattr("experiments.check.__main__.tiny_scenarios", lambda chunk: scenarios)
    assert main([f"policy={__name__}.{kind.__name__}", "random=0", "thorough=on"]) == status
    printed, error = capsys.readouterr()
    assert status == 2 or (printed.startswith(f"{kind.__name__}, ") and error == ""), "neither a chunk nor progress"
    assert f", {len(scenarios):,} tiny workloads: " in printed.splitlines()[0], "said before the search"
    words = [line.split() for line in printed.splitlines()]
    printed_verdicts = {line[0]: line[1] for line in words if line and line[0] in NAMES}
    assert {key: printed_verdicts[key] for key in verdicts} == verdicts
    failed = [name for name in verdicts if verdicts[name] == "NO"]
    last = [*printed.splitlines(), ""][-1 if status == 2 else -2]
    assert status == 2 or last.startswith("FAILED: " if failed else "no counterexample to legal, kv, ends")
    assert {*failed} <= {*last.removeprefix("FAILED: ").split(", ")}
    assert ("no counterexample among" in printed) is ("yes" in verdicts.values())
    assert (f"refuses {len(scenarios):,} of {len(scenarios):,} workloads" in error) is (kind is Refusing)


@pytest.mark.parametrize(("require", "status"), [("fair,stall_free", 0), ("bounded_tbt", 1)])
def test_the_status_tells_whether_what_is_required_holds(
    require: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line repeats the status in words."""
    monkeypatch.setattr("experiments.check.__main__.tiny_scenarios", few_scenarios)
    assert main(["policy=orca", f"require={require}", "random=0", "thorough=on"]) == status
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"bounded_tbt      {'NO' if status else 'no'} ") for line in lines)
    assert last == (
        "FAILED: bounded_tbt" if status else "no counterexample to legal, kv, ends, steady, fair, stall_free"
    )


def test_the_page_of_properties_has_a_row_for_each_policy_and_a_column_for_each_property() -> None:
    page = (ROOT / "docs" / "policies" / "properties.md").read_text()
    head, _, *rows = [line.split("`")[1::2] for line in page.splitlines() if line.startswith("|")]
    assert head == list(NAMES) and [name for [name] in rows] == policy_names()


class Forgetful(Orca):
    """Computes a waiting request's prompt whole, whatever of it is cached."""

    steady = False

    def plan(self, view: View) -> Plan:
        for request in [*view.running, *view.waiting]:
            if view.kv.num_lacking(request, request.max_tokens) <= view.kv.num_free:
                count = request.num_ready if request in view.running else request.num_prompt_tokens
                return Plan([(request, count)])
        return Plan()


def test_a_policy_may_fail_with_a_prefix_cache_alone() -> None:
    """The second of two requests that begin alike has nothing but its last block to compute."""
    tiny = [Scenario((Arrival(9, 1, 0), Arrival(9, 1, 5)), 1, 20, 9, 2, asynchronous=False)]
    kinds = {"num_random": 0, "tiny": tiny}
    assert search(Forgetful(), NEEDED, CHUNK, **kinds) == dict.fromkeys(["legal", "kv", "ends"])  # type: ignore[arg-type]
    counterexample = search(Forgetful(), NEEDED, CHUNK, **kinds, eviction=LRU())["legal"]  # type: ignore[arg-type]
    assert counterexample is not None and "prefix_cache=true eviction=lru: prompts 2 and 3 begin alike" in str(
        counterexample
    )
    assert "request 1" in counterexample.violation.why
    held = search(
        SarathiServe(Fixed(CHUNK)), PROPERTIES, CHUNK, num_random=0, tiny=few_scenarios(CHUNK), eviction=LRU()
    )
    assert held == dict.fromkeys(NAMES)


@pytest.mark.parametrize("k", [0, 5])
def test_a_rule_is_checked_with_drafts(
    k: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says whether the rule made any."""
    monkeypatch.setattr("experiments.check.__main__.tiny_scenarios", few_scenarios)
    assert main(["policy=orca", f"drafting=fixed(k={k})", "random=0", "thorough=on"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "drafts were planned" in line]
    assert line.startswith("0 drafts were planned, at most 0 of a decode") is (k == 0)
