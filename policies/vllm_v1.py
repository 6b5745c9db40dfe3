"""vLLM V1's unified scheduler, by version 0.22.1 or 0.33.0: one token budget, no phases (vllm/v1/core/sched/scheduler.py).

Running requests come first, in the order of their admission, each with all its missing tokens, as far as the budget allows. If the KV
cache has no room for a request, a victim is preempted and recomputed later; tokens granted to the victim in this iteration return to
the budget for later requests. A victim waits before all others. Waiting requests are admitted only in an iteration without
preemptions; the first request that does not fit blocks the others. A prompt's blocks are allocated chunk by chunk.

    victim   last  the newest admitted (vLLM's rule)
             lcf   the request with the fewest computed tokens (RFC vllm#54644); ties: the newest admitted
             cost  the highest blocks held / tokens to recompute * (1 - generated / limit) (PR vllm#56897)
    version  0.33.0 lifts `long_prefill` while only one request runs or waits
Plans equal the version's, except as docs/policies/vllm_v1.md says. Only the abstracts of the RFC and the PR were read.
"""

from collections.abc import Iterable

from cbatch import ConfigError, Described, Plan, PlanBuilder, Refusal, Request, Status, View
from cbatch.validation import nearest
from policies.chunking.budget import check_budget

VERSIONS, VICTIMS = ("0.22.1", "0.33.0"), ("last", "lcf", "cost")


class VllmV1(Described):
    steady = True
    goes_on = False  # to the next running request after a request that became its own victim

    def __init__(self, budget: int, long_prefill: int = 0, victim: str = "last", version: str = VERSIONS[0]) -> None:
        """budget: tokens per iteration. long_prefill: most tokens per request in an iteration; 0: no limit."""
        check_budget(budget)
        if budget < 1 or long_prefill < 0:
            raise ConfigError(f"policy: need {budget=} >= 1, {long_prefill=} >= 0")
        if victim not in VICTIMS:
            raise ConfigError(f"policy.victim={victim}: no such rule; {nearest(victim, VICTIMS)}")
        if version not in VERSIONS:
            raise ConfigError(f"policy.version={version}: the rules of vLLM {' and '.join(VERSIONS)} are known")
        self.budget, self.long_prefill, self.victim, self.version = budget, long_prefill, victim, version
        self._most = budget  # tokens per request in the iteration being planned
        self._planned: list[Request] = []  # by the last plan
        self._victims: list[Request] = []  # waiting victims; the latest comes last

    def plan(self, view: View) -> Plan:
        plan, running = view.plan(), [*view.running]
        self._victims = [*filter(view.is_waiting, self._victims)]
        self._most = self.budget if self._is_lone(view) else self.long_prefill or self.budget
        for request in running[self._add_decodes(running, plan, view) :]:
            if not (self._grant(request, plan, view) or self.goes_on):
                break
        if not plan.plan.preempt:
            for request in self.waiting(view):
                if not (tokens := self._tokens(request, plan)) or not plan.add(request, tokens, whole=True):
                    break
        self._victims += plan.plan.preempt
        self._planned = [*plan.plan.requests]
        return plan.build()

    def waiting(self, view: View) -> Iterable[Request]:
        yield from reversed(self._victims)
        yield from (request for request in view.waiting if request not in self._victims)

    def next_victim(self, running: list[Request], view: View) -> Request:
        """Returns the next request to preempt. running: in the order of admission."""
        if self.victim == "lcf":
            return min(reversed(running), key=lambda request: request.num_computed)
        if self.victim == "cost" and (generated := [other for other in reversed(running) if other in view.decoding]):
            return max(generated, key=lambda request: reclaimed(request, view.kv.num_held(request)))
        return running[-1]

    def _is_lone(self, view: View) -> bool:
        """Returns whether `long_prefill` is lifted. A request whose last token is in flight counts as a second one."""
        if self.version == VERSIONS[0] or len(view.running) + len(view.waiting) > 1:
            return False
        return not any(request.status is Status.RUNNING and request not in view.running for request in self._planned)

    def _add_decodes(self, running: list[Request], plan: PlanBuilder, view: View) -> int:
        """Adds all decodes at once if they come first and fit; `_grant` would grant each the same. Returns their number."""
        decodes, lacking = view.ready_decodes(len(running))
        fit = len(decodes) <= self.budget and lacking <= plan.free_blocks
        return plan.add_decodes() if fit and running[: len(decodes)] == decodes else 0

    def _grant(self, request: Request, plan: PlanBuilder, view: View) -> bool:
        """Grants a running request its tokens, preempting victims. Returns False if the request has become a victim."""
        tokens = self._tokens(request, plan)
        while tokens and not plan.add(request, tokens, whole=True):
            if plan.refusal is not Refusal.BLOCKS or plan.wait_for_blocks(request, tokens):
                break
            preempted = {*plan.plan.preempt}
            victim = self.next_victim([other for other in view.running if other not in preempted], view)
            plan.preempt(victim)
            if victim is request:
                return False
        return True

    def _tokens(self, request: Request, plan: PlanBuilder) -> int:
        return min(request.num_ready, self.budget - plan.num_tokens, self._most)


def reclaimed(request: Request, num_blocks: int) -> float:
    return num_blocks / max(1, request.num_computed) * (1 - request.num_new_tokens / request.max_new_tokens)
