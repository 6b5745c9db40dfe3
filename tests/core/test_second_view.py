"""Policies, plan builder and plan rules need no more than the public view: a host without the engine gets the same plans."""

import random
from collections.abc import Callable

import pytest
from contended import BLOCK, LIMITS, NUM_BLOCKS, POLICIES, LinearCost, requests
from fuzz_policy import FuzzPolicy
from plain_view import PlainHost
from schedules import UnitCost

from cbatch import Engine, Limits, Plan, PlanError, Policy, Request, View
from cbatch.plan_check import check_plan, check_rules
from cbatch.replay.decisions import read
from cbatch.sim.executor import SimExecutor


class OnBothViews:
    """Asks one copy of a policy with the engine's view and one with a plain view; their plans must agree and be legal."""

    def __init__(self, make: Callable[[], Policy], **ignored: object) -> None:
        self.policy, self.other = make(), make()
        self.host = PlainHost()
        self.num_plans = 0

    def plan(self, view: View) -> Plan:
        plain = self.host.look(view)
        plan, other = self.policy.plan(view), self.other.plan(plain)
        assert read(other) == read(plan)
        check_rules(plan, view, "P")
        check_rules(other, plain, "P")
        self.num_plans += 1
        return plan

    def on_arrival(self, request: Request) -> None:
        self._tell("on_arrival", request)

    def on_finish(self, request: Request) -> None:
        self._tell("on_finish", request)

    def _tell(self, method: str, request: Request) -> None:
        for policy, subject in ((self.policy, request), (self.other, self.host.copy(request))):
            getattr(policy, method, lambda request: None)(subject)


def fuzz() -> Policy:
    return FuzzPolicy(5, preempts=0.1, rejects=0.01)


@pytest.mark.parametrize("num_stages", [0, 1, 3], ids=["sync", "async", "pipeline"])
@pytest.mark.parametrize("make", [*POLICIES.values(), fuzz], ids=[*POLICIES, "fuzz"])
def test_a_policy_plans_the_same_over_a_view_without_an_engine(make: Callable[[], Policy], num_stages: int) -> None:
    both = OnBothViews(make)
    executor, limits = SimExecutor(LinearCost()), LIMITS
    if num_stages > 1:
        executor.num_stages = num_stages
        limits = Limits(LIMITS.max_batch, 200, 60, tile=8, num_stages=num_stages)
    asynchronous = num_stages > 0
    engine = Engine(
        both, executor, limits, LinearCost(), num_blocks=NUM_BLOCKS, block_size=BLOCK, asynchronous=asynchronous
    )
    engine.submit(requests())
    engine.run()
    assert both.num_plans > 50


class Spoiling:
    """Spoils legal plans in a random way; the engine's fast check and the public rules must say the same of each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.inner = FuzzPolicy(seed, preempts=0.1, rejects=0.02)
        self.host = PlainHost()
        self.messages: set[str] = set()
        self.engine: Engine | None = None
        self.legal = 0

    def plan(self, view: View) -> Plan:
        plan = self.inner.plan(view)
        for _ in range(3):
            self._compare(self._spoil(plan, view), view)
        return plan

    def _compare(self, plan: Plan, view: View) -> None:
        assert self.engine is not None
        plain = self.host.look(view)
        fast = refusal(lambda: check_plan(plan, self.engine.state, self.engine.view, "P"))  # type: ignore[union-attr]
        assert refusal(lambda: check_rules(plan, view, "P")) == fast
        assert refusal(lambda: check_rules(self._translated(plan), plain, "P")) == fast
        self.messages.add(fast.partition("rule: ")[2])
        self.legal += not fast

    def _spoil(self, plan: Plan, view: View) -> Plan:
        spoiled = Plan(plan)
        spoiled.preempt, spoiled.reject = list(plan.preempt), list(plan.reject)
        spoiled.reserve, spoiled.pad_to = dict(plan.reserve), plan.pad_to
        known = [*view.running, *view.waiting]
        dice = self.random
        if not known:
            return spoiled
        match dice.randrange(9):
            case 0 if spoiled.num_tokens:
                spoiled.num_tokens[dice.randrange(len(spoiled))] += dice.choice([-1, 1, 50])
            case 1:
                spoiled.preempt.append(dice.choice(known))
            case 2:
                spoiled.reject.append((dice.choice(known), "why"))
            case 3:
                chosen = dice.choice(known)
                spoiled.reserve[chosen] = dice.choice([1, chosen.max_tokens, chosen.max_tokens + 1])
            case 4:
                spoiled.pad_to = dice.randrange(1, 300)
            case 5:
                spoiled.preempt.clear()
            case kind:
                for request in dice.sample(known, min(abs(kind - 5), len(known))):
                    place = dice.randrange(len(spoiled) + 1)
                    spoiled.requests.insert(place, request)
                    spoiled.num_tokens.insert(place, max(request.num_ready, dice.choice([0, 1])))
        return spoiled

    def _translated(self, plan: Plan) -> Plan:
        def own(request: Request) -> Request:
            return self.host.by_id[request.id]

        translated = Plan((own(request), count) for request, count in plan)
        translated.preempt = [own(request) for request in plan.preempt]
        translated.reject = [(own(request), why) for request, why in plan.reject]
        translated.reserve = {own(request): tokens for request, tokens in plan.reserve.items()}
        translated.pad_to = plan.pad_to
        return translated


def refusal(check: Callable[[], object]) -> str:
    try:
        check()
    except PlanError as error:
        return str(error)
    return ""


def test_the_fast_check_and_the_public_rules_agree_on_spoiled_plans() -> None:
    rules: set[str] = set()
    for seed in range(6):
        policy = Spoiling(seed)
        engine = Engine(
            policy,
            SimExecutor(UnitCost()),
            Limits(4, 60, 60),
            UnitCost(),
            num_blocks=20,
            block_size=4,
            asynchronous=bool(seed % 2),
        )
        policy.engine = engine
        engine.submit(requests())
        engine.run()
        assert policy.legal > 20
        rules |= policy.messages
    assert len(rules) >= 11, rules
