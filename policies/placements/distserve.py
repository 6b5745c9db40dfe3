"""DistServe's online placement (Zhong et al., OSDI 2024; its code at 82831f16): least loaded replicas, and a decoder that pulls when it has room.

A decoder takes the oldest prompt if the prompts that wait there to be admitted hold less than 5% of its blocks and the prompt's blocks are free
(`waiting_block_prop_threshold`). Nothing counts the growth of running requests; they preempt each other instead. Ties: the first replica.
"""

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, LeastLoaded
from cbatch.moves import Room


class DistServe:
    moves = True

    def __init__(self, threshold: float = 0.05) -> None:
        if not threshold > 0:
            raise ConfigError(f"router: {threshold=} must be above 0")
        self.threshold, self._least = threshold, LeastLoaded()

    def choose(self, request: Request, view: ClusterView) -> int:
        return self._least.choose(request, view)

    def accepts(self, room: Room) -> bool:
        return room.promised < self.threshold * room.num_blocks and room.lacking <= room.free
