"""InferCept (arXiv 2402.01869) over a prefix cache: keeps, swaps or discards the KV cache of sessions in a pause: what wastes least memory.

Before each plan, `preserve` wastes a paused session's tokens for the rest of its pause, which `pauses` predicts (once that is over, or if
it is unknown, as long as the pause has lasted); `discard` wastes memory while the tokens are computed again beside the running requests;
`swap` wastes it while they are copied out and back, if `swap_seconds` says how long a token takes. Of the sessions for which discarding or
swapping wastes less, one is kept as the first to go when blocks run short, that for which it wastes most, and the others are given
up. Kept blocks are not given to other sessions. Waiting requests are ordered by their session's first arrival.

Give `eviction=given_up`, which evicts what was given up first, and `kv.host_tokens` for what is swapped. Blocks stay in the prefix cache
until they are evicted, so these wastes are upper bounds. Source: the code (WukLab/InferCept, vllm/core/scheduler_v2.py), whose times, of its own model and GPU, are the defaults;
`paper=true`: the paper's formulas, with predicted times. Differences: docs/policies/infercept.md.
"""

from collections.abc import Hashable
from math import inf

from cbatch import BatchShape, ConfigError, Request, View
from policies.chunking import ChunkSelector
from policies.pauses import Pauses
from policies.sarathi_serve import SarathiServe
from policies.shared.pins import Pin, PinnedSessions
from policies.shared.programs import program_of
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
        swap_seconds: float | None = None,
    ) -> None:
        """budget: tokens of an iteration, which takes `seconds` and `per_token` for each. swap_seconds: of a token's copy; None: no swap."""
        super().__init__(chunking)
        if budget < 1 or min(seconds, per_token, swap_seconds or 0.0) < 0:
            raise ConfigError(f"policy: need {budget=} >= 1, {seconds=}, {per_token=} and {swap_seconds=} >= 0")
        self.pauses, self.budget, self.seconds, self.per_token, self.paper = pauses, budget, seconds, per_token, paper
        self.swap_seconds = swap_seconds
        self._means: dict[Hashable, float | None] = {}  # predicted pauses of pinned sessions
        self._swaps: set[Hashable] = set()  # pinned sessions for which swapping wastes less than discarding

    def keep(self, request: Request) -> float:
        self._means[program_of(request)] = self.pauses.mean(request)
        return 0.0

    def lapse(self, view: View) -> None:
        self._means = {program: self._means[program] for program in self.pinned}
        self._swaps &= self.pinned.keys()
        running = sum(request.num_computed for request in view.running) if self.pinned else 0
        candidates = list[tuple[float, int, Hashable]]()
        for program, pin in self.pinned.items():
            passed, mean, waste = (
                view.now - pin.since,
                self._means[program] or 0.0,
                self._waste(program, pin, running, view),
            )
            rest = mean - passed if mean > passed else passed
            if program not in self.waiting and waste < rest * pin.num_tokens:
                candidates.append((waste, pin.number, program))
            self.pinned[program] = pin._replace(until=pin.since + max(mean, waste / pin.num_tokens))
        candidates.sort()
        if candidates and view.running:
            *_, kept = candidates.pop()
            self.pinned[kept] = self.pinned[kept]._replace(until=inf)  # the latest end: the first to go
        for *_, program in candidates:
            self.give_up(program)

    def give_up(self, program: Hashable) -> None:
        self._given_up[str(program)] = program in self._swaps
        super().give_up(program)

    def on_arrival(self, request: Request) -> None:
        self.pauses.note_arrival(request)
        super().on_arrival(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self.pauses.note_end(request, request.finished_at or 0.0)

    def _waste(self, program: Hashable, pin: Pin, running: int, view: View) -> float:
        """Returns the waste of discarding or of swapping, whichever is less, and notes which."""
        tokens = pin.num_tokens
        forward = view.cost.predict(BatchShape(((tokens, 0),))) if self.paper else 0.0
        transfer = None if self.swap_seconds is None else tokens * self.swap_seconds
        of_paper = wastes(tokens, running, forward, 0.0, transfer)
        discard = waste_of_computing(tokens, self.budget, len(view.decoding), running, self.seconds, self.per_token)
        discard, swap = of_paper["discard"] if self.paper else discard, of_paper.get("swap", inf)
        (self._swaps.add if swap < discard else self._swaps.discard)(program)
        return min(discard, swap)
