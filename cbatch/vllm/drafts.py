"""vLLM's speculation: vLLM proposes drafts for each decode after every iteration, and a plan decides how many of them are verified.

    vLLM proposes      [d1 d2 d3]     `request.spec_token_ids`; in its asynchronous loop three blanks, as the tokens are on the GPU
    the plan has       1 + 2          vLLM schedules the newest token, d1 and d2, and drops d3
    vLLM receives      t1 t2          d1 was accepted, d2 was not

Until vLLM has received the tokens, its counters hold all drafts in flight, and so does what a policy sees.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cbatch.drafts import Drafts, Shares
from cbatch.request import Request
from cbatch.vllm.request import Population, served
from cbatch.vllm.settings import Counts


class VllmDrafts(Drafts):
    """What a policy sees of vLLM's speculation. `seconds` is 0: vLLM drafts for each request, whatever the plan.

    most: vLLM's `num_speculative_tokens`.
    """

    def __init__(self, scheduler: Any, population: Population, counts: Counts) -> None:
        self.most = int(scheduler.num_spec_tokens)
        self._asynchronous = bool(scheduler.scheduler_config.async_scheduling)
        self._population, self._counts, self._shares = population, counts, Shares(self.most)

    def can_have(self, request: Request) -> bool:
        return request in self._population.decoding

    def granted(self, request: Request) -> int:
        [request] = served([request])
        proposed = len(request.source.spec_token_ids) if self.can_have(request) else 0
        return max(min(proposed, self._num_left(request)), 0)

    def propose(self, request: Request, at_most: int) -> int:
        """Counts drafts that vLLM has not proposed."""
        number = min(at_most, self.granted(request))
        self._counts.lacking_drafts += max(min(at_most, self._num_left(request)) - number, 0)
        return number

    def _num_left(self, request: Request) -> int:
        """Returns the drafts that fit into the request's longest length.

        One fewer in the asynchronous loop: there drafts in flight count as tokens, of which vLLM computes no more than the model's longest
        length allows, but if they are rejected, the next iteration has to compute one more.
        """
        return request.max_tokens - request.num_tokens - 1 - self._asynchronous

    def launched(self, scheduled: Collection[str], drafts: Mapping[str, int], observed: bool) -> None:
        """Takes in an iteration that vLLM has scheduled.

        In the asynchronous loop vLLM's workers keep the drafts of the latest iteration only: the others are forgotten here, too.

        scheduled: ids of its requests. drafts: by vLLM's id. observed: vLLM follows its own rule, and nothing is changed.
        """
        self._counts.drafts += sum(drafts.values())
        for id_, number in drafts.items():
            self._population.by_id[id_].num_drafts += number
        if self.most and self._asynchronous and not observed:
            for request in served(self._population.running):
                if request.vllm_id not in scheduled:
                    request.source.spec_token_ids = []

    def received(self, drafts: Mapping[str, int], num_received: Mapping[str, int]) -> None:
        """Takes in the end of an iteration. num_received: tokens, by vLLM's id. Both may name requests that have ended."""
        self._counts.accepted_drafts += sum(num_received.get(id_, 1) - 1 for id_ in drafts)
        outcomes = []
        for id_, number in drafts.items():
            if (request := self._population.by_id.get(id_)) is not None:
                request.num_drafts -= number
                if id_ in num_received:
                    outcomes.append((request._row, request.id, number, num_received[id_] - 1))
        self._shares.note(*np.array(outcomes, np.int64).reshape(-1, 4).T)
        self._population.leave_ending()
