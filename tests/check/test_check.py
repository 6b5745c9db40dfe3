"""The properties that the papers claim for their policies, found out; and policies that lack what every policy needs."""

import random
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from places import ROOT

from cbatch import BatchShape, ConfigError, Plan, Policy, View
from cbatch.policy import copy_policy
from cbatch.stall import Patience
from experiments.check.__main__ import _policy, main
from experiments.check.properties import NAMES, PROPERTIES
from experiments.check.scenario import EVEN_COST, Ask, Scenario, play
from experiments.check.search import Found, describe_sizes, search, tight_scenarios, tiny_scenarios
from experiments.check.verdicts import BEGIN, table_of, text
from experiments.settings.composition import policy_names
from experiments.settings.error_lines import CONFIG_FOLDER
from policies.chunking import Fixed, PDAware, TileAligned
from policies.length_order import LengthOrder
from policies.longest_first import LongestFirst
from policies.orca import Orca
from policies.predictors import Predictor
from policies.prefill_first import PrefillFirst
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

CHUNK = 4
NEEDED = {prop.name for prop in PROPERTIES if prop.needed}

LACKING: list[tuple[Policy, set[str]]] = [
    (RequestLevel(), {"iteration_level", "stall_free", "bounded_tbt"}),
    (Orca(), {"bounded_tbt"}),
    (PrefillFirst(), {"stall_free", "bounded_tbt"}),
    (Sarathi(Fixed(CHUNK)), set()),
    (Sarathi(TileAligned(CHUNK)), set()),
    (Sarathi(PDAware()), {"bounded_tbt"}),  # chooses its own chunk
    (SarathiServe(Fixed(CHUNK)), set()),
    (SarathiServe(TileAligned(CHUNK)), set()),
    (LongestFirst(TileAligned(CHUNK)), {"fair"}),  # as its docstring says
]


@cache
def few_scenarios(chunk: int) -> list[Scenario]:
    """Some of the tiny scenarios; the command takes them all."""
    return list(islice(tiny_scenarios(chunk), 0, None, 12))


def lacking(found: Found) -> set[str]:
    return {name for name, counterexample in found.items() if counterexample is not None}


@pytest.mark.parametrize(("policy", "expected"), LACKING, ids=lambda value: type(value).__name__)
def test_policies_have_the_properties_that_their_papers_claim(policy: Policy, expected: set[str]) -> None:
    assert lacking(search(policy, PROPERTIES, CHUNK, num_random=10, tiny=few_scenarios(CHUNK))) == expected


BUILT_IN = sorted(path.stem for path in (CONFIG_FOLDER / "policy").glob("*.yaml") if path.stem != "external")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_policy_has_the_properties_that_every_policy_needs(name: str) -> None:
    policy, chunk, _ = _policy([f"policy={name}"])
    needed = [prop for prop in PROPERTIES if prop.needed]
    few = [*islice(tiny_scenarios(chunk), 0, None, 1500), *islice(tight_scenarios(chunk), 0, None, 2)]
    assert lacking(search(policy, needed, chunk, num_random=0, tiny=few)) == set()


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        (
            "qoserve",
            Scenario((Ask(15, 1, 0), Ask(9, 1, 1)), 2, 16, 2, 8, False),
        ),  # a prompt begun, another not admitted
        (
            "slai",
            Scenario((Ask(1, 3, 0), Ask(9, 1, 2)), 2, 10, 6, 2, True),
        ),  # a prompt preempted for a decode came back first
    ],
    ids=["qoserve", "slai"],
)
def test_schedules_that_once_had_no_end(name: str, scenario: Scenario) -> None:
    history = play(_policy([f"policy={name}"])[0], scenario)
    assert (history.error, history.endless) == (None, "")


class Twice:
    """Names a request twice once two are there."""

    def plan(self, view: View) -> Plan:
        plan = Orca().plan(view)
        return Plan([*plan, *plan]) if len(plan) > 1 else plan


class Forever:
    """Asks to be woken for ever."""

    def plan(self, view: View) -> Plan:
        return Plan(wake_at=view.now + 1)


class DecodesTheVictim:
    """Preempts the newest request and names it beside the decodes."""

    def plan(self, view: View) -> Plan:
        plan = Orca().plan(view)
        plan.preempt = [request for request in plan.requests if request in view.running][1:]
        return plan


class AssignsWakeTime:
    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.wake_at = view.now + 1
        return plan.build()


class Greedy:
    """Takes whatever is ready, whether or not it fits."""

    def plan(self, view: View) -> Plan:
        return Plan((request, request.num_ready) for request in [*view.running, *view.waiting][: view.limits.max_batch])


class Restless:
    """Preempts whatever runs."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in list(view.running):
            plan.preempt(request)
        for request in view.waiting:
            plan.add(request, 1)
        return plan.build()


class Forgetful:
    """Never computes a second token."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in view.waiting:
            plan.add(request)
        return plan.build()


class Hesitant(Orca):
    """Lets every second chance pass."""

    def plan(self, view: View) -> Plan:
        return Plan(wake_at=view.now + 1) if round(view.now) % 2 == 0 and not view.num_in_flight else super().plan(view)


class Dice(Orca):
    """Draws who comes first, without a seed of its own."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return Plan(random.sample(list(plan), len(plan)))


class Raising(Orca):
    def plan(self, view: View) -> Plan:
        return super().plan(view) if len(view.waiting) < 2 else {}["nothing"]


@pytest.mark.parametrize(
    ("policy", "name", "says", "num_requests"),
    [
        (Twice(), "legal", "rule: a request is named once in a plan", 2),
        (
            DecodesTheVictim(),
            "legal",
            "(it is preempted or rejected, and named again); rule: a request is named once",
            2,
        ),
        (
            AssignsWakeTime(),
            "legal",
            "a PlanBuilder has no attribute wake_at; give build(wake_at=...) (test_check.py:",
            1,
        ),
        (Greedy(), "kv", "rule: the KV blocks that a plan takes must be free", 2),
        (Restless(), "ends", "requests are planned and preempted again and again, and none ends", 1),
        (Forever(), "ends", "policy Forever, iteration 0: 50 empty plans in a row with 1 waiting and 0 running", 1),
        (Forgetful(), "ends", "policy Forgetful, iteration 1: empty plan with 0 waiting and 1 running", 1),
        (Hesitant(), "work_conserving", "nothing is computed, although any waiting request would fit", 1),
        (Dice(), "deterministic", "a second run decides", 3),
        (Raising(), "legal", "policy Raising, iteration 0: plan() raised KeyError: 'nothing'", 2),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "plan") else None,
)
def test_the_smallest_schedule_that_denies_a_property_is_found(
    policy: Policy, name: str, says: str, num_requests: int
) -> None:
    asked = [prop for prop in PROPERTIES if prop.name == name]
    counterexample = search(policy, asked, CHUNK, num_random=0)[name]
    assert counterexample is not None
    assert says in counterexample.violation.why
    assert len(counterexample.history.scenario.asks) == num_requests


class ShortestFirst:
    """Reserves nothing, so that several half-computed prompts hold the whole KV cache and none can go on."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in sorted([*view.prefilling, *view.waiting], key=lambda request: request.num_ready):
            if plan.num_tokens < CHUNK:
                plan.add(request, CHUNK - plan.num_tokens)
        return plan.build()


def test_a_deadlock_of_half_computed_prompts_is_found() -> None:
    found = search(ShortestFirst(), PROPERTIES[:3], CHUNK, num_random=0, tiny=tight_scenarios(CHUNK))["ends"]
    assert found is not None
    assert "empty plan with 0 waiting and 2 running requests, nothing in flight" in found.violation.why
    assert found.history.scenario in tiny_scenarios(CHUNK)


def test_a_policy_that_waits_ends_with_more_patience() -> None:
    class Late(Orca):
        """Begins after a minute."""

        def plan(self, view: View) -> Plan:
            return super().plan(view) if view.now >= 60 else Plan(wake_at=view.now + 1)

    asked = [prop for prop in PROPERTIES if prop.name == "ends"]
    few = list(islice(tiny_scenarios(CHUNK), 3))
    for empty_plans, ends in ((60, True), (59, False)):
        found = search(Late(), asked, CHUNK, num_random=0, tiny=few, patience=Patience(empty_plans=empty_plans))
        assert (found["ends"] is None) is ends


def test_a_denial_by_a_random_scenario_is_shrunk() -> None:
    class BadAtFive(Orca):
        """Stumbles over prompts of 13 tokens and more."""

        def plan(self, view: View) -> Plan:
            plan = super().plan(view)
            assert all(count <= 12 for count in plan.num_tokens)
            return plan

    counterexample = search(BadAtFive(), PROPERTIES[:1], CHUNK, num_random=100, tiny=[])["legal"]
    assert counterexample is not None
    assert counterexample.history.scenario.asks == (Ask(13, 1, 0),)


def test_shortest_job_first_starves_a_longer_output() -> None:
    """Beside a stream of outputs of 2 tokens, one of 3 waits for all of them."""
    streams = [scenario for scenario in tiny_scenarios(CHUNK) if len(scenario.asks) > 3]
    found = search(LengthOrder(TileAligned(CHUNK), Predictor()), PROPERTIES, CHUNK, num_random=0, tiny=streams)
    assert lacking(found) == {"fair"} and found["fair"] is not None
    assert found["fair"].history.scenario.asks[1].output == 3


def test_prefill_first_stalls_as_its_paper_says() -> None:
    """The smallest schedule: a second prompt arrives while the first request decodes."""
    asked = [prop for prop in PROPERTIES if prop.name == "stall_free"]
    found = search(PrefillFirst(), asked, CHUNK, num_random=0)
    assert text(found, asked).splitlines()[2:] == [
        "    batch=2 max_tokens=4 kv_tokens=4 block_size=2 runtime=sync",
        "    request 0: 1 prompt and 2 new tokens, from iteration 0 on",
        "    request 1: 1 prompt and 1 new tokens, from iteration 1 on",
        "    iteration 0: 0:1",
        "    iteration 1: 1:1  <- request 0 has a token to compute and is left out",
    ]


def test_a_scenario_is_served_by_a_fresh_copy() -> None:
    policy = RequestLevel()
    scenario = Scenario((Ask(3, 2, 0), Ask(3, 2, 0)), 2, 10, 10, 1, asynchronous=False)
    assert play(policy, scenario).decisions == play(policy, scenario).decisions
    assert policy._prompts_left == []


def test_a_policy_that_cannot_be_copied_is_refused() -> None:
    class Open(Orca):
        def __init__(self) -> None:
            self.lines = (line for line in "ab")

    with pytest.raises(ConfigError, match="policy Open cannot be copied"):
        search(Open(), PROPERTIES, CHUNK, num_random=0)


def test_a_function_over_the_original_is_refused_in_copies() -> None:
    class Ranked(Orca):
        def __init__(self, over_self: bool) -> None:
            self.served = 0
            self.rank = (lambda request: self.served) if over_self else (lambda request: 0)

    said = (
        "policy Ranked: self.rank is a function over self, which in a copy still reads the original's attributes; make"
    )
    with pytest.raises(ConfigError, match=said):
        search(Ranked(over_self=True), PROPERTIES, CHUNK, num_random=0)
    assert copy_policy(Ranked(over_self=False)).served == 0


class Late(Orca):
    """Computes nothing for the newest request once it has waited, or run, for 5 s."""

    steady = True

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in [*view.running, *view.waiting]:
            if view.now - request.arrival_time < 5 or request.id == 0:
                plan.add(request, reserve=request.max_tokens)
        return plan.build()


def test_a_rule_in_seconds_is_not_steady() -> None:
    """The iterations of all workloads together last less than 5 s, so that no plan of them shows it."""
    steady = [prop for prop in PROPERTIES if prop.name == "steady"]
    found = search(Late(), steady, CHUNK, num_random=0, tiny=few_scenarios(CHUNK))["steady"]
    assert (
        found is not None
        and "is followed by nothing if 900 s pass, and nothing else has changed" in found.violation.why
    )


def check_mine(module: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, num: int | None = None) -> int:
    """The status of a check of the class `Mine` in a module outside the repository, on few workloads, or the first `num` of them."""
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("experiments.check.search.tiny_scenarios", lambda chunk: few_scenarios(chunk)[:num])
    return main(["policy=external", f"policy._target_={module}.Mine", "random=0"])


UNCOPIED = """
from policies.orca import Orca

class Mine(Orca):
    def __init__(self):
        self.served = 0
        self.rank = lambda request: self.served
        self.lines = (line for line in "ab")

    def plan(self, view):
        self.served += self.rank(None) == self.served
        if self.served > 200:
            raise ValueError("served another workload before")
        return super().plan(view)
"""


def test_a_policy_that_cannot_be_copied_is_built_anew_for_each_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_mine("uncopied", UNCOPIED, tmp_path, monkeypatch, num=100) == 0
    assert "legal            yes" in capsys.readouterr().out


MINE = """
from policies.orca import Orca

class Mine(Orca):
    def plan(self, view):
        plan = super().plan(view)
        if len(plan) > 1:
            raise ValueError("too many")
        return plan
"""


def test_the_command_judges_policies_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_mine("mine_to_check", MINE, tmp_path, monkeypatch) == 1
    printed = capsys.readouterr().out
    head = printed.splitlines()[0]
    assert head.startswith("Mine with chunk=4, ")
    assert head.endswith(" workloads: prompts of 1 to 31 tokens, outputs of 1 to 12, about 1 ms per iteration")
    assert "legal            NO   every plan keeps the rules" in printed
    assert "plan() raised ValueError: too many" in printed
    assert "kv               yes" in printed


RAISES_FIRST = """
from policies.orca import Orca

class Mine(Orca):
    def on_arrival(self, request):
        raise ValueError("nobody may come in")
"""


def test_what_no_run_could_show_is_not_said_to_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_mine("raises_first", RAISES_FIRST, tmp_path, monkeypatch, num=50) == 1
    printed = capsys.readouterr().out
    assert "legal            NO   every plan keeps the rules" in printed
    assert "ends             -    every run ends" in printed and " yes " not in printed
    assert printed.endswith("\n-: not tested, as no run reached its end\n")


PICKY = """
from cbatch import ConfigError
from policies.orca import Orca

class Mine(Orca):
    def check(self, limits):
        if limits.max_tokens < LEAST:
            raise ConfigError(f"give LEAST tokens, not {limits.max_tokens}")
"""


@pytest.mark.parametrize("least", [8, 800])
def test_workloads_that_a_policy_refuses_are_left_out_and_counted(
    least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They say nothing of the policy; one that takes none has no verdict."""
    monkeypatch.setattr("experiments.check.__main__._PAUSE", 0.0)
    status = check_mine(f"picky_{least}", PICKY.replace("LEAST", str(least)), tmp_path, monkeypatch)
    printed, progress = capsys.readouterr()
    tried = few_scenarios(CHUNK)
    refused = sum(scenario.max_tokens < least for scenario in tried)
    said = (
        f'its check refuses {refused:,} of {len(tried):,} workloads, the first time with "give {least} tokens, not 4"'
    )
    assert status == (0 if refused < len(tried) else 2)
    assert said in (printed if status == 0 else progress)
    assert ("legal            yes" in printed) is (status == 0)
    assert "\n500 workloads so far\n" in progress, "in a pipe, too, one sees that it goes on"


@pytest.mark.parametrize("chunk", [1, CHUNK])
def test_no_workload_is_larger_than_the_verdict_says(chunk: int) -> None:
    asks = [ask for scenario in islice(tiny_scenarios(chunk), 0, None, 3) for ask in scenario.asks]
    assert describe_sizes(chunk).startswith(f"prompts of 1 to {max(ask.prompt for ask in asks)} tokens, ")
    assert max(ask.output for ask in asks) <= 12
    assert 1e-3 < EVEN_COST.predict(BatchShape(num_decodes=8 * chunk)) < 2e-3


@pytest.mark.parametrize(("require", "status"), [("fair,stall_free", 0), ("bounded_tbt", 1)])
def test_the_status_tells_whether_what_is_required_holds(
    require: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.check.search.tiny_scenarios", lambda chunk: few_scenarios(chunk)[::5])
    assert main(["policy=orca", f"require={require}", "random=0"]) == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("policy=orka", "error: policy=orka: no such policy; did you mean orca?"),
        ("policy=orca require=stalfree", "error: require=stalfree: no such property; did you mean stall_free?"),
        ("policy=orca random=many", "error: random=many: give a whole number"),
        ("policy=orca policy=sarathi", "error: policy: is given twice, as orca and as sarathi; give it once\n"),
        ("chunk=0", "error: chunk=0: give a whole number of tokens"),
        ("policy=external", "error: policy._target_: has no value"),
        ("policy.chunk=3", "error: policy.chunk: no such key"),
        ("policy=orca batch=8", "error: batch: has no effect on a check, which takes policy, chunking, predictor, "),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1


def test_names_of_properties_are_different() -> None:
    assert len(set(NAMES)) == len(PROPERTIES) and {"legal", "kv", "ends"} == NEEDED


def test_the_table_has_a_row_for_each_policy_and_says_no_where_a_schedule_denies(tmp_path: Path) -> None:
    found = search(PrefillFirst(), PROPERTIES, CHUNK, num_random=0, tiny=few_scenarios(CHUNK)[::5])
    head, _, row = table_of({"prefill_first": found}).splitlines()
    verdicts = dict(zip(head.replace("`", "").split("|"), row.replace("`", "").split("|"), strict=True))
    stripped = {name.strip(): verdict.strip() for name, verdict in verdicts.items()}
    assert {name for name, verdict in stripped.items() if verdict == "no"} == {"stall_free", "bounded_tbt"}
    page = ROOT / "docs" / "policies.md"
    written = page.read_text().partition(BEGIN)[2].partition("<!-- end -->")[0]
    assert [line.split("`")[1] for line in written.strip().splitlines()[2:]] == policy_names()
    assert all(f"`{prop.name}`" in written for prop in PROPERTIES)


def test_a_file_without_a_place_for_the_table_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"table={tmp_path / 'none.md'}"]) == 2
    assert main([f"table={tmp_path / 'none.md'}", "policy=orca"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "needs the lines '<!-- begin:" in first and "leave out policy=orca" in second
