"""Time of an iteration against its tokens: the first chunk of one prompt, token by token around the edges of tiles.

Matrix products are cut into tiles, so time rises in steps, and some sizes are slower than the next larger ones.
"""

from dataclasses import replace
from functools import partial

import torch

from cbatch.runtime.batch import Bounds, Fields
from cbatch.runtime.fast.fused_model import FusedModel
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.store.benchmark_file import spread
from reproduction import RESULTS
from reproduction.bench.single_iteration import build, capture, device_batch, replay_times
from reproduction.stored import write

AROUND = 4
"""Sizes on either side of an edge that are all measured."""


def main(
    model: str = "llama-3.1-8b", largest: Count = 1024, edge: Count = 64, repeats: Count = 5, folder: str = RESULTS
) -> None:
    """Measures, prints and writes tiles.json. Edges are the multiples of `edge`; half-way points are measured too."""
    spec = load_spec(model)
    fused = build(spec, 1, largest + AROUND)
    sizes = {most + offset for most in range(edge, largest + 1, edge) for offset in range(-AROUND, AROUND + 1)}
    sizes |= {1, 2, 4, 8, 16, 32, *range(edge // 2, largest, edge)}
    times = {}
    print(f"{spec.name}: milliseconds of an iteration by its tokens")
    for size in sorted(size for size in sizes if size <= largest + AROUND):
        inputs = device_batch([(size, size)], vocabulary=spec.vocab_size)
        graph = capture(partial(iterate, fused, inputs, Bounds(size, size, 1)))
        times[size] = spread(replay_times(graph, repeats, 1))
        if size % edge in (0, 1):
            print(f"  {size:5d}  {times[size]['median']:7.3f} ms", flush=True)
    figures = {"unit": "ms per iteration", "model": spec.name, "edge": edge, "times": times}
    print(f"written: {write('tiles', torch.cuda.get_device_name(), figures, folder)}")


def iterate(fused: FusedModel, inputs: Fields[torch.Tensor], bounds: Bounds) -> torch.Tensor:
    """Computes one iteration on new views: what the model derives from a batch is cached with them."""
    return fused(inputs.token_ids, replace(inputs), bounds)
