"""Preble's E2 (arXiv 2407.00023): exploits a prefix that was sent before, or explores where the work is least.

If fewer tokens of a prompt are new than were sent before: the replica to which the deepest known part was sent, of several the one
with the least work. Otherwise, of all replicas the one with the least work. Ties: the lowest index.
Work = predicted seconds of the uncached prompts sent there in the last 180 s + unfinished requests * `output` tokens * `tpot` seconds.

Source: the paper and WukLab/preble @8e7906a3, `global_scheduler_with_time.py`. Differences: whole KV blocks in place of tokens; the
code takes medians of the latest 200 requests for `output` and `tpot`, whose first values these are, spreads a prefix's work over its replicas, and
adds the cost of what the prompt will evict. Left out: rebalancing, the tree's evictions, the local queue.
"""

from collections import deque

from cbatch import Request
from cbatch.cluster import ClusterView, Role
from policies.shared.sent_prefixes import SentPrefixes

WINDOW = 180.0
"""Seconds over which work counts."""


class Preble:
    depends_on = ("prefix_cache",)

    def __init__(self, output: float = 45.0, tpot: float = 0.15) -> None:
        self.output, self.tpot = output, tpot
        self._sent: list[SentPrefixes] = []
        self._recent: deque[tuple[float, int, float]] = deque()  # time, life of the replica and seconds of prompts

    def choose(self, request: Request, view: ClusterView) -> int:
        SentPrefixes.renew(self._sent, view)
        able, known = view.fitting(request), dict[int, int]()
        for index in able:
            known[index] = self._sent[index].match(view[index].block_hashes(request)) * view[index].block_size
        most = max(known.values())
        exploits = request.num_prompt_tokens - most < most
        deepest = [index for index in able if known[index] == most] if exploits else []
        chosen = min(deepest or able, key=lambda index: self._work(index, view))
        replica = view[chosen]
        if (uncached := request.num_prompt_tokens - known[chosen]) and view.stage is Role.PREFILL:
            self._recent.append((view.now, replica.life, replica.prefill_seconds(request, uncached)))
        self._sent[chosen].add(replica.block_hashes(request))
        return chosen

    def _work(self, index: int, view: ClusterView) -> float:
        while self._recent and self._recent[0][0] <= view.now - WINDOW:
            self._recent.popleft()
        prefill = sum(seconds for _, life, seconds in self._recent if life == view[index].life)
        return prefill + view[index].num_unfinished * self.output * self.tpot
