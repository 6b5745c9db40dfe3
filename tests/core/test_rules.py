"""The rules of a plan, one by one: the last plan of each list breaks one, sync and async.

Four requests of 8 prompt tokens and 3 of output; 2 places, 10 tokens in an iteration, KV blocks of 4 tokens.
"""

import re
from collections.abc import Callable

import pytest
from schedules import make_engine

from cbatch import Limits, Plan, PlanError, Request, View
from cbatch.plan_check import check_rules

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)
Plans = Callable[[Request, Request, Request, Request], list[Plan]]


class Script:
    """Makes these plans; asks the public rules about the last one before the engine does."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans, self.refusal = plans, ""

    def plan(self, view: View) -> Plan:
        plan = self.plans.pop(0)
        if not self.plans:
            with pytest.raises(PlanError) as caught:
                check_rules(plan, view, "Script")
            self.refusal = str(caught.value)
        return plan


def plan(*entries: tuple[Request, int], **fields: object) -> Plan:
    made = Plan(entries)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("plans", "request_id", "rule"),
    [
        (lambda a, b, c, d: [plan((a, 4), (a, 4))], 0, "(it is named 2 times); rule: a request is named once"),
        (lambda a, b, c, d: [plan((a, 8)), plan((a, 1), preempt=[a])], 0, "a request is named once"),
        (lambda a, b, c, d: [plan((a, 8), reject=[(b, ""), (b, "")])], 1, "a request is named once"),
        (lambda a, b, c, d: [plan((a, 8), preempt=[b])], 1, "(it is waiting); rule: only a running request"),
        (lambda a, b, c, d: [plan((a, 8)), plan((b, 8), reject=[(a, "")])], 0, "(it is running); rule: only a waiting"),
        (lambda a, b, c, d: [plan((a, 9))], 0, "(9 planned, 8 ready); rule: a request computes at least 1 token and"),
        (lambda a, b, c, d: [plan((a, 8), (b, 0))], 1, "(0 planned, 8 ready); rule: a request computes at least 1"),
        (
            lambda a, b, c, d: [plan((a, 1), (b, 1), (c, 1))],
            2,
            "(3 planned); rule: an iteration holds at most max_batch=2",
        ),
        (lambda a, b, c, d: [plan((a, 8), (b, 3))], 1, "(11 planned); rule: an iteration holds at most max_tokens=10"),
        (
            lambda a, b, c, d: [plan((a, 8)), plan((b, 2)), plan((c, 2), (d, 2), preempt=[a])],
            3,
            "(3 with this plan); rule: at most 2 requests are",
        ),
        (lambda a, b, c, d: [plan((a, 8), pad_to=7)], 0, "(pad_to=7, 8 planned, max_tokens=10); rule: pad_to lies"),
        (lambda a, b, c, d: [plan((a, 8), reserve={a: 12})], 0, "(12 tokens reserved, 11 at most); rule: a request"),
        (lambda a, b, c, d: [plan((a, 8), reserve={a: -1})], 0, "(-1 reserved); rule: a request reserves at least 0"),
        (lambda a, b, c, d: [plan((a, 8), reserve={b: 4})], 1, "a reservation belongs to a planned request"),
        (lambda a, b, c, d: [plan((b, 2), reject=[(a, "")]), plan((a, 2))], 0, "(it is finished); rule: a planned"),
        (lambda a, b, c, d: [plan((Request(7, 8, 3), 8))], 7, "(it is not of this run, or has not arrived); rule: "),
        (lambda a, b, c, d: [plan((a, 8), reserve={a: 11}), plan((b, 8))], 1, "(2 blocks planned, 1 free); rule: the"),
        (lambda a, b, c, d: [plan((a, 8)), plan((b, 8), (a, 1))], 0, "(3 blocks planned, 2 free); rule: the"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_plan_beyond_a_rule_is_refused_by_name(plans: Plans, request_id: int, rule: str, asynchronous: bool) -> None:
    """Which plans are legal is what `test_engine_machine` compares."""
    requests = [Request(index, 8, 3) for index in range(4)]
    made = plans(*requests)
    iteration, policy = len(made) - 1, Script(made)
    engine = make_engine(policy, LIMITS, num_blocks=4, asynchronous=asynchronous)
    engine.submit(requests)
    with pytest.raises(PlanError) as caught:
        engine.run()
    assert policy.refusal == str(caught.value)
    assert policy.refusal.startswith(f"policy Script, iteration {iteration}, request {request_id}: illegal plan (")
    assert rule in policy.refusal.partition("illegal plan ")[2]


class Vandal:
    """Changes a field of the engine in a request that it plans."""

    def plan(self, view: View) -> Plan:
        request = view.waiting[0]
        request._row = 10**6
        return Plan([(request, 8)])


def test_a_plan_that_cannot_be_checked_is_refused_with_the_error() -> None:
    engine = make_engine(Vandal(), LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    with pytest.raises(
        PlanError, match=r"the plan cannot be checked \(IndexError: .*\); .* change only the policy's own state"
    ):
        engine.run()


class Spoiled:
    """A plan that would be legal, but for one field."""

    def __init__(self, field: str, value: object) -> None:
        self.field, self.value, self.refusal = field, value, ""

    def plan(self, view: View) -> Plan:
        plan = Plan([(view.waiting[0], 8)])
        value = {view.waiting[0]: self.value} if self.field == "reserve" else self.value
        setattr(plan, self.field, value)
        with pytest.raises(PlanError) as caught:
            check_rules(plan, view, "Spoiled")
        self.refusal = str(caught.value)
        return plan


def spoiled_refusals(field: str, value: object) -> str:
    """What the public rules and the engine say."""
    policy = Spoiled(field, value)
    engine = make_engine(policy, LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    with pytest.raises(PlanError) as caught:
        engine.run()
    assert policy.refusal == str(caught.value)
    return policy.refusal


MALFORMED = "policy Spoiled, iteration 0: malformed plan ({}); see cbatch.Plan for what each field holds"
ILLEGAL = "policy Spoiled, iteration 0, request 0: illegal plan ({}); rule: {}"
COUNTS, RESERVES = "token counts are whole numbers", "a request reserves a whole number of tokens"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("requests", None, MALFORMED.format("requests is a NoneType, not a list")),
        ("num_tokens", (8,), MALFORMED.format("num_tokens is a tuple, not a list")),
        ("num_tokens", [8, 8], MALFORMED.format("num_tokens is a list, of 2 counts for 1 requests")),
        ("preempt", (), MALFORMED.format("preempt is a tuple, not a list")),
        ("reject", {}, MALFORMED.format("reject is a dict, not a list")),
        ("pad_to", 8.5, MALFORMED.format("pad_to is a float, not a whole number or None")),
        ("pad_to", True, MALFORMED.format("pad_to is a bool, not a whole number or None")),
        ("note", 8, MALFORMED.format("note is a int, not a str")),
        ("wake_at", float("nan"), MALFORMED.format("wake_at is a float, not a time in seconds or None")),
        ("wake_at", "8", MALFORMED.format("wake_at is a str, not a time in seconds or None")),
        ("num_tokens", ["8"], ILLEGAL.format("got ['8']", COUNTS)),
        ("num_tokens", [8.0], ILLEGAL.format("got [8.0]", COUNTS)),
        ("reserve", 8.5, ILLEGAL.format("8.5 reserved", RESERVES)),
        ("reserve", "8", ILLEGAL.format("'8' reserved", RESERVES)),
    ],
)
def test_a_malformed_plan_is_refused_by_its_field(field: str, value: object, says: str) -> None:
    assert spoiled_refusals(field, value) == says


@pytest.mark.parametrize(
    ("field", "value"), [("requests", [None]), ("preempt", [8]), ("reject", [8]), ("reject", [(8, "why")])]
)
def test_entries_of_the_wrong_kind_are_refused(field: str, value: object) -> None:
    said = spoiled_refusals(field, value)
    assert said.startswith("policy Spoiled, iteration 0: the plan cannot be checked (")
    assert "; see cbatch.Plan for what its fields hold" in said


@pytest.mark.parametrize("given", [{"num_tokens": "many"}, {"num_tokens": [8]}, {"num_tokens": 3, "reserve": "all"}])
def test_the_builder_names_what_is_no_number(given: dict[str, object]) -> None:
    class Texts:
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            plan.add(view.waiting[0], **given)  # type: ignore[arg-type]
            return plan.build()

    engine = make_engine(Texts(), LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    name, value = [*given.items()][-1]
    with pytest.raises(PlanError, match=re.escape(f"illegal plan ({name}={value!r}); rule: {COUNTS}")):
        engine.run()
