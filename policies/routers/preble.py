"""Preble's E2 (arXiv 2407.00023): exploits a prefix that was sent before, or explores where the work is least.

One prefix tree holds all prompts sent. If fewer tokens of a prompt are new to the tree than it holds: the replica to which the deepest known
part was sent, of several the one with the least work. Otherwise, of all replicas the one with the least work. Ties: the lowest index.
Work = predicted seconds of the uncached prompts sent there in the last 180 s + unfinished requests * `output` tokens * `tpot` seconds.

Source: the paper and WukLab/preble @8e7906a3, `global_scheduler_with_time.py`. Differences: whole KV blocks in place of tokens; the
code takes medians of the latest 200 requests for `output` and `tpot`, whose first values these are, spreads a prefix's work over its replicas, and
adds the cost of what the prompt will evict. Left out: rebalancing, the tree's evictions, the local queue.
"""

from collections import deque

from cbatch import BlockHash, Request
from cbatch.cluster import ClusterView, Role

WINDOW = 180.0
"""Seconds over which work counts."""


class Preble:
    depends_on = ("prefix_cache",)

    def __init__(self, output: float = 45.0, tpot: float = 0.15) -> None:
        self.output, self.tpot = output, tpot
        self._replicas: dict[BlockHash, set[int]] = {}  # by block sent
        self._recent: deque[tuple[float, int, float]] = deque()  # time, replica and seconds of prompts

    def choose(self, request: Request, view: ClusterView) -> int:
        able = view.fitting(request)
        known = self._sent_to(request, view)
        most = max(known[index] for index in able)
        exploits = request.num_prompt_tokens - most < most
        deepest = [index for index in able if known[index] == most] if exploits else []
        chosen = min(deepest or able, key=lambda index: self._work(index, view))
        replica = view[chosen]
        if (uncached := request.num_prompt_tokens - known[chosen]) and view.stage is Role.PREFILL:
            self._recent.append((view.now, chosen, replica.prefill_seconds(request, uncached)))
        for block_hash in replica.block_hashes(request):
            self._replicas.setdefault(block_hash, set()).add(chosen)
        return chosen

    def _sent_to(self, request: Request, view: ClusterView) -> dict[int, int]:
        """Returns how many leading tokens of the prompt each replica was sent."""
        sent = dict.fromkeys(range(len(view)), 0)
        for size, replica in {each.block_size: each for each in view}.items():
            for number, block_hash in enumerate(replica.block_hashes(request), 1):
                replicas = [each for each in self._replicas.get(block_hash, ()) if view[each].block_size == size]
                if not replicas:
                    break
                sent |= dict.fromkeys(replicas, number * size)
        return sent

    def _work(self, index: int, view: ClusterView) -> float:
        while self._recent and self._recent[0][0] <= view.now - WINDOW:
            self._recent.popleft()
        prefill = sum(seconds for _, replica, seconds in self._recent if replica == index)
        return prefill + view[index].num_unfinished * self.output * self.tpot
