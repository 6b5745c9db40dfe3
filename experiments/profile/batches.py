"""The batches to measure: on both sides of every step in the time of an iteration, and evenly between."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cbatch import Limits
from experiments.profile.laboratory import Batch

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
"""Tokens of a chunk whose attention is measured. Long ones are few: between them time is linear in the scores."""

BEFORE = (1024, 2048, 4096, 7168, 32768, 131072)
"""Contexts before a chunk. Only those at least as long as the chunk are measured: shorter ones hardly change its attention."""

CONTEXTS = (1, 160, 544, 1056, 2080, 4128, 8192, 32768, 131072)
"""Contexts of decodes. The kernel reads them in blocks of 64 tokens, the last one half full here, as on average;
for models with many KV heads in blocks of 32, of which the last one is full here."""

SHARING = 4096
"""Context of decodes that share the first half of it."""

USUAL = 8192
"""Most tokens of a request in batches between the measured ones, of which the KV cache holds a whole batch."""

WHOLE = 1024
"""Tokens of each prompt in an iteration with several."""

GROWTH = 1.4
"""Ratio between the tokens of one large iteration and the next."""

GOLDEN = 0.6180339887
"""The fractional parts of its multiples are evenly mixed."""


def decode_counts(captured: Sequence[int]) -> list[int]:
    """Returns numbers of decodes: each captured size, to which smaller ones are padded, and one more than it."""
    largest = captured[-1]
    return sorted({1, *captured, *(size + 1 for size in captured if size < largest)})


def attention_counts(captured: Sequence[int]) -> list[int]:
    """Returns the numbers of decodes whose attention is measured: `decode_counts`, and some between distant sizes."""
    between = {(low + high) // 2 for low, high in pairwise(captured) if high - low >= 16}
    return sorted({*decode_counts(captured), *between})


def mixed_totals(sizes: Sequence[int], tile: int, most: int) -> list[int]:
    """Returns the tokens of iterations with prompts, ascending.

    The chunks, which are measured anyway, and the captured sizes, each with one token more. Beyond the last of them nothing is
    padded and time rises by tiles: both sides of each tile over the next half of `WHOLE` tokens; then, as steps matter less, the
    middle of a tile at growing distances.

    Args:
        sizes: tokens of the captured shapes, ascending.
    """
    totals = {2, *(size for size in CHUNKS if size <= WHOLE)}
    edge = max(sizes, default=tile)
    for size in [*sizes, *range(edge, edge + WHOLE // 2 + 1, tile)]:
        totals |= {size, size + 1}
    apart: float = edge + WHOLE
    while apart < most:
        totals.add(round(apart / tile) * tile - tile // 2)
        apart *= GROWTH
    totals.add(most - tile // 2)
    return sorted(total for total in totals if 2 <= total <= most)


def prompts(num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Splits tokens into prompts of `WHOLE` tokens; the last one may be shorter, but has at least two."""
    whole, rest = divmod(num_tokens, WHOLE)
    if rest == 1 and whole:
        return ((WHOLE, 0),) * (whole - 1) + ((WHOLE - 1, 0), (2, 0))
    return ((WHOLE, 0),) * whole + (((rest, 0),) if rest else ())


def spread(number: int, mean: int, most: int) -> tuple[int, ...]:
    """Returns contexts of this mean, evenly from half to one and a half times as long, at most `most`, in mixed order.

    Contexts of requests at different points of their outputs vary like this. Equal contexts are a special case: where they
    fill every multiprocessor alike, as 33 requests of 8 KV heads do on 132, attention takes a fifth less time (H200).
    """
    half = min(mean // 2, most - mean)
    order = sorted(range(number), key=lambda index: index * GOLDEN % 1)
    return tuple(mean + round(half * (2 * place + 1 - number) / number) for place in order)


def fit_in(sizes: Iterable[int], most: int) -> list[int]:
    """Returns the sizes up to `most`, and `most` itself in place of larger ones."""
    sizes = sorted(sizes)
    kept = [size for size in sizes if size <= most]
    return kept if len(kept) == len(sizes) else sorted({*kept, most})


def contexts_before(tokens: int, most: int) -> list[int]:
    """Returns the contexts before a chunk that are measured. most: tokens of a request."""
    return [context for context in fit_in(BEFORE, most - tokens) if context >= tokens]


def held_out(captured: Sequence[int], limits: Limits) -> list[Batch]:
    """Returns batches between the measured ones, to compare interpolated times with measured ones."""
    max_batch, longest = limits.max_batch, min(limits.max_request_tokens, USUAL)
    between = [round(math.sqrt(low * high)) for low, high in pairwise(captured)]
    half, context = max(max_batch // 2 - 3, 1), longest // 6
    batches = [Batch((), (context,) * number) for number in between]
    batches += [Batch(((size, before),), (context,) * half) for size in (200, 450, 900) for before in (0, longest // 3)]
    batches += [Batch((), spread(number, context, longest)) for number in (half, max_batch)]
    batches.append(Batch(((700, 0), (900, 0), (300, 700)), spread(half, context, longest)))
    return batches
