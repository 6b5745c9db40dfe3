"""What a router knows: dated reports that replicas post, and the requests that it has sent itself. Never an engine.

replica    | launches, posts a report | ... | absorbs, posts a report | ...
router     at t reads the reports with at <= t - staleness, and counts its own requests at once
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter

import numpy as np

from cbatch.cluster.reports import Report
from cbatch.cost import BatchShape, CostModel
from cbatch.kv import BlockHash
from cbatch.kv.hashes import num_leading, prompt_hashes
from cbatch.limits import Limits
from cbatch.request import Request


class Phase(StrEnum):
    """Where a replica is in its life: see `scaling`."""

    CLOSED = "closed"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Role(StrEnum):
    """What a replica does: compute prompts up to the first token, continue requests of other replicas, or both."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@lru_cache(maxsize=16)
def _hashes_of(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Returns the hashes of the full blocks of an arriving request's prompt; replicas of equal block size share them."""
    return prompt_hashes(request, block_size)


class ReplicaView:
    """One replica, as far as a router knows it. Counters include iterations in flight.

    pool: name of its pool. num_blocks, block_size: size of its KV cache. max_tokens: of the longest request that it can serve.
    at: seconds; when the newest report that has reached the router was posted, 0 before the first. num_free: free KV blocks.
    limits: of its iterations. cost: predicts their seconds, as for policies. role: see `Role`. phase: of its life.
    price: US dollars per hour of its GPUs; None: unknown.
    life: number of its life, which no other replica or life has; a new one begins with an empty cache.
    num_ended, ended_output_tokens: of requests that ended there. ended_prompt_tokens: of prompts computed there that ended or left.
    follows_cache: whether the router has asked what is cached, so that reports name the changes.
    """

    def __init__(
        self,
        pool: str,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        cost: CostModel,
        price: float | None = None,
        role: Role = Role.BOTH,
    ) -> None:
        self.pool, self.num_blocks, self.block_size, self.cost = pool, num_blocks, block_size, cost
        self.limits, self.price, self.phase, self.role = limits, price, Phase.READY, role
        self.num_ended = self.ended_prompt_tokens = self.ended_output_tokens = 0
        longest = num_blocks * block_size + 1  # the last token never enters the KV cache
        self.max_tokens = min(limits.max_request_tokens, longest)
        self.at, self.num_free = 0.0, num_blocks
        self._posted: deque[Report] = deque()  # and not read yet
        self.news: list[tuple[float, int]] = []  # of the cluster's view: when and where a report was posted, a heap
        self.index = self.life = 0  # the index in the cluster's view
        self._sent: dict[int, tuple[Request, int]] = {}  # unfinished, with the tokens found in the cache when sent
        self._longest = 0  # tokens of `_sent`, at their longest lengths
        self._report = Report(0.0, np.zeros(0, np.int64), np.zeros(0, np.int64), 0, num_blocks)
        self.follows_cache = False
        self._hashes = set[BlockHash]()
        self._shared: Counter[BlockHash] | None = None  # by full block of prompts in `_sent`; None: never read

    @property
    def num_unfinished(self) -> int:
        """Requests sent there that have not ended."""
        return len(self._sent)

    @property
    def num_waiting(self) -> int:
        """Unfinished requests that do not run: not admitted yet, or preempted."""
        return len(self._sent) - len(self._report.ids)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of prompts and outputs not computed yet; outputs by their limit, as their true length is hidden."""
        report = self._report
        computed: int = report.computed.sum().item()
        return self._longest - computed + report.lag * len(report.ids)

    @property
    def kv_committed(self) -> float:
        """Share of the KV cache that the unfinished requests take at their longest lengths, if they share nothing; may exceed 1."""
        return self._longest / (self.num_blocks * self.block_size)

    @property
    def num_running(self) -> int:
        """Unfinished requests that have been admitted."""
        return len(self._report.ids)

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks that are not free."""
        return 1 - self.num_free / self.num_blocks

    def prompts_left(self) -> list[tuple[Request, int]]:
        """Returns the unfinished requests whose prompts are not computed, each with its prompt tokens left.

        Of a waiting request these exclude the tokens that were cached when it was sent.
        """
        self.follows_cache, report = True, self._report
        pairs: Iterator[tuple[int, int]] = zip(report.ids.tolist(), report.computed.tolist(), strict=True)
        begun = {id_: tokens - report.lag for id_, tokens in pairs}
        sent = ((request, begun.get(id_, found)) for id_, (request, found) in self._sent.items())
        lefts = ((request, request.num_prompt_tokens - tokens) for request, tokens in sent)
        return [(request, left) for request, left in lefts if left > 0]

    @property
    def prompt_tokens_left(self) -> int:
        """Sum of `prompts_left`."""
        return sum(left for _, left in self.prompts_left())

    @property
    def predicted_wait(self) -> float:
        """Predicted seconds until `prompts_left` are computed, one after another and nothing else."""
        return sum(self.prefill_seconds(request, left) for request, left in self.prompts_left())

    def prefill_seconds(self, request: Request, num_tokens: int) -> float:
        """Returns the predicted seconds of an iteration that computes the last tokens of the prompt alone."""
        return self.cost.predict(BatchShape(((num_tokens, request.num_prompt_tokens - num_tokens),)))

    def fits(self, request: Request) -> bool:
        """Whether the replica can serve the request at all."""
        return self._longest_of(request) <= self.max_tokens

    def block_hashes(self, request: Request) -> Sequence[BlockHash]:
        """Returns the hashes of the full blocks of an arriving request's prompt. Equal prefixes have equal hashes."""
        return _hashes_of(request, self.block_size)

    def cached_tokens(self, request: Request) -> int:
        """Returns the prompt tokens of an arriving request that the reported prefix cache holds; 0 without one."""
        self.follows_cache = True
        return self._num_shared(request, self._hashes) * self.block_size

    def sent_tokens(self, request: Request) -> int:
        """Returns the leading prompt tokens that an arriving request shares with an unfinished one, computed or not."""
        return self._num_shared(request, self._blocks) * self.block_size

    def prompt_blocks_with(self, request: Request) -> int:
        """Returns the KV blocks of the prompts of the unfinished requests and an arriving one, shared blocks counted once."""
        hashes, size = _hashes_of(request, self.block_size), self.block_size
        new = len(hashes) - num_leading(hashes, self._blocks)
        parts = sum(sent.num_prompt_tokens % size > 0 for sent, _ in self._sent.values())
        return len(self._blocks) + new + parts + (request.num_prompt_tokens % size > 0)

    @property
    def _blocks(self) -> Counter[BlockHash]:
        if self._shared is None:
            sent = (_hashes_of(request, self.block_size) for request, _ in self._sent.values())
            self._shared = Counter(chain.from_iterable(sent))
        return self._shared

    def _num_shared(self, request: Request, held: Collection[BlockHash]) -> int:
        """Counts leading blocks; the last token of a prompt is always computed."""
        if not held:
            return 0
        most = (request.num_prompt_tokens - 1) // self.block_size
        return num_leading(_hashes_of(request, self.block_size)[:most], held)

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def post(self, report: Report) -> None:
        """Called by the replica, perhaps on a thread of its own."""
        self._posted.append(report)
        heappush(self.news, (report.at, self.index))

    def send(self, request: Request, num_found: int | None = None) -> None:
        """Counts a request that was sent to the replica. num_found: tokens that will be cached there; None: as reported."""
        if num_found is None:
            num_found = self._num_shared(request, self._hashes) * self.block_size
        self._sent[request.id] = request, num_found
        self._add(request, 1)

    def forget(self, id_: int) -> Request:
        """Takes out a request that has ended or left, or that ended before it came, and counts its prompt if it was computed here."""
        request, num_found = self._sent.pop(id_)
        if num_found < request.num_prompt_tokens:  # the cache alone never holds the last token
            self.ended_prompt_tokens += request.num_prompt_tokens
        self._add(request, -1)
        return request

    def read(self, latest: float) -> list[tuple[float, int, Request]]:
        """Reads the reports that were posted until `latest`; returns the requests that ended, with their times and ids."""
        ended: list[tuple[float, int, Request]] = []
        posted = self._posted
        while posted and posted[0].at <= latest:
            self._report = report = posted.popleft()
            for id_, num_output_tokens in report.ended:
                if id_ not in self._sent:  # the router has rejected it
                    continue
                self.num_ended += 1
                self.ended_output_tokens += num_output_tokens
                ended.append((report.at, id_, self.forget(id_)))
            for id_ in report.left:
                self.forget(id_)
            for block_hash, held in report.changed.items():
                (self._hashes.add if held else self._hashes.discard)(block_hash)
        self.at, self.num_free = self._report.at, self._report.num_free
        return ended

    def _longest_of(self, request: Request) -> int:
        return request.num_prompt_tokens + 1 if self.role is Role.PREFILL else request.max_tokens

    def _add(self, request: Request, sign: int) -> None:
        self._longest += sign * self._longest_of(request)
        if (shared := self._shared) is not None:
            for block_hash in _hashes_of(request, self.block_size):
                shared[block_hash] += sign
                if not shared[block_hash]:
                    del shared[block_hash]


class ClusterView(Sequence[ReplicaView]):
    """All replicas, in whatever phase.

    now: seconds; when the request to route has arrived, or the autoscaler is asked. num_arrived: requests routed until then.
    least: replicas of each pool that are always there. stage: the role that the router is asked for, PREFILL at the arrival of a request,
    DECODE if another replica continues it.
    """

    def __init__(self, replicas: Sequence[ReplicaView], staleness: float) -> None:
        """staleness: seconds from the posting of a report until the router can read it."""
        self._replicas, self._staleness, self.now = replicas, staleness, 0.0
        self.num_arrived, self.least, self.stage = 0, 1, Role.PREFILL
        self._news: list[tuple[float, int]] = []  # see `ReplicaView.news`
        self._bound: dict[int, int] = {}  # the decoder of each request that is to come to it, by id
        self._ready: dict[Role, tuple[list[int], int]] = {}  # by stage, with the longest that all serve
        for index, replica in enumerate(replicas):
            replica.news, replica.index, replica.life = self._news, index, index

    def set_phase(self, index: int, phase: Phase) -> None:
        self._replicas[index].phase, self._ready = phase, {}
        if phase is Phase.STARTING:
            self._replicas[index].life += len(self)

    def __getitem__(self, index: int) -> ReplicaView:  # type: ignore[override]
        return self._replicas[index]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[ReplicaView]:
        return iter(self._replicas)

    def fitting(self, request: Request, stage: Role | None = None) -> list[int]:
        """Returns the indices of the replicas that are ready, have a role for the stage (default: the present one), and can serve the request."""
        replicas, stage = self._replicas, stage or self.stage
        if stage not in self._ready:
            roles = Role.BOTH, stage
            able = [i for i, replica in enumerate(replicas) if replica.phase is Phase.READY and replica.role in roles]
            self._ready[stage] = able, min((replicas[index].max_tokens for index in able), default=0)
        ready, shortest = self._ready[stage]
        if request.max_tokens <= shortest:
            return ready.copy()
        return [index for index in ready if replicas[index].fits(request)]

    def bind(self, request: Request, decoder: int) -> None:
        """Counts a request at a decoder that was chosen before the prefill. For the cluster."""
        self._replicas[decoder].send(request, request.num_prompt_tokens)
        self._bound[request.id] = decoder

    def unbind(self, request: Request) -> None:
        """Notes that the request is at its decoder. For the cluster."""
        self._bound.pop(request.id, None)

    def update(self, now: float) -> list[Request]:
        """Reads the reports that have become known by `now`; returns the requests that have ended, in this order. For the cluster."""
        due: set[int] = set()
        self.now, latest, news = now, now - self._staleness, self._news
        while news and news[0][0] <= latest:
            due.add(heappop(news)[1])
        ended: list[tuple[float, int, Request]] = []
        for index in due:
            ended += self._replicas[index].read(latest)
        for _, id_, _request in ended:
            if (decoder := self._bound.pop(id_, None)) is not None:  # it has ended at its prefiller
                self._replicas[decoder].forget(id_)
        return [request for *_, request in sorted(ended, key=itemgetter(0, 1))]
