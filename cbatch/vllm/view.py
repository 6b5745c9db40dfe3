"""The view of vLLM's scheduler that policies plan from."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from cbatch.cost import BatchShape, CostModel
from cbatch.kv import BlockHash, Freed, KVView
from cbatch.limits import Limits
from cbatch.request import Request, Status
from cbatch.view import View
from cbatch.vllm.drafts import VllmDrafts
from cbatch.vllm.request import Population, ServedRequest, served


@dataclass(slots=True)
class Launched:
    """An iteration that vLLM has scheduled. requests: in the order of the plan. num_tokens, drafts: by vLLM's id. Times in seconds.

    num_decodes, state: as in `cbatch.record.InFlight`; 0 if neither hooks nor recordings need them.
    """

    index: int
    requests: list[ServedRequest]
    num_tokens: Mapping[str, int]
    drafts: Mapping[str, int]
    planned_at: float
    launched_at: float
    num_decodes: int
    state: tuple[int, int, int, int]
    note: str
    known_seconds: float | None = None

    def seconds(self, cost: CostModel) -> float:
        """Returns the predicted seconds; caches the cost model's prediction."""
        if self.known_seconds is None:
            self.known_seconds = cost.predict(self.shape())
        return self.known_seconds

    def shape(self) -> BatchShape:
        """Returns the shape of the latest iteration. Its tokens are already counted as computed."""
        chunks, context, num_decodes = [], 0, 0
        for request in self.requests:
            count = self.num_tokens[request.vllm_id]
            before = max(request.num_computed - count, 0)
            count -= self.drafts.get(request.vllm_id, 0)
            if count > 1:
                chunks.append((count, before))
            else:
                num_decodes, context = num_decodes + 1, context + before + 1
        return BatchShape(tuple(chunks), num_decodes, context).with_drafts(sum(self.drafts.values()))


class VllmKVView(KVView):
    """vLLM's KV cache with one group. Blocks of cached prefixes count as free unless a request holds them."""

    num_free: int = property(lambda kv: int(kv._pool.get_num_free_blocks()))  # type: ignore[assignment]
    num_tokens: int = property(lambda kv: kv.num_blocks * kv.block_size - kv.num_ahead)  # type: ignore[assignment]
    num_retiring = 0

    def __init__(self, scheduler: Any, view: "VllmView") -> None:
        self._view = view
        self._cache = scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self._manager = self._cache.coordinator.single_type_managers[0]
        self._lookups: dict[Request, Sequence[Any]] = {}  # valid while a plan is made
        self.block_size, self.num_ahead = int(scheduler.block_size), int(scheduler.num_lookahead_tokens)
        self.num_blocks = int(self._pool.num_gpu_blocks) - 1  # excludes vLLM's null block

    def num_at_border(self, decodes: Sequence[Request]) -> int:
        """Returns the blocks that the next tokens of decodes need: without tokens ahead, one for each decode whose blocks are all full."""
        if self.num_ahead:
            return sum(self.num_lacking(request, request.num_computed + 1) for request in decodes)
        size, held = self.block_size, self._manager.req_to_blocks
        full = [request for request in served(decodes) if not request.source.num_computed_tokens % size]
        return sum(len(held.get(request.vllm_id, ())) * size <= request.source.num_computed_tokens for request in full)

    def num_held(self, request: Request) -> int:
        assert isinstance(request, ServedRequest)
        return len(self._manager.req_to_blocks.get(request.vllm_id, ()))

    @property
    def num_cached(self) -> int:  # type: ignore[override]
        return sum(block.block_hash is not None for block in self._pool.free_block_queue.get_all_free_blocks())

    def cached_blocks(self, request: ServedRequest) -> Sequence[Any]:
        """Returns vLLM's blocks in the prefix cache that match a waiting request."""
        if request not in self._lookups:
            source, cache = request.source, self._cache
            looks = cache.enable_caching and not (source.num_computed_tokens or source.skip_reading_prefix_cache)
            find = cache.coordinator.find_longest_cache_hit
            self._lookups[request] = find(source.block_hashes, source.num_tokens - 1)[0][0] if looks else ()
        return self._lookups[request]

    def num_shared(self, request: Request) -> int:
        waits = request.status is Status.WAITING
        return sum(block.ref_cnt > 0 for block in self.cached_blocks(*served([request]))) if waits else 0

    def block_hashes(self, request: Request, at_most: int | None = None) -> Sequence[BlockHash]:
        if request.status is not Status.WAITING:
            return ()
        [waiting] = served([request])
        return waiting.source.block_hashes[:at_most]  # type: ignore[no-any-return]

    def num_gained(self, preempted: Iterable[Request], newcomers: Iterable[Request]) -> int:
        at_once = [request for request in served(preempted) if not self._view.is_in_flight(request)]
        held = self._manager.req_to_blocks
        released = Counter(block.block_id for request in at_once for block in held.get(request.vllm_id, ()))
        freed = {number for number, count in released.items() if self._pool.blocks[number].ref_cnt == count}
        cached = [block for request in served(newcomers) for block in self.cached_blocks(request)]
        taken = {block.block_id for block in cached if block.block_id in freed or not block.ref_cnt}
        return len(freed) - len(taken) + sum(not block.ref_cnt for block in cached)

    def look_again(self) -> None:
        """Drops cached lookups. Call when vLLM's state changes."""
        self._lookups.clear()

    def freed_by_preempting(self, request: Request) -> Freed:
        """Counts only blocks that no other request holds."""
        assert isinstance(request, ServedRequest)
        num_alone = sum(block.ref_cnt == 1 for block in self._manager.req_to_blocks.get(request.vllm_id, ()))
        return Freed(0, num_alone) if self._view.is_in_flight(request) else Freed(num_alone, 0)


class VllmView(View):
    """The state of vLLM's scheduler. in_flight: iterations, oldest first. last_ended_at: seconds, end of the latest ended iteration."""

    iteration = 0
    kv: VllmKVView
    drafts: VllmDrafts
    in_flight: deque[Launched]
    last_ended_at: float

    def __init__(self, scheduler: Any, population: Population, limits: Limits, cost: CostModel) -> None:
        self.update(now=0.0, limits=limits, cost=cost, kv=VllmKVView(scheduler, self), waiting=population.waiting)
        self.update(running=population.running, decoding=population.decoding, prefilling=population.prefilling)
        self.update(in_flight=deque(), last_ended_at=0.0)
        self._scheduler, self._population = scheduler, population
        self._lacking: int | None = None  # blocks for all decodes, while a plan is made

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    @property
    def predicted_end(self) -> float:
        end = self.last_ended_at
        for launched in self.in_flight:
            end = max(end, launched.launched_at) + launched.seconds(self.cost)
        return max(end, self.now)

    @property
    def num_places(self) -> int:
        """Returns the free places; a request whose last token is in flight still occupies a row of vLLM's batch."""
        scheduler = self._scheduler
        return min(super().num_places, int(scheduler.max_num_running_reqs) - len(scheduler.running))

    def is_in_flight(self, request: Request) -> bool:
        assert isinstance(request, ServedRequest)
        return any(request.vllm_id in launched.num_tokens for launched in self.in_flight)

    @property
    def decodes(self) -> list[Request]:
        """Returns the requests of `decoding`. Callers must not modify the list."""
        return self._population.decoding.members

    def ready_decodes(self, at_most: int, without: Set[Request] = frozenset()) -> tuple[list[Request], int]:
        requests = self.decodes
        if without:
            requests = [request for request in requests if request not in without]
        requests = requests if len(requests) <= at_most else requests[:at_most]
        return requests, self.num_lacking_a_block(requests)

    def decode_blocks(self) -> Mapping[Request, int]:
        return {request: self.num_lacking_a_block([request]) for request in self.decoding}

    def num_lacking_a_block(self, decodes: Sequence[Request]) -> int:
        """Returns the blocks that decodes need for their next tokens."""
        if decodes is not self.decodes:
            return self.kv.num_at_border(decodes)
        if self._lacking is None:
            self._lacking = self.kv.num_at_border(decodes)
        return self._lacking

    def look_again(self) -> None:
        """Drops cached lookups. Call when vLLM's state changes."""
        self._lacking = None
        self.kv.look_again()
