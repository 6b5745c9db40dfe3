"""Sarathi-Serve with the longest output admitted first: the LPT rule (Graham, SIAM J. Appl. Math. 17(2), 1969).

For a queue that is complete from the start, where only the end of the last request counts. First come, first served may
start a long output late, so that the batch runs nearly empty until it ends; with the longest first the batch stays
full. The length is `predicted_new_tokens` where there is one, else `max_new_tokens`. Under steady arrivals short
requests may starve.

Ranked by output per prompt token instead, the batch fills with decodes sooner, and long prompts come later beside them.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from cbatch import Request, View
from policies.chunking import ChunkSelector
from policies.sarathi_serve import SarathiServe


class LongestFirst(SarathiServe):
    def __init__(self, chunking: ChunkSelector, per_prompt_token: bool = False) -> None:
        """per_prompt_token: rank by output / prompt tokens instead of output tokens."""
        super().__init__(chunking)
        self.per_prompt_token = per_prompt_token

    def prompts(self, view: View) -> Iterable[Request]:
        return chain(view.prefilling, self._ranked(view))

    def _ranked(self, view: View) -> Iterator[Request]:
        """Yields the waiting requests, highest rank first; sorts only if one can be admitted."""
        if len(view.running) < view.limits.max_running:
            yield from sorted(view.waiting, key=self._rank, reverse=True)

    def _rank(self, request: Request) -> float:
        output = request.predicted_new_tokens or request.max_new_tokens
        return output / request.num_prompt_tokens if self.per_prompt_token else output
