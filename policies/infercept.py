"""InferCept (arXiv 2402.01869) over a prefix cache: keeps, swaps or discards the KV cache of sessions in a pause: what wastes least memory.

Before each plan, `preserve` wastes a paused session's tokens for the rest of its pause, which `pauses` predicts (once that is over, or if
it is unknown, as long as the pause has lasted); `discard` wastes memory while the tokens are computed again beside the running requests;
`swap` wastes it while they are copied to host memory and back. Of the sessions for which discarding or swapping wastes less, one is kept
as the first to go when blocks run short, that for which it wastes most, and the others are given up. Kept blocks are not given to other
sessions. Waiting requests are ordered by their session's first arrival.

Blocks stay in the prefix cache until they are evicted, so these wastes are upper bounds. Source: the code (WukLab/InferCept,
vllm/core/scheduler_v2.py), whose times, of its own model and GPU, are the defaults; `paper=true`: the paper's formulas, with predicted
times. Give `eviction=given_up`. Differences: docs/policies/infercept.md.
"""

from collections.abc import Hashable
from math import inf

from cbatch import BatchShape, ConfigError, Request, View
from policies.chunking import ChunkSelector
from policies.pauses import Pauses
from policies.sarathi_serve import SarathiServe
from policies.shared.pins import PinnedSessions
from policies.shared.waste import waste_of_computing, wastes


class InferCept(PinnedSessions):
    steady = SarathiServe.steady

    def __init__(
        self,
        chunking: ChunkSelector,
        pauses: Pauses,
        budget: int = 384,
        seconds: float = 0.0154,
        per_token: float = 2.79e-5,
        paper: bool = False,
        swap: bool = False,
    ) -> None:
        """budget: tokens of an iteration, which takes `seconds` and `per_token` for each. swap: with `kv.host_tokens`."""
        super().__init__(chunking, pauses)
        if budget < 1 or min(seconds, per_token) < 0:
            raise ConfigError(f"policy: need {budget=} >= 1, {seconds=} and {per_token=} >= 0")
        self.budget, self.seconds, self.per_token, self.paper, self.swap = budget, seconds, per_token, paper, swap

    def keep(self, request: Request) -> float:
        return 0.0

    def lapse(self, view: View) -> None:
        running = sum(request.num_computed for request in view.running) if self.pinned else 0
        candidates = list[tuple[float, int, Hashable]]()
        for program, pin in self.pinned.items():
            passed, mean = view.now - pin.since, pin.pause or 0.0
            waste, to_host = self._waste(pin.num_tokens, running, view)
            rest = mean - passed if mean > passed else passed
            if program not in self.waiting and waste < rest * pin.num_tokens:
                candidates.append((waste, pin.number, program))
            until = pin.since + max(mean, waste / pin.num_tokens)
            self.pinned[program] = pin._replace(until=until, to_host=to_host)
        candidates.sort()
        if candidates and view.running:
            *_, kept = candidates.pop()
            self.pinned[kept] = self.pinned[kept]._replace(until=inf)  # the latest end: the first to go
        for *_, program in candidates:
            self.give_up(program)

    def _waste(self, tokens: int, running: int, view: View) -> tuple[float, bool]:
        """Returns the waste of discarding or of swapping, whichever is less, and whether it is swapping."""
        forward = view.cost.predict(BatchShape(((tokens, 0),))) if self.paper else 0.0
        blocks, size = view.kv.blocks_for(tokens), view.kv.block_size
        of_paper = wastes(
            tokens, running, forward, 0.0, view.cost.copy_seconds(blocks, blocks, size) if self.swap else None
        )
        discard = waste_of_computing(tokens, self.budget, len(view.decoding), running, self.seconds, self.per_token)
        discard, swap = of_paper["discard"] if self.paper else discard, of_paper.get("swap", inf)
        return min(discard, swap), swap < discard
