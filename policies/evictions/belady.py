"""Belady's optimum: evicts the block whose next use is farthest (Belady, IBM Systems Journal, 1966).

It reads the future, so it is a yardstick and not a policy. If requests are served one at a time in the order of submission, it bounds
the hits of all evictions; otherwise it is a reference.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from math import inf

from cbatch import BlockHash, CachedBlock, Eviction, Request


class Belady(Eviction):
    """Reads the prompts of all submitted requests: in a closed loop, in a stream and behind a router those that have arrived. A spare copy of a block is never used again.

    An admitted request takes the blocks that it uses out of the cache, and the blocks are ranked again at their release. A prompt that
    ends with a full block computes that block even if it is cached: the cached copy becomes spare, and has no use if the next request with
    this block is such a request. Keys therefore change only when requests are submitted, when such a request is admitted, and when a
    request ends without having been admitted.
    """

    depends_on = ("future",)

    def __init__(self) -> None:
        # places and prompt tokens of the requests with each block, ascending
        self._uses: defaultdict[BlockHash, deque[tuple[int, int]]] = defaultdict(deque)
        self._places: dict[int, int] = {}  # of requests not yet admitted, by id
        self._admitted: set[int] = set()  # places
        self._hashes: dict[int, Sequence[BlockHash]] = {}  # of requests that have not ended, by id
        self._copied: dict[int, BlockHash] = {}  # cached blocks that running requests compute again, by id

    def keys(self, blocks: Sequence[CachedBlock], now: float) -> Sequence[tuple[float, int]]:
        self.dynamic, copied = False, set(self._copied.values())
        spare = [block.is_spare or block.hash in copied for block in blocks]
        uses = (inf if is_spare else self._next_use(block) for block, is_spare in zip(blocks, spare, strict=True))
        return [(-use, -block.end) for use, block in zip(uses, blocks, strict=True)]

    def _next_use(self, block: CachedBlock) -> float:
        uses = self._uses.get(block.hash, deque())
        while uses and uses[0][0] in self._admitted:
            uses.popleft()
        return uses[0][0] if uses and uses[0][1] > block.end else inf  # a prompt's last token is always computed

    def on_submit(self, request: Request, hashes: Sequence[BlockHash]) -> None:
        self.dynamic = True
        self._hashes[request.id] = hashes
        self._places[request.id] = place = len(self._places) + len(self._admitted)
        for block_hash in hashes:
            self._uses[block_hash].append((place, request.num_prompt_tokens))

    def on_admit(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        if (place := self._places.pop(request.id, None)) is not None:
            self._admitted.add(place)
        if len(hashes) == len(mine := self._hashes[request.id]) - 1:
            self.dynamic = True
            self._copied[request.id] = mine[-1]

    def on_release(self, request: Request, hashes: Sequence[BlockHash], now: float) -> None:
        self._copied.pop(request.id, None)

    def on_finish(self, request: Request) -> None:
        del self._hashes[request.id]
        if (place := self._places.pop(request.id, None)) is not None:  # it uses no blocks
            self.dynamic = True
            self._admitted.add(place)
