"""The padded shapes of iterations for which graphs are captured, and which of them takes a step. Needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from cbatch.kv import blocks_for
from cbatch.limits import Limits
from cbatch.runtime.batch import Shape

SLOWER = 1.03
"""A shape this much slower than a larger one is left out: the larger one takes its steps."""

CHUNK_TOKENS, LEAST_CHUNKS = 32, 4
"""A captured shape takes a chunk for so many of its tokens, and at least so many."""

WORTH = 0.85
"""A step runs operation by operation where it then takes this share of the time of its padded shape, or less."""

HIDDEN = 0.75
"""Share of a step's time that launching its operations may take: beyond, the device may come to wait for the host."""


def max_chunks(shape: Shape) -> int:
    """Requests with several tokens that a captured shape takes."""
    return min(max(shape.num_tokens // CHUNK_TOKENS, LEAST_CHUNKS), shape.num_rows)


def fitting(shapes: Mapping[Shape, int], num_tokens: int, num_chunks: int) -> Shape | None:
    """The smallest shape that holds a step and is worth its padding; None where the step is better computed as it is.

    Args:
        shapes: ascending, each with the fewest tokens of the steps that it takes.
        num_tokens: of the step, the padding that its plan asks for counted.
        num_chunks: requests with several tokens in it.
    """
    for shape, least in shapes.items():
        if num_tokens < least:  # a larger shape would be padded yet more
            return None
        if num_tokens <= shape.num_tokens and num_chunks <= max_chunks(shape):
            return shape
    return None


def without_slow(seconds: Mapping[Shape, float]) -> dict[Shape, float]:
    """Leave out shapes that take longer than a larger one: matrix products of some sizes are slow (see `bench tiles`).

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

    Without padding, a step between two shapes would take a time between theirs, or what launching it takes if that is longer.

    Args:
        seconds: of an iteration of each shape, ascending.
        launch_seconds: of one that runs operation by operation, on the host.
    """
    least = dict.fromkeys(seconds, 0)
    for below, shape in pairwise(seconds):
        low, high = seconds[below], seconds[shape]
        if low < WORTH * high and launch_seconds <= HIDDEN * WORTH * high:
            share = (WORTH * high - low) / (high - low)
            least[shape] = below.num_tokens + int(share * (shape.num_tokens - below.num_tokens)) + 1
    return least


def default_shapes(limits: Limits, page_size: int, which: str) -> list[Shape]:
    """The shapes to capture: decodes up to the whole batch, and mixed iterations up to a few tiles.

    Args:
        which: "off", "decode" or "all".
    """
    width = blocks_for(limits.max_request_tokens, page_size)
    if which == "off":
        return []
    shapes = [Shape(rows, rows, width) for rows in decode_sizes(limits.max_batch)]
    if which == "all":
        shapes += [Shape(size, limits.max_batch, width) for size in mixed_sizes(limits)]
    return shapes


def decode_sizes(max_batch: int) -> list[int]:
    """Batches of decodes: 1, powers of two from 4 on, and the largest; products of few rows take as long for any number."""
    sizes = [1, *(2**power for power in range(2, max_batch.bit_length()))]
    return [*(size for size in sizes if size < max_batch), max_batch]


def mixed_sizes(limits: Limits) -> list[int]:
    """Tokens of mixed iterations: `limits.graph_sizes`, or half tiles from one to two, whole ones up to four, then fewer.

    Each graph takes about 1 MiB of the device's memory, whatever its size. A full batch with a chunk beside its decodes has
    more tokens than requests, so smaller sizes are left out.
    """
    sizes = limits.graph_sizes or [int(max(limits.tile, 16) * number) for number in (1, 1.5, 2, 3, 4, 6, 8, 16)]
    return [size for size in sizes if limits.max_batch < size <= limits.max_tokens]
