"""Which shapes to capture graphs for, and, from measured times, which steps are worth their padding."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from cbatch.executor import Step
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape
from cbatch.runtime.graphs import CaptureReport, GraphedIteration, is_decode, max_chunks

SLOWER = 1.03
"""A shape this many times slower than a larger one is left out: the larger one takes its steps."""

WORTH = 0.85
"""A step runs operation by operation if it then takes at most this share of the time of its padded shape."""

HIDDEN = 0.75
"""Share of a step's time that launching its operations may take: beyond it, the device may wait for the host."""

LAUNCH_SECONDS = 0.55e-3
"""Host time of launching a layer's operations one by one on one rank; measured are 18 ms for the 32 layers of Llama-3.1-8B on the
host of an H200, 23 ms on that of an H100. Not timed as a server starts: on a busy host, or by chance, it would then pad prompts of
1,025 to 1,731 tokens to 2,048, which takes up to 1.8 times as long, and which steps are padded could not be predicted."""


class MeasuredGraphs(GraphedIteration):
    """Graphs that are timed once captured: slow shapes are left out; a step that padding slows down runs eagerly."""

    def _capture_all(self, shapes: Sequence[Shape]) -> CaptureReport:
        report = super()._capture_all(shapes)
        self._mixed: dict[Shape, int] = {}  # ascending, with the fewest tokens of the steps that each takes
        if mixed := sorted(shape for shape in shapes if not is_decode(shape)):
            seconds = without_slow({shape: self._replay_seconds(shape) for shape in mixed})
            launched = sum(model.layers.size for model in self._eager.models)
            self._mixed = least_tokens(seconds, launched * LAUNCH_SECONDS)
        return report

    def shape(self, step: Step) -> Shape:
        """The captured shape that is worth the step's padding, else the step's own."""
        if step.pad_to == len(step.rows):
            return super().shape(step)
        num_chunks = int((step.num_tokens > 1).sum())
        return find_shape(self._mixed, step.pad_to, num_chunks) or self._eager.shape(step)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Fewest and most tokens of the steps with prompts that each captured shape takes, ascending."""
        sizes = [0, *(shape.num_tokens for shape in self._mixed)]
        fewest = [max(least, below + 1) for least, below in zip(self._mixed.values(), sizes, strict=False)]
        return tuple(zip(fewest, sizes[1:], strict=True))

    def _replay_seconds(self, shape: Shape) -> float:
        """The shorter of two replays on padding."""
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


def find_shape(shapes: Mapping[Shape, int], num_tokens: int, num_chunks: int) -> Shape | None:
    """The smallest shape that holds a step, or None if none does or the step is below that shape's minimum.

    Args:
        shapes: ascending, each with the fewest tokens of the steps that it takes.
        num_tokens: of the step, with the padding that its plan asks for.
        num_chunks: requests with several tokens in it.
    """
    for shape, min_tokens in shapes.items():
        if num_tokens < min_tokens:  # a larger shape would be padded even more
            return None
        if num_tokens <= shape.num_tokens and num_chunks <= max_chunks(shape):
            return shape
    return None


def without_slow(seconds: Mapping[Shape, float]) -> dict[Shape, float]:
    """Leave out shapes that take longer than a larger one: matrix products of some sizes are slow.

    seconds: of an iteration of each shape, ascending.
    """
    kept: dict[Shape, float] = {}
    fastest = float("inf")
    for shape in reversed(list(seconds)):
        if seconds[shape] < SLOWER * fastest:
            kept[shape] = seconds[shape]
            fastest = min(fastest, seconds[shape])
    return dict(reversed(kept.items()))


def least_tokens(seconds: Mapping[Shape, float], launch_seconds: float) -> dict[Shape, int]:
    """Fewest tokens of a step for which each shape is worth its padding.

    Without padding, a step between two shapes takes a time between theirs, or that of launching it if longer.

    Args:
        seconds: of an iteration of each shape, ascending.
        launch_seconds: host time of one that runs operation by operation.
    """
    least = dict.fromkeys(seconds, 0)
    for below, shape in pairwise(seconds):
        low, high = seconds[below], seconds[shape]
        if low < WORTH * high and launch_seconds <= HIDDEN * WORTH * high:
            share = (WORTH * high - low) / (high - low)
            least[shape] = below.num_tokens + int(share * (shape.num_tokens - below.num_tokens)) + 1
    return least


def default_shapes(limits: Limits, block_size: int, which: str) -> list[Shape]:
    """The shapes to capture: decodes up to the whole batch, and mixed iterations up to a few tiles.

    Args:
        which: "off", "decode" or "all".
    """
    width = Shape.largest(limits, block_size).num_blocks
    if which == "off":
        return []
    shapes = [Shape(rows, rows, width) for rows in decode_sizes(limits.max_batch)]
    if which == "all":
        shapes += [Shape(size, limits.max_batch, width) for size in mixed_sizes(limits)]
    return shapes


def decode_sizes(max_batch: int) -> list[int]:
    """Batches of decodes: 1, powers of two from 4 on, and the largest; a few rows take as long as one."""
    sizes = [1, *(2**power for power in range(2, max_batch.bit_length()))]
    return [*(size for size in sizes if size < max_batch), max_batch]


def mixed_sizes(limits: Limits) -> list[int]:
    """Tokens of mixed iterations: `limits.graph_sizes`, or multiples of the tile, in half tiles up to two.

    Each graph takes about 1 MiB of device memory, whatever its size. A full batch with a chunk beside its decodes has
    more tokens than requests, so sizes up to the batch are left out.
    """
    sizes = limits.graph_sizes or [int(max(limits.tile, 16) * number) for number in (1, 1.5, 2, 3, 4, 6, 8, 16)]
    return [size for size in sizes if limits.max_batch < size <= limits.max_tokens]
