"""vLLM V1's unified scheduler, of vLLM 0.22.1 and 0.33.0: one token budget, no phases (vllm/v1/core/sched/scheduler.py).

Running requests come first, in the order of their admission, each with all the tokens that it lacks, as far as the budget goes.
Where the KV cache has no room for one, a victim is preempted and recomputed later; the tokens that it was granted in this
iteration return to the budget of those after. A victim waits before all others. Waiting requests are admitted only in an iteration
without preemptions; the first that does not fit blocks the others. A prompt's blocks are allocated chunk by chunk.

    victim   last  the newest admitted (vLLM's rule)
             lcf   the one with the fewest computed tokens (RFC vllm#54644); ties: the newest admitted
             cost  the highest blocks held / tokens to recompute * (1 - generated / limit) (PR vllm#56897)
Plans equal those of both versions; docs/policies/vllm_v1.md says where not. Of the RFC and the PR only the abstracts were read.
"""

from collections.abc import Iterable

from cbatch import ConfigError, Described, Plan, PlanBuilder, Refusal, Request, View
from policies.chunking.budget import check_budget


class VllmV1(Described):
    steady = True

    def __init__(self, budget: int, long_prefill: int = 0, victim: str = "last") -> None:
        """budget: tokens of an iteration. long_prefill: most tokens of one request in it; 0: no such limit."""
        check_budget(budget)
        if budget < 1 or long_prefill < 0 or victim not in {"last", "lcf", "cost"}:
            raise ConfigError(f"policy: need {budget=} >= 1, {long_prefill=} >= 0, {victim=} in last, lcf, cost")
        self.budget, self.long_prefill, self.victim = budget, long_prefill, victim
        self._victims: list[Request] = []  # those that wait; the latest is the last

    def plan(self, view: View) -> Plan:
        plan, running = view.plan(), [*view.running]
        self._victims = [*filter(view.is_waiting, self._victims)]
        for request in running[self._add_decodes(running, plan, view) :]:
            if not self._grant(request, plan, view):
                break
        if not plan.plan.preempt:
            for request in self.waiting(view):
                if not (tokens := self._tokens(request, plan)) or not plan.add(request, tokens, whole=True):
                    break
        self._victims += plan.plan.preempt
        return plan.build()

    def waiting(self, view: View) -> Iterable[Request]:
        yield from reversed(self._victims)
        yield from (request for request in view.waiting if request not in self._victims)

    def next_victim(self, running: list[Request], view: View) -> Request:
        """The next to be preempted of these, which are in the order of admission."""
        if self.victim == "lcf":
            return min(reversed(running), key=lambda request: request.num_computed)
        if self.victim == "cost" and (generated := [other for other in reversed(running) if other in view.decoding]):
            return max(generated, key=lambda request: reclaimed(request, view.kv.num_held(request)))
        return running[-1]

    def _add_decodes(self, running: list[Request], plan: PlanBuilder, view: View) -> int:
        """Adds the decodes at once if they are the first to run and all fit, as `_grant` would one by one; returns how many."""
        decodes, lacking = view.ready_decodes(len(running))
        fit = len(decodes) <= self.budget and lacking <= plan.free_blocks
        return plan.add_decodes() if fit and running[: len(decodes)] == decodes else 0

    def _grant(self, request: Request, plan: PlanBuilder, view: View) -> bool:
        """Grants a running request its tokens, at the cost of victims; returns False if the request has become a victim."""
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
        return min(request.num_ready, self.budget - plan.num_tokens, self.long_prefill or self.budget)


def reclaimed(request: Request, num_blocks: int) -> float:
    return num_blocks / max(1, request.num_computed) * (1 - request.num_new_tokens / request.max_new_tokens)
