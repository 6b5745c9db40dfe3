"""The rules of a plan, one by one: the last plan of a script breaks one, or keeps all of them by a hair.

    0:8   request 0 computes 8 tokens     -0   it is preempted    0=11   it reserves 11 tokens of KV cache
    +9    the iteration is padded to 9    !0   it is rejected

Four requests of 8 prompt tokens and 3 of output; 2 places, 10 tokens in an iteration, KV blocks of 4 tokens.
"""

import pytest
from schedules import make_engine

from cbatch import Limits, Plan, PlanError, Request, View
from cbatch.plan_check import check_rules
from cbatch.request import Status
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(max_batch=2, max_tokens=10, max_request_tokens=100)


class Script:
    """Plans as its lines say, then like Sarathi-Serve; asks the public rules about the last line before the engine does."""

    def __init__(self, lines: str) -> None:
        self.lines = lines.split(" | ")
        self.others = SarathiServe(Fixed(10))
        self.known: dict[int, Request] = {}
        self.refusal = ""

    def on_arrival(self, request: Request) -> None:
        self.known[request.id] = request

    def plan(self, view: View) -> Plan:
        if not self.lines:
            return self.others.plan(view)
        plan = self._read(self.lines.pop(0))
        if not self.lines:
            try:
                check_rules(plan, view, "Script")
            except PlanError as error:
                self.refusal = str(error)
        return plan

    def _read(self, line: str) -> Plan:
        plan = Plan()
        for word in line.split():
            if word[0] == "-":
                plan.preempt.append(self.known[int(word[1:])])
            elif word[0] == "!":
                plan.reject.append((self.known[int(word[1:])], "why"))
            elif word[0] == "+":
                plan.pad_to = int(word[1:])
            elif "=" in word:
                request, tokens = map(int, word.split("="))
                plan.reserve[self.known[request]] = tokens
            else:
                request, tokens = map(int, word.split(":"))
                plan.requests.append(self.known[request])
                plan.num_tokens.append(tokens)
        return plan


def refusals(lines: str, num_blocks: int, asynchronous: bool) -> tuple[str, str]:
    """What the public rules and the engine say of the script's last plan; nothing if they take it."""
    policy, said = Script(lines), ""
    engine = make_engine(policy, LIMITS, num_blocks=num_blocks, asynchronous=asynchronous)
    engine.submit(Request(index, 8, 3) for index in range(4))
    try:
        engine.run()
    except PlanError as error:
        said = str(error)
    return policy.refusal, said


@pytest.mark.parametrize(
    ("lines", "num_blocks"),
    [
        ("0:8 1:2", 10),  # as many requests and tokens as an iteration holds
        ("0:1", 10),
        ("0:8 +8", 10),
        ("0:8 +10", 10),
        ("0:8 0=11", 3),  # its longest length, and every block
        ("0:8 0=4", 3),  # less than it computes
        ("0:8 1:2", 3),  # every block
        ("0:8 | 1:8", 10),  # as many as may be admitted at once
        ("0:8 | 1:8 | 2:8 -1", 10),  # one place, given by a preemption
        ("0:8 | 1:8 | 2:5 3:5 -0 -1", 4),  # two places, and all blocks
        ("0:8 | 1:8 -0", 3),  # the block that is free, and one that the preemption frees
        ("!0 1:8", 10),
        ("0:4 | 0:4", 10),
    ],
)
def test_a_plan_at_the_edge_of_the_rules_is_taken(lines: str, num_blocks: int) -> None:
    assert refusals(lines, num_blocks, asynchronous=False) == ("", "")


NAMED_ONCE = "a request is named once in a plan"
NAMED_AGAIN = f"it is preempted or rejected, and named again); rule: {NAMED_ONCE}"
NOT_RUNNING, NOT_WAITING = "only a running request can be preempted", "only a waiting request can be rejected"
PADDING = "pad_to lies between the tokens planned and max_tokens"
READY = "a request computes at least 1 token and no more than are ready"
FREE = "the KV blocks that a plan takes must be free"
LONGEST = "a request reserves no more KV cache than its longest length"
PLANNED = "a planned request is waiting, or running with tokens left"
AT_ONCE = "at most 2 requests are admitted at once"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0:4 0:4", f"request 0: illegal plan (it is named 2 times); rule: {NAMED_ONCE}"),
        ("0:8 | 0:1 0:1", f"request 0: illegal plan (it is named 2 times); rule: {NAMED_ONCE}"),
        ("0:8 | 0:1 -0", f"request 0: illegal plan ({NAMED_AGAIN}"),
        ("0:8 | 1:8 -0 -0", f"request 0: illegal plan ({NAMED_AGAIN}"),
        ("0:8 !1 !1", f"request 1: illegal plan ({NAMED_AGAIN}"),
        ("0:8 !0", f"request 0: illegal plan ({NAMED_AGAIN}"),
        ("0:8 -1", f"request 1: illegal plan (it is waiting); rule: {NOT_RUNNING}"),
        ("0:8 | 1:8 !0", f"request 0: illegal plan (it is running); rule: {NOT_WAITING}"),
        ("0:8 | !0", f"request 0: illegal plan (it is running); rule: {NOT_WAITING}"),
        ("0:8 | 1:8 | -2", f"request 2: illegal plan (it is waiting); rule: {NOT_RUNNING}"),
        ("0:9", f"request 0: illegal plan (9 planned, 8 ready); rule: {READY}"),
        ("0:4 | 0:5", f"request 0: illegal plan (5 planned, 4 ready); rule: {READY}"),
        ("0:8 | 0:2", f"request 0: illegal plan (2 planned, 1 ready); rule: {READY}"),
        ("0:8 1:0", f"request 1: illegal plan (0 planned, 8 ready); rule: {READY}"),
        ("0:1 1:1 2:1", "request 2: illegal plan (3 planned); rule: an iteration holds at most max_batch=2 requests"),
        ("0:8 1:3", "request 1: illegal plan (11 planned); rule: an iteration holds at most max_tokens=10 tokens"),
        ("0:8 | 1:8 | 2:8", f"request 2: illegal plan (3 with this plan); rule: {AT_ONCE}"),
        ("0:8 | 1:8 | 2:2 3:2 -0", f"request 3: illegal plan (3 with this plan); rule: {AT_ONCE}"),
        ("0:8 +7", f"request 0: illegal plan (pad_to=7, 8 planned, max_tokens=10); rule: {PADDING}"),
        ("0:8 +11", f"request 0: illegal plan (pad_to=11, 8 planned, max_tokens=10); rule: {PADDING}"),
        ("0:8 0=12", f"request 0: illegal plan (12 tokens reserved, 11 at most); rule: {LONGEST}"),
        (
            "0:8 1=4",
            "request 1: illegal plan (it is not in the plan); rule: a reservation belongs to a planned request",
        ),
        ("!0 1:2 | 0:2", f"request 0: illegal plan (it is finished); rule: {PLANNED}"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_plan_beyond_a_rule_is_refused_by_name(lines: str, message: str, asynchronous: bool) -> None:
    expected = f"policy Script, iteration {lines.count(' | ')}, {message}"
    assert refusals(lines, 10, asynchronous) == (expected, expected)


@pytest.mark.parametrize(
    ("lines", "asynchronous", "found"),
    [
        ("0:8 | 1:8", False, "request 1: illegal plan (2 blocks planned, 1 free)"),
        ("0:8 1:2 0=11", False, "request 1: illegal plan (4 blocks planned, 3 free)"),
        ("0:2 1:4 1=9", False, "request 1: illegal plan (4 blocks planned, 3 free)"),
        ("0:8 0=11 | 0:1 1:2", False, "request 1: illegal plan (1 blocks planned, 0 free)"),
        # blocks of a request that is preempted while an iteration in flight uses them
        ("0:8 | 1:8 -0", True, "request 1: illegal plan (2 blocks planned, 1 free)"),
    ],
)
def test_a_plan_takes_no_more_blocks_than_are_free(lines: str, asynchronous: bool, found: str) -> None:
    message = f"policy Script, iteration {lines.count(' | ')}, {found}; rule: {FREE}"
    assert refusals(lines, 3, asynchronous) == (message, message)


def test_blocks_that_an_iteration_in_flight_still_uses_are_taken() -> None:
    """Request 0 ends by itself with its first token, while its next one, which takes the third block, is in flight."""
    policy = Script("0:8 | 0:1 | 1:4")
    engine = make_engine(policy, LIMITS, num_blocks=3, asynchronous=True)
    engine.submit([Request(0, 8, 3, true_new_tokens=1), Request(1, 8, 3)])
    with pytest.raises(PlanError) as caught:
        engine.run()
    assert engine.view.kv.num_retiring == 3
    assert policy.refusal == str(caught.value)
    assert f"iteration 2, request 1: illegal plan (1 blocks planned, 0 free); rule: {FREE}" in policy.refusal


def test_of_too_many_tokens_the_last_request_is_named() -> None:
    policy = Script("0:4 1:4 2:4")
    engine = make_engine(policy, Limits(max_batch=3, max_tokens=10, max_request_tokens=100))
    engine.submit(Request(index, 8, 3) for index in range(3))
    with pytest.raises(PlanError, match=r"request 2: illegal plan \(12 planned\)"):
        engine.run()


class Vandal:
    """Changes a field of the engine in a request that it plans."""

    def plan(self, view: View) -> Plan:
        request = view.waiting[0]
        request.row = 10**6
        return Plan([(request, 8)])


def test_a_plan_that_cannot_be_checked_is_refused_with_the_error() -> None:
    engine = make_engine(Vandal(), LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    with pytest.raises(
        PlanError, match=r"the plan cannot be checked \(IndexError: .*\); .* change only the policy's own state"
    ):
        engine.run()


def test_a_request_whose_last_token_is_in_flight_cannot_be_planned() -> None:
    message = "policy Script, iteration 3, request 0: illegal plan (it is running with its last token in flight)"
    assert refusals("0:8 | 0:1 | 0:1 | 0:1", 10, asynchronous=True) == (f"{message}; rule: {PLANNED}",) * 2


def test_a_request_that_waits_elsewhere_cannot_be_planned() -> None:
    policy = Script("9:8")
    policy.known[9] = Request(9, 8, 3)
    policy.known[9].status = Status.WAITING
    engine = make_engine(policy, LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    message = f"request 9: illegal plan (it is not of this run, or has not arrived); rule: {PLANNED}"
    with pytest.raises(PlanError) as caught:
        engine.run()
    assert policy.refusal == str(caught.value) == f"policy Script, iteration 0, {message}"


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


def spoiled_refusals(field: str, value: object) -> tuple[str, str]:
    """What the public rules and the engine say."""
    policy = Spoiled(field, value)
    engine = make_engine(policy, LIMITS, num_blocks=10)
    engine.submit([Request(0, 8, 3)])
    with pytest.raises(PlanError) as caught:
        engine.run()
    return policy.refusal, str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("requests", None, "requests is a NoneType, not a list"),
        ("num_tokens", (8,), "num_tokens is a tuple, not a list"),
        ("num_tokens", [8, 8], "num_tokens is a list, of 2 counts for 1 requests"),
        ("preempt", (), "preempt is a tuple, not a list"),
        ("reject", {}, "reject is a dict, not a list"),
        ("pad_to", 8.5, "pad_to is a float, not a whole number or None"),
        ("pad_to", True, "pad_to is a bool, not a whole number or None"),
        ("note", 8, "note is a int, not a str"),
        ("wake_at", float("nan"), "wake_at is a float, not a time in seconds or None"),
        ("wake_at", "8", "wake_at is a str, not a time in seconds or None"),
    ],
)
def test_a_malformed_plan_is_refused_by_its_field(field: str, value: object, found: str) -> None:
    says = f"policy Spoiled, iteration 0: malformed plan ({found}); see cbatch.Plan for what each field holds"
    assert spoiled_refusals(field, value) == (says, says)


@pytest.mark.parametrize(
    ("field", "value"), [("requests", [None]), ("preempt", [8]), ("reject", [8]), ("reject", [(8, "why")])]
)
def test_entries_of_the_wrong_kind_are_refused(field: str, value: object) -> None:
    for said in spoiled_refusals(field, value):
        assert said.startswith("policy Spoiled, iteration 0: the plan cannot be checked (")
        assert "; see cbatch.Plan for what its fields hold" in said


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("num_tokens", ["8"], "(got ['8']); rule: token counts are whole numbers"),
        ("num_tokens", [8.0], "(got [8.0]); rule: token counts are whole numbers"),
        ("reserve", 8.5, "(8.5 reserved); rule: a request reserves a whole number of tokens"),
        ("reserve", "8", "('8' reserved); rule: a request reserves a whole number of tokens"),
    ],
)
def test_tokens_are_whole_numbers(field: str, value: object, found: str) -> None:
    says = f"policy Spoiled, iteration 0, request 0: illegal plan {found}"
    assert spoiled_refusals(field, value) == (says, says)
