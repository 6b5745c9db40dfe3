"""Chooses the shapes to capture graphs for, and from measured times the captured shapes to keep."""

from collections.abc import Mapping, Sequence

import torch

from cbatch.limits import Limits
from cbatch.runtime.batch import ANY, Shape
from cbatch.runtime.graphs import GraphedIteration, is_decode

SLOWER = 1.03  # a shape this many times slower than a larger shape is dropped; the larger shape then runs its steps


class MeasuredGraphs(GraphedIteration):
    """Times the graphs after capture, and drops slow shapes of mixed iterations."""

    def _choose(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        kept = {shape for shape in shapes if is_decode(shape)}
        for number in {shape.num_drafts for shape in shapes}:
            mixed = [shape for shape in shapes if shape.num_drafts == number and not is_decode(shape)]
            kept |= without_slow({shape: self._replay_seconds(shape) for shape in mixed}).keys()
        return [shape for shape in shapes if shape in kept]

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        """Returns the numbers of tokens of the captured shapes for mixed iterations, ascending."""
        return tuple(sorted({shape.num_tokens for shape in self.shapes if not is_decode(shape)}))

    def _replay_seconds(self, shape: Shape) -> float:
        """Returns the duration of the faster of two replays on padding, in seconds."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: list[float] = []
        with self._current_streams():
            self._put_dummies(shape)
            for _ in range(2):
                begin.record()
                for rank in self.graphs[shape, 0]:
                    rank.graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        return min(times)


def without_slow(seconds: Mapping[Shape, float]) -> dict[Shape, float]:
    """Returns the shapes that are not slower than a larger shape: matrix products of some sizes are slow.

    seconds: duration of an iteration by shape, shapes ascending.
    """
    kept: dict[Shape, float] = {}
    fastest = float("inf")
    for shape in reversed(list(seconds)):
        if seconds[shape] < SLOWER * fastest:
            kept[shape] = seconds[shape]
            fastest = min(fastest, seconds[shape])
    return dict(reversed(kept.items()))


def default_shapes(limits: Limits, block_size: int, which: str, fewer: Sequence[int] = ()) -> list[Shape]:
    """Returns the shapes to capture: decodes up to the full batch, and mixed iterations of a few tiles.

    which: "off", "decode" or "all". fewer: numbers of drafts that have decode-only graphs beside the most; mixed iterations have the first alone.
    Each of these graphs then comes with one for as many requests as can have all of its drafts.
    """
    width, most = Shape.largest(limits, block_size).num_blocks, limits.max_drafts
    if which == "off":
        return []
    shapes = [
        Shape(rows, rows, width, drafts, requests)
        for drafts in (*fewer, most)
        for rows in decode_sizes(limits.max_batch, min(limits.max_batch * (1 + drafts), limits.max_rows))
        if rows > drafts or drafts == most
        for requests in ({rows // (1 + drafts), min(rows, limits.max_batch)} if fewer and rows > drafts else {ANY})
    ]
    if which == "all":  # a mixed iteration has fewer rows than tokens
        sizes = [(size, min(limits.max_rows, size - 1)) for size in mixed_sizes(limits)]
        shapes += [Shape(*size, width, drafts) for drafts in (*fewer[:1], most) for size in sizes]
    return shapes


def decode_sizes(max_batch: int, max_rows: int) -> list[int]:
    """Returns the rows of iterations without prompts: 1, powers of two from 4 on, `max_batch` and, with drafts, `max_rows`.

    A few rows take as long as one row. Products of more than 256 rows do not, so there is a further size between such powers.
    """
    powers = [1, *(2**power for power in range(2, max_rows.bit_length()))]
    between = [size * 3 // 2 for size in powers if size >= 256 and max_rows > max_batch]
    return sorted({max_batch, max_rows, *(size for size in (*powers, *between) if size < max_rows)})


def mixed_sizes(limits: Limits) -> list[int]:
    """Returns the token counts of mixed iterations: `limits.graph_sizes`, or 1, 1.5, 2, 3, ... 16 tiles.

    Launching the operations of Llama-3.1-8B one by one takes 18 to 90 ms on the hosts of H100s; the device computes 1,025 to 2,048
    tokens in 25 to 45 ms. Each graph takes about 1 MiB of device memory, whatever its size. A full batch with a chunk has more
    tokens than requests, so sizes up to the batch are left out.
    """
    sizes = limits.graph_sizes or [int(max(limits.tile, 16) * number) for number in (1, 1.5, *range(2, 17))]
    return [size for size in sizes if limits.max_batch < size <= limits.max_tokens]
