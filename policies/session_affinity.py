"""Bounded session affinity (PR vllm#51384): vLLM V1's scheduler, which lets one turn of a session per iteration pass the queue.

Of the first `window` waiting requests, the first comes to the head whose session had a request that ended at most `ttl` seconds ago, and which
finds at least `least_blocks` blocks in the prefix cache. None does while a preempted request waits, or once the head of the queue has
waited for `patience` seconds. All else is `vllm_v1`.

Source: the text of the pull request. Its defaults were not read: those here are free choices. Difference: the pull request's
time to live begins when the session was last scheduled.
"""

from collections.abc import Iterable
from itertools import islice

from cbatch import ConfigError, Request, View
from policies.shared.latest import Latest
from policies.shared.programs import ended_at, ends_program
from policies.vllm_v1 import VllmV1


class SessionAffinity(VllmV1):
    depends_on = ("prefix_cache", "sessions")

    def __init__(
        self,
        budget: int,
        window: int = 32,
        least_blocks: int = 1,
        ttl: float = 30.0,
        patience: float = 5.0,
        long_prefill: int = 0,
    ) -> None:
        super().__init__(budget, long_prefill)
        if window < 0 or least_blocks < 1 or ttl < 0 or patience < 0:
            raise ConfigError(f"policy: need {window=}, {ttl=}, {patience=} >= 0 and {least_blocks=} >= 1")
        self.window, self.least_blocks, self.ttl, self.patience = window, least_blocks, ttl, patience
        self._ended = Latest[str, float]()  # seconds of the latest end, by session

    def waiting(self, view: View) -> Iterable[Request]:
        first = self._promoted(view)
        if first is None:
            return super().waiting(view)
        return (first, *(request for request in view.waiting if request is not first))

    def on_finish(self, request: Request) -> None:
        if request.session is not None and ends_program(request):
            self._ended.pop(request.session, None)
        elif request.session is not None:
            self._ended[request.session] = ended_at(request)

    def _promoted(self, view: View) -> Request | None:
        head = next(iter(view.waiting), None)
        if head is None or self._victims or view.now - head.arrival_time >= self.patience:
            return None
        continuing = (request for request in islice(view.waiting, self.window) if self._goes_on(request, view))
        return next(continuing, None)

    def _goes_on(self, request: Request, view: View) -> bool:
        end = self._ended.get(request.session or "")
        is_recent = end is not None and view.now - end <= self.ttl
        return is_recent and request.num_computed >= self.least_blocks * view.kv.block_size
