"""Checks a plan against vLLM's state: the leading decodes in one pass, the other requests one by one."""

from numbers import Integral

from cbatch.plan import Plan
from cbatch.plan_check import IllegalError, Rules
from cbatch.request import Request
from cbatch.vllm.view import VllmView


def check_plan(plan: Plan, view: VllmView, policy_name: str) -> None:
    """Raises PlanError like `cbatch.plan_check.check_rules`."""
    rules = Rules(plan, view, policy_name)
    rules.enforce(lambda: _check(plan, view, rules))


def _check(plan: Plan, view: VllmView, rules: Rules) -> None:
    """Detects illegal plans; `Rules.check` then finds the broken rule."""
    decodes, others, num_newcomers = _members(plan, view)
    if plan.preempt or plan.reject:
        rules.check_departures()
    num_tokens = sum(plan.num_tokens)
    for request, count in others.items():
        if not isinstance(count, Integral) or count < 1:
            raise IllegalError
        if count > (ready := request.num_ready) and count > ready + view.drafts.granted(request):
            raise IllegalError
    if plan.requests:
        rules.check_limits(num_newcomers, num_tokens)
    lacking = view.num_lacking_a_block(decodes) if decodes else 0
    tokens_of = rules.reserved_tokens().items() if plan.reserve else ()
    reserved = {plan.requests[place]: tokens for place, tokens in tokens_of}
    for request, count in others.items():
        lacking += view.kv.num_lacking(request, max(request.num_computed + count, reserved.get(request, 0)))
    if lacking > view.kv.num_free + (rules.num_gained() if plan.preempt else 0):
        raise IllegalError


def _members(plan: Plan, view: VllmView) -> tuple[list[Request], dict[Request, int], int]:
    """Returns the decodes at the head of the plan, the other requests with their tokens, and how many of the others wait."""
    decodes = view.decodes
    num_decodes = len(decodes)
    begins = plan.requests[:num_decodes] == decodes and plan.num_tokens[:num_decodes] == [1] * num_decodes
    if begins and len(plan.requests) == num_decodes and not plan.reserve:
        return decodes, {}, 0
    if not begins or any(request in view.decoding for request in plan.reserve):
        decodes, num_decodes = [], 0
    rest = plan.requests[num_decodes:]
    others = dict(zip(rest, plan.num_tokens[num_decodes:], strict=True))
    if len(others) < len(rest) or (decodes and any(request in view.decoding for request in rest)):
        raise IllegalError
    newcomers = [request for request in rest if request not in view.running]
    if any(not view.is_waiting(request) or request not in view.waiting for request in newcomers):
        raise IllegalError
    return decodes, others, len(newcomers)
