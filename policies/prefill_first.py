"""Prefill-prioritising batching with paged KV: vLLM's first scheduler (Kwon et al., SOSP 2023, section 4.5; v0 releases).

As long as a waiting prompt fits, an iteration computes whole prompts and nothing else, and running decodes stall. KV
cache grows block by block; when it is full, the newest running request is preempted and recomputed later.
"""

from cbatch import Plan, View


class PrefillFirst:
    def __init__(self, watermark: float = 0.01) -> None:
        """watermark: share of the KV blocks that an admission leaves free for the growth of running requests."""
        self.watermark = watermark

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        spare = int(self.watermark * view.kv.num_blocks) if view.running else 0
        for request in view.waiting:
            if view.kv.blocks_for(request.num_ready) + spare > plan.free_blocks or not plan.add(request, whole=True):
                break
        if not plan.num_requests:
            plan.add_decodes(preempt_newest=True)
        return plan.build()
