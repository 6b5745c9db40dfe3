"""Memory of captured graphs: 1, 2 and all of them in one pool and in pools of their own, and the inputs and outputs of both slots."""

from typing import Any

import torch

from cbatch.runtime.graphs import GraphedIteration
from cbatch.runtime.slots import Slot


def graph_memory(graphs: GraphedIteration, slots: list[Slot]) -> dict[str, Any]:
    """Returns bytes by the number of graphs, and of buffers. Captures again what was captured, the largest first, and keeps nothing."""
    kept = graphs.graphs
    names = sorted(kept, key=lambda name: (-name[0].num_tokens, name[1]))  # a shape for both slots, then the next one
    stages = [(slot, slot.stages[0].ranks[0]) for slot in slots]
    found: dict[str, Any] = {
        "largest": names[0][0]._asdict(),
        "inputs": [rank.device.nbytes for _, rank in stages],
        "outputs": [slot.sampled[0].nbytes for slot, _ in stages],
        "pinned": [slot.host.nbytes + slot.tokens.nbytes for slot, _ in stages],
    }
    for pools in ("one pool", "pools of their own"):
        for number in (1, 2, len(names)):
            graphs.graphs = {}
            torch.cuda.empty_cache()
            before, pool = (graphs._used_bytes(), torch.cuda.memory_reserved()), torch.cuda.graph_pool_handle()
            for shape, index in names[:number]:
                own = pool if pools == "one pool" else torch.cuda.graph_pool_handle()
                graphs._capture(shape, graphs._slots[index], own)
            used = graphs._used_bytes() - before[0], torch.cuda.memory_reserved() - before[1]
            found.setdefault(pools, {})[str(number)] = dict(zip(("device", "pool"), used, strict=True))
    graphs.graphs = kept
    torch.cuda.empty_cache()
    return found
