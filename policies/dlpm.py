"""Deficit Longest Prefix Match: locality within fair shares of clients (arXiv 2501.14312).

Each client has a deficit. Requests come in the order of LPM, but for those of clients whose deficit is spent. An admission costs the
tokens that it computes, so that what the cache holds is free, and each output token costs as it comes. Where all clients that wait have
spent their deficits, every known client without any gets a `quantum`. A large quantum is LPM, a small one fair.

Read: the abstract, and a third party's code for SGLang, whose refill of all known clients this file follows; the default of the
quantum is not published.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from cbatch import ConfigError, Request, View
from policies.chunking import ChunkSelector
from policies.prefix_order import PrefixOrder


class DLPM(PrefixOrder):
    depends_on = ("prefix_cache", "clients")

    def __init__(
        self, chunking: ChunkSelector, quantum: float, prompt_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        if not (quantum > 0 and prompt_weight > 0 and output_weight >= 0):
            raise ConfigError(f"policy: need {quantum=} > 0, {prompt_weight=} > 0, {output_weight=} >= 0")
        super().__init__(chunking)
        self.quantum, self.prompt_weight, self.output_weight = quantum, prompt_weight, output_weight
        self.deficits: defaultdict[str | None, float] = defaultdict(float)

    def prompts(self, view: View) -> Iterator[Request]:
        yield from view.prefilling
        ranked = self.ranked(view)
        self._refill({request.client for request in ranked})
        for request in ranked:
            if self.deficits[request.client] > 0:
                cost = self.prompt_weight * request.num_ready
                yield request
                self.deficits[request.client] -= cost  # it was admitted: else nobody asks for the next one

    def on_tokens(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.deficits[request.client] -= self.output_weight

    def _refill(self, waiting: set[str | None]) -> None:
        while waiting and all(self.deficits[client] <= 0 for client in waiting):
            for client, deficit in self.deficits.items():
                if deficit <= 0:
                    self.deficits[client] = deficit + self.quantum
