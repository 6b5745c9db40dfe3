"""Justitia: fair queuing of jobs (sessions) by virtual time. Written from memory of the paper; not checked against it.

All jobs share the KV cache in equal parts in a fluid system, in which virtual time passes at 1 / (jobs that it has not ended). A job's
tag is the virtual time at which the fluid system ends it: that of its first arrival plus its cost in tokens of KV cache x iterations.
Waiting requests are ordered by their jobs' tags. Each iteration gives the fluid system all tokens of the KV cache. Ties: arrival.

A job costs `extra["job_cost"]` of its first request, or else the mean of the last `window` ended jobs. Until a job has ended, a job costs
what its first request costs: P prompt and O output tokens cost P * O + O^2 / 2.
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from heapq import heappop, heappush

from cbatch import ConfigError, Plan, Request, View
from policies.chunking import ChunkSelector
from policies.predictors import Predictor
from policies.sarathi_serve import SarathiServe
from policies.shared.programs import OpenPrograms, program_of
from policies.shared.waiting import RankedPrompts


class Justitia(RankedPrompts):
    depends_on, steady = ("sessions",), SarathiServe.steady

    def __init__(self, chunking: ChunkSelector, predictor: Predictor, window: int = 200) -> None:
        super().__init__(chunking, self._tag)
        if window < 1:
            raise ConfigError(f"policy.window={window}: give the number of ended jobs, at least 1")
        self.predictor, self.window = predictor, window
        self.tags: dict[Hashable, float] = {}
        self._spent: defaultdict[Hashable, float] = defaultdict(float)  # cost of the ended requests of jobs
        self._ended = deque[float](maxlen=window)  # costs of ended jobs
        self._arrived, self._iteration, self._open = list[Request](), 0, OpenPrograms()  # since the latest plan
        self._virtual, self._fluid = 0.0, list[float]()  # time, and the tags of jobs that the fluid system serves

    def plan(self, view: View) -> Plan:
        for _ in range(self._iteration, view.iteration):  # several if plans were repeated
            self._advance(view.kv.num_tokens)
        self._iteration = view.iteration
        for request in self._arrived:
            if request.finished_at is None and (job := program_of(request)) not in self.tags:
                self.tags[job] = self._virtual + self._cost(request)
                heappush(self._fluid, self.tags[job])
        self._arrived.clear()
        return super().plan(view)

    def on_arrival(self, request: Request) -> None:
        self._open.arrive(request)
        self._arrived.append(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        self.predictor.observe(request)
        job = program_of(request)
        self._spent[job] += token_time(request.num_prompt_tokens, request.num_output_tokens)
        if self._open.finish(request):
            self._ended.append(self._spent.pop(job))
            self.tags.pop(job, None)

    def _tag(self, request: Request) -> float:
        return self.tags[program_of(request)]

    def _cost(self, request: Request) -> float:
        if (stated := request.extra.get("job_cost")) is not None:
            return float(stated)
        if self._ended:
            return sum(self._ended) / len(self._ended)
        return token_time(request.num_prompt_tokens, self.predictor.output(request))

    def _advance(self, service: float) -> None:
        while self._fluid and service > 0:
            needed = (self._fluid[0] - self._virtual) * len(self._fluid)
            self._virtual += min(service, needed) / len(self._fluid)
            if service >= needed:
                self._virtual = heappop(self._fluid)
            service -= needed


def token_time(prompt: int, output: float) -> float:
    """Returns the tokens that a request holds in the KV cache, summed over the iterations of its output."""
    return prompt * output + output**2 / 2
