"""Prefill-prioritising batching with paged KV: vLLM's first scheduler (Kwon et al., SOSP 2023, 4.5; v0 releases).

As long as a waiting prompt fits, an iteration computes only whole prompts, and running decodes stall. KV cache grows block
by block. If it is full, the newest running request is preempted and recomputed later.

Differs from vLLM's code: the watermark is waived while nothing runs, so that a prompt as large as the cache is served and
not refused; decodes continue as long as the blocks they need are free, where vLLM requires one free block per running
request; preempted requests are always recomputed, never swapped.
"""

from cbatch import ConfigError, Plan, View, WholePrompts


class PrefillFirst(WholePrompts):
    steady = True

    def __init__(self, watermark: float = 0.01) -> None:
        """watermark: share of the KV blocks that an admission leaves free for the growth of running requests."""
        if not 0 <= watermark < 1:
            raise ConfigError(f"policy.watermark={watermark}: give a share from 0 to below 1")
        self.watermark = watermark

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        spare = int(self.watermark * view.kv.num_blocks) if view.running else 0
        for request in view.waiting:
            lacking = view.kv.num_lacking(request, request.num_computed + request.num_ready)
            if lacking + spare > plan.free_blocks or not plan.add(request, whole=True):
                break
        if not plan.num_requests:
            plan.add_decodes(preempt_newest=True)
        return plan.build()
