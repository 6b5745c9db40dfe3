"""Deficit Longest Prefix Match: prefix locality within fair shares of clients (arXiv 2501.14312).

Each client has a deficit. Requests are ordered as in LPM, skipping clients whose deficit is spent. An admission costs the tokens that
it computes, so cached tokens are free, and each output token costs when it is generated. When all waiting clients have spent their
deficits, every known client without a deficit gets a `quantum`. A large quantum behaves like LPM; a small quantum is fair.

Sources: the abstract, and a third party's code for SGLang, whose refill of all known clients this file follows. The default of the
quantum is not published.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from heapq import merge
from itertools import takewhile
from math import inf
from operator import attrgetter

from cbatch import ConfigError, Request, View
from policies.chunking import ChunkSelector
from policies.prefix_order import PrefixOrder
from policies.shared.prefixes import MOST_RANKED
from policies.shared.waiting import WaitingQueue


class DLPM(PrefixOrder):
    depends_on = ("prefix_cache", "clients")

    def __init__(
        self, chunking: ChunkSelector, quantum: float, prompt_weight: float = 1.0, output_weight: float = 2.0
    ) -> None:
        if not (quantum > 0 and 0 < prompt_weight < inf and 0 <= output_weight < inf):
            raise ConfigError(f"policy: need {quantum=} > 0, and finite {prompt_weight=} > 0, {output_weight=} >= 0")
        super().__init__(chunking)
        self.quantum, self.prompt_weight, self.output_weight = quantum, prompt_weight, output_weight
        self.deficits = defaultdict[str | None, float](float)  # of all known clients
        self._planned: dict[Request, float] = {}  # cost of the admissions of the last plan
        self._queues: defaultdict[str | None, WaitingQueue] = defaultdict(lambda: WaitingQueue(key=lambda request: 0))

    def on_wait(self, request: Request) -> None:
        super().on_wait(request)
        self.deficits[request.client] += self._planned.pop(request, 0.0)  # planned, and not admitted
        self._queues[request.client].push(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        cost = self._planned.pop(request, 0.0)
        self.deficits[request.client] += cost if request.admitted_at is None else 0.0

    def prompts(self, view: View) -> Iterator[Request]:
        self._planned.clear()
        yield from view.prefilling
        for client in [client for client, queue in self._queues.items() if next(queue.in_order(view), None) is None]:
            del self._queues[client]
        self._refill(self._queues.keys())
        for request in self._by_arrival(view) if len(view.waiting) > MOST_RANKED else self._kept.in_order(view):
            if self.deficits[request.client] > 0:
                cost = self.prompt_weight * request.num_ready
                yield request
                self.deficits[request.client] -= cost  # reached only if the request was admitted
                self._planned[request] = cost

    def _by_arrival(self, view: View) -> Iterator[Request]:
        """Returns the waiting requests of clients whose deficits are not spent."""

        def rest(queue: WaitingQueue) -> Iterator[Request]:
            return takewhile(lambda request: self.deficits[request.client] > 0, queue.in_order(view))

        return merge(*map(rest, self._queues.values()), key=attrgetter("arrival_time", "id"))

    def on_tokens(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.deficits[request.client] -= self.output_weight

    def _refill(self, waiting: Collection[str | None]) -> None:
        while waiting and all(self.deficits[client] <= 0 for client in waiting):
            for client, deficit in self.deficits.items():
                if deficit <= 0:
                    self.deficits[client] = deficit + self.quantum
