"""Sarathi-Serve with the longest output admitted first: the LPT rule (Graham, SIAM J. Appl. Math. 17(2), 1969).

For a queue that is complete from the start, where only the end of the last request matters. First come, first served may
start a long output late, and the batch then runs nearly empty until that output ends. With the longest first the batch
stays full. The length is `predicted_new_tokens` if given, else `max_new_tokens`. Under steady arrivals short requests may
starve.

Ranked by output tokens per prompt token, long outputs of short prompts start first: the batch fills with decodes sooner.
"""

from collections.abc import Iterable

from cbatch import Request, View
from policies.chunking import ChunkSelector
from policies.shared.waiting import RankedPrompts


class LongestFirst(RankedPrompts):
    steady = RankedPrompts.steady

    def __init__(self, chunking: ChunkSelector, per_prompt_token: bool = False) -> None:
        """per_prompt_token: ranks by output tokens per prompt token."""
        super().__init__(chunking, self._rank)
        self.per_prompt_token = per_prompt_token

    def prompts(self, view: View) -> Iterable[Request]:
        return super().prompts(view) if view.num_places > 0 else view.prefilling

    def _rank(self, request: Request) -> tuple[float, float]:
        output = request.predicted_new_tokens or request.max_new_tokens
        return -output / (request.num_prompt_tokens if self.per_prompt_token else 1), request.arrival_time
