"""The rules of a plan, one by one: the last plan of a script breaks one, or keeps all of them by a hair.

    0:8   request 0 computes 8 tokens     -0   it is preempted    0=11   it reserves 11 tokens of KV cache
    +9    the iteration is padded to 9    !0   it is rejected

Four requests of 8 prompt tokens and 3 of output; 2 places, 10 tokens in an iteration, KV blocks of 4 tokens.
"""

import pytest
from schedules import make_engine

from cbatch import Limits, Plan, PlanError, Request, View
from cbatch.plan_check import check_rules
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
    ("lines", "request_id", "rule"),
    [
        ("0:4 0:4", 0, "a request is named once in a plan"),
        ("0:8 | 0:1 -0", 0, "a request is named once in a plan"),
        ("0:8 !1 !1", 1, "a request is named once in a plan"),
        ("0:8 -1", 1, "only a running request can be preempted"),
        ("0:8 | 1:8 !0", 0, "only a waiting request can be rejected"),
        ("0:9", 0, "a request computes at least 1 token and no more than are ready"),
        ("0:8 1:0", 1, "a request computes at least 1 token and no more than are ready"),
        ("0:1 1:1 2:1", 2, "an iteration holds at most max_batch=2 requests"),
        ("0:8 1:3", 1, "an iteration holds at most max_tokens=10 tokens"),
        ("0:8 | 1:8 | 2:2 3:2 -0", 3, "at most 2 requests are admitted at once"),
        ("0:8 +7", 0, "pad_to lies between the tokens planned and max_tokens"),
        ("0:8 0=12", 0, "a request reserves no more KV cache than its longest length"),
        ("0:8 1=4", 1, "a reservation belongs to a planned request"),
        ("!0 1:2 | 0:2", 0, "a planned request is waiting, or running with tokens left"),
        ("0:8 0=11 | 1:8", 1, "the KV blocks that a plan takes must be free"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_plan_beyond_a_rule_is_refused_by_name(lines: str, request_id: int, rule: str, asynchronous: bool) -> None:
    """Which plans are legal is what `test_engine_machine` compares."""
    by_rules, by_engine = refusals(lines, 4, asynchronous)
    assert by_rules == by_engine
    assert by_rules.startswith(f"policy Script, iteration {lines.count(' | ')}, request {request_id}: illegal plan (")
    assert by_rules.endswith(f"; rule: {rule}")


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
