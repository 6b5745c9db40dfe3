"""Device memory that captured graphs take as they are added: in one pool or a pool each, in either order.

A graph keeps the memory of its intermediate results. Graphs that never run at the same time may share it: if the
largest is captured first, the others fit into its memory; in the other order, each is larger than all before it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from cbatch import KVSize, Limits
from cbatch.runtime.batch import Shape
from cbatch.runtime.fast.graph_shapes import default_shapes
from cbatch.runtime.graphs import CaptureReport, GraphedIteration
from cbatch.runtime.options import Options
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.settings.servers import release_memory
from reproduction import RESULTS
from reproduction.stored import write


class Way(NamedTuple):
    shared: bool
    largest_first: bool = True


WAYS = {
    "one pool, largest first": Way(shared=True),
    "one pool, smallest first": Way(shared=True, largest_first=False),
    "a pool for each graph": Way(shared=False),
}


class Recaptured(GraphedIteration):
    """An executor's iterations, captured again as `way` says.

    tokens: of each graph, in the order of capture, [graphs].
    used: bytes taken by the graphs so far, after each capture, [graphs].
    """

    def __init__(self, of: GraphedIteration, shapes: Sequence[Shape], way: Way) -> None:
        self._way = way
        self.tokens: list[int] = []
        self.used: list[int] = []
        super().__init__(of._eager, of._slots, of._streams, of.caches, shapes)

    def _capture_all(self, shapes: Sequence[Shape]) -> CaptureReport:
        for shape in shapes:
            self._guard(shape, self._warm_up)
        pool = torch.cuda.graph_pool_handle() if self._way.shared else None
        before = self._used_bytes()
        for shape in shapes if self._way.largest_first else reversed(shapes):
            for slot in self._slots:
                self._guard(shape, partial(self._capture, slot=slot, pool=pool))
                self.tokens.append(shape.num_tokens)
                self.used.append(self._used_bytes() - before)
        return CaptureReport(0.0, len(self.graphs), self.used[0], self.used[-1])


def main(
    model: str = "llama-3.1-8b",
    batch: Count = 32,
    max_tokens: Count = 2048,
    length: Count = 2048,
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes graph_memory.json."""
    from cbatch.runtime.gpu import build as gpu  # its kernels are written in Triton, which machines without a GPU lack

    spec, limits = load_spec(model), Limits(batch, max_tokens, length)
    executor = gpu.build(spec, limits, KVSize(limits.max_batch, gpu.BLOCK_SIZE), Options(graphs="off"))
    shapes = default_shapes(limits, gpu.BLOCK_SIZE, "all")
    # memory that the driver takes once belongs to no graph
    Recaptured(executor.iteration, shapes[:1], Way(shared=False))
    release_memory()
    print(f"{spec.name}, up to {limits.max_batch} requests and {limits.max_tokens} tokens: device memory of the graphs")
    figures: dict[str, Any] = {}
    for name, way in WAYS.items():
        found = Recaptured(executor.iteration, shapes, way)
        figures[name] = {"tokens": found.tokens, "bytes": found.used}
        first, total = found.used[0] / 1e6, found.used[-1] / 1e6
        print(f"  {name:26} {total:8.0f} MB for {len(found.used)} graphs, the first {first:.0f} MB", flush=True)
        del found
        release_memory()
    executor.close()
    stamped = {"model": spec.name, "batch": limits.max_batch, "max_tokens": limits.max_tokens, "figures": figures}
    print(f"written: {write('graph_memory', torch.cuda.get_device_name(), stamped, folder)}")
