"""The prefix cache finds and evicts what vLLM's own KV cache manager does, step by step through the same random requests.

    python -m pytest tests/vllm/test_vllm_kv.py --vllm=FOLDER --runs=1000

draws that many runs, each until vLLM differs. Arrivals, chunks, decodes, preemptions and ends are random; most prompts share
beginnings. Compared are the tokens found by each waiting request and at each admission, whether an admission fits, the names of all
blocks, and the free ones by content in the order in which they would be taken. vLLM's null block, which is never free, is left out.

If requests are admitted in turn, by a plan for each, all of that is equal. What differs else, and nothing more:

    same step      vLLM names a block when its computation is scheduled: a later request of that step finds the block. Here, the next plan.
    taken before   vLLM admits in turn: an earlier request of a step can evict what a later one found. Here, a plan takes all hits first.
    blank blocks   vLLM 0.22.1 takes free blocks in the order of release, as `Appending`. vLLM 0.33 and this project take blank ones first.

Iterations end here before the next is planned. With one in flight, the sources differ in one more rule: vLLM names a block of generated
tokens when its token arrives, and this project when the request's next iteration is planned.
"""

from collections import Counter, deque
from collections.abc import Sequence
from copy import copy, deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest
from contended import LinearCost
from numpy.typing import NDArray
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, get_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_rig import Rig

from cbatch import Eviction, Limits, Plan, PlanError, Request
from cbatch.kv import PrefixPool
from cbatch.plan_check import check_plan
from cbatch.record import RunRecord
from cbatch.request_table import RequestTable
from cbatch.state import State
from cbatch.view import EngineView

MAX_TOKENS, NUM_TURNS, LETTERS = 40, 50, (1, 2)
Content = tuple[int, ...]
"""The tokens up to a block's end."""


class Appending(PrefixPool):
    """Takes free blocks in the order of release, blank or not: as vLLM 0.22.1."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._queue = dict.fromkeys(range(self.num_blocks))

    def _take(self, num_blocks: int) -> NDArray[np.int32]:
        self.num_free -= num_blocks
        blocks = [block for block in self._queue if not self.live[block]][:num_blocks]
        for block in blocks:
            del self._queue[block]
            if block in self._cached:
                del self._cached[block]
                self._forget(block)
        self.live[blocks] = 1
        return np.array(blocks, np.int32)

    def _give(self, blocks: NDArray[np.int32]) -> None:
        super()._give(blocks)
        for block in blocks[self.live[blocks] == 0][::-1].tolist():
            self._queue.pop(block, None)
            self._queue[block] = None


Pool = PrefixPool if hasattr(FreeKVCacheBlockQueue, "prepend_n") else Appending


class Pair:
    """Both caches, and the requests that wait and run in both."""

    def __init__(self, numbers: Random) -> None:
        self.numbers = numbers
        self.size, num_blocks = numbers.randint(1, 4), numbers.randint(10, 24)
        limits = Limits(NUM_TURNS, 256, MAX_TOKENS)
        self.rig = Rig(None, limits, num_blocks, self.size, prefix_cache=True)
        self.manager = self.rig.make(Scheduler).kv_cache_manager
        self.pool = Pool(num_blocks, self.size, NUM_TURNS, MAX_TOKENS, Eviction())
        self.state = State(RequestTable(NUM_TURNS, 1, MAX_TOKENS), self.pool)
        self.view = EngineView(self.state, limits, LinearCost(), deque(), RunRecord())
        self.theirs: dict[Request, Any] = {}
        self.texts = [numbers.choices(LETTERS, k=16) for _ in range(3)]
        self.contents: dict[Any, Content] = {}  # by the names of both

    def arrive(self, id_: int) -> None:
        numbers = self.numbers
        text = numbers.choice(self.texts)
        prompt = text[: numbers.randint(1, min(len(text), 28))] + numbers.choices(LETTERS, k=numbers.randint(0, 4))
        request = Request(id_, len(prompt), numbers.randint(1, 8), prompt=prompt)
        request.arrive(0.0)
        assert self.state.cache is not None
        self.state.cache.expect([request])
        self.state.waiting.add(request)
        self.theirs[request] = self.rig.request(request)

    def preempt(self, request: Request) -> None:
        self.state.preempt(request)
        self.manager.free(self.theirs[request])
        self.theirs[request].num_computed_tokens = 0

    def lookup(self, request: Request) -> list[int]:
        """The blocks that vLLM finds for a waiting request."""
        blocks, num_tokens, *_ = self.manager.get_computed_blocks(self.theirs[request])
        ids: list[int] = blocks.get_block_ids()[0]
        assert num_tokens == len(ids) * self.size
        return ids

    def allocate(self, request: Request, num_tokens: int, *, is_new: bool) -> bool:
        """vLLM's admission or growth of a request; returns whether it fits."""
        source = self.theirs[request]
        blocks, num_found, *_ = self.manager.get_computed_blocks(source) if is_new else (None, 0)
        if self.manager.allocate_slots(source, num_tokens, num_found, blocks) is None:
            return False
        source.num_computed_tokens += num_found + num_tokens
        return True

    def step(self, requests: Sequence[Request], *, in_turn: bool) -> str:
        """Computes some tokens of each request; returns how vLLM differs, if it does."""
        self.note_contents()
        hits = {request: self.lookup(request) for request in self.state.waiting}
        for request, blocks in hits.items():
            assert request.num_computed == len(blocks) * self.size, "tokens found"
        steps = []
        for group in [[request] for request in requests] if in_turn else [list(requests)]:
            counts = [self.numbers.randint(1, request.num_ready) for request in group]
            plan = Plan(zip(group, counts, strict=True))
            try:
                checked = check_plan(plan, self.state, self.view, "this test")
            except PlanError:
                assert not in_turn or not self.allocate(group[0], counts[0], is_new=group[0] in hits), "does not fit"
                continue
            for request, count in zip(group, counts, strict=True):
                if request in hits:
                    now = self.lookup(request)
                    if in_turn:
                        assert request.num_computed == len(now) * self.size, "tokens found at the admission"
                    elif now != hits[request]:
                        return "same step" if now[: len(hits[request])] == hits[request] else "taken before"
                assert self.allocate(request, count, is_new=request in hits), "fits"
            steps.append(self.state.apply(checked, 0.0))
        for step in steps:
            tokens = np.array(self.numbers.choices(LETTERS, k=len(step.requests)), np.int32)
            for place in step.sampled.tolist():
                self.theirs[step.requests[place]].append_output_token_ids([tokens.item(place)])
            for request in self.state.absorb(step, tokens, 0.0).finished:
                source = self.theirs.pop(request)
                self.manager.free(source)
                self.texts.append(list(source.all_token_ids))
        return ""

    def note_contents(self) -> None:
        """Notes what the names of all requests stand for."""
        for request, source in self.theirs.items():
            assert request._prefix is not None
            names = request._prefix.hashes(len(source.block_hashes))
            for place in range(len(source.block_hashes), 0, -1):
                if names[place - 1] in self.contents:
                    break
                content = tuple(source.all_token_ids[: place * self.size])
                self.contents[names[place - 1]] = self.contents[source.block_hashes[place - 1]] = content

    def compare(self) -> None:
        """The names, and the free blocks in the order in which they would be taken."""
        theirs, names, pool = self.manager.block_pool, self.pool._hashes, copy(self.pool)
        vars(pool).update({key: copy(value) for key, value in vars(pool).items()}, _copies=deepcopy(pool._copies))
        ours = [names[pool._take(1).item()] for _ in range(pool.num_free)]
        free = theirs.free_block_queue.get_all_free_blocks()
        assert list(map(self.content, ours)) == [self.content(hash_of(block)) for block in free], "order of eviction"
        named = sorted(self.content(name) for name in names if name is not None)
        assert named == sorted(self.content(hash_of(block)) for block in theirs.blocks if block.block_hash), "names"
        assert self.pool.num_free == theirs.get_num_free_blocks()
        assert self.pool.num_cached == sum(block.block_hash is not None for block in free)

    def content(self, name: Any) -> Content:
        return () if name is None else self.contents[name]


def hash_of(block: Any) -> Any:
    return None if block.block_hash is None else get_block_hash(block.block_hash)


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "together"])
def test_hits_and_the_order_of_eviction_are_those_of_vllm(in_turn: bool, num_runs: int, draw: int) -> None:
    counts = Counter[str]()
    for seed in range(draw, draw + num_runs):
        numbers = Random(seed)
        pair, most = Pair(numbers), numbers.choice((1, 4))
        for turn in range(NUM_TURNS):
            if numbers.random() < 0.5 and len(pair.theirs) < 7:
                pair.arrive(turn)
            if pair.state.running and numbers.random() < 0.1:
                pair.preempt(numbers.choice(list(pair.state.running)))
            ready = [*pair.state.running, *pair.state.waiting]
            chosen = numbers.sample(ready, min(len(ready), numbers.randint(1, most)))
            if chosen and (difference := pair.step(chosen, in_turn=in_turn)):
                counts[difference] += 1
                break
            pair.compare()
    assert set(counts) == (set() if in_turn else {"same step", "taken before"}) or num_runs < 100
