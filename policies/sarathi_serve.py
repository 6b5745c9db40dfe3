"""Stall-free batching under a token budget: Sarathi-Serve (Agrawal et al., OSDI 2024, algorithm 3).

Running decodes come first and never stall. The rest of the budget goes to prompts already begun, then to new prompts, and
several prompts may share an iteration. A prompt's KV cache is allocated at admission. KV cache for output grows block by
block; if it runs out, the newest request is preempted. It waits in front of the others, so that plan admits none.

Differs from the authors' code: an admission keeps no blocks free (theirs keeps 1%), and a preempted request is not admitted
again by the same plan. Differs from the paper only with `chunking=fixed`, where the budget counts prompt tokens and decodes
are added; `tile_aligned`, the default, counts all tokens. The last chunk of a prompt is not aligned to tiles.
"""

from collections.abc import Iterable
from itertools import chain

from cbatch import Described, Limits, Plan, PlanBuilder, Request, View, is_steady
from policies.chunking import ChunkSelector


class SarathiServe(Described):
    def __init__(self, chunking: ChunkSelector) -> None:
        self.chunking = chunking

    @property
    def steady(self) -> bool:
        return is_steady(self.chunking)

    def check(self, limits: Limits) -> None:
        self.chunking.check(limits)

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        self.fill(plan, view, self.prompts(view))
        return plan.build()

    def fill(self, plan: PlanBuilder, view: View, prompts: Iterable[Request]) -> None:
        """Adds all decodes, then the prompts in their order, as far as the budget allows."""
        before = len(plan.plan.preempt)
        plan.add_decodes(preempt_newest=True)
        preempted = plan.plan.preempt[before:]
        budget = self.chunking.num_tokens(view, plan.num_tokens)
        for request in prompts:
            if request in preempted:
                continue
            if preempted and view.is_waiting(request):
                break
            granted = plan.add(request, budget, reserve=request.num_tokens) if budget > 0 else 0
            if not granted:
                break
            budget -= granted

    def prompts(self, view: View) -> Iterable[Request]:
        """Returns the requests with prompt tokens left, in the order in which they share the budget."""
        return chain(view.prefilling, view.waiting)

    def on_finish(self, request: Request) -> None:
        self.chunking.observe(request)
