"""The batches to measure: on both sides of every step in an iteration's time, and evenly spaced in between."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from cbatch import Limits
from experiments.profile.laboratory import Batch

CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 16384, 65536)
"""Tokens of a chunk whose attention is measured. Few long chunks suffice: between them time is linear in the scores."""

BEFORE = (1024, 2048, 4096, 7168, 32768, 131072)
"""Contexts before a chunk. Contexts shorter than the chunk are skipped, since they hardly change the chunk's attention."""

CONTEXTS = (1, 160, 544, 1056, 2080, 4128, 8192, 32768, 131072)
"""Contexts of decodes. The kernel reads blocks of 64 tokens; here the last block is half full, as on average. For models with many
KV heads the kernel reads blocks of 32, of which the last is full here."""

SHARING = 4096  # context of decodes that share the first half of their contexts

USUAL = 8192
"""Most tokens of a request in batches between the measured batches; the KV cache holds a whole batch of such requests."""

WHOLE = 1024  # tokens of each prompt in an iteration with several prompts
GROWTH = 1.4  # ratio between the tokens of consecutive large iterations
GOLDEN = 0.6180339887  # the golden ratio; the fractional parts of its multiples are evenly mixed


def decode_counts(captured: Sequence[int]) -> list[int]:
    """Returns the numbers of decodes to measure: each captured size, to which smaller batches are padded, and one decode more."""
    largest = captured[-1]
    return sorted({1, *captured, *(size + 1 for size in captured if size < largest)})


def attention_counts(captured: Sequence[int]) -> list[int]:
    """Returns the numbers of decodes whose attention is measured: `decode_counts`, and midpoints of distant sizes."""
    between = {(low + high) // 2 for low, high in pairwise(captured) if high - low >= 16}
    return sorted({*decode_counts(captured), *between})


def mixed_totals(sizes: Sequence[int], tile: int, most: int) -> list[int]:
    """Returns the tokens of iterations with prompts, ascending.

    They include the chunks, which are measured anyway, and each captured size, also with one token more. Beyond the last captured
    size nothing is padded, and time rises by tiles: both sides of each tile are included over half of `WHOLE` tokens. Then, since
    steps matter less, the middles of tiles at growing distances follow.

    sizes: tokens of the captured shapes, ascending.
    """
    totals = {2, *(size for size in CHUNKS if size <= WHOLE)}
    edge = max(sizes, default=tile)
    for size in [*sizes, *range(edge, edge + WHOLE // 2 + 1, tile)]:
        totals |= {size, size + 1}
    distant: float = edge + WHOLE
    while distant < most:
        totals.add(round(distant / tile) * tile - tile // 2)
        distant *= GROWTH
    totals.add(most - tile // 2)
    return sorted(total for total in totals if 2 <= total <= most)


def prompts(num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Splits tokens into prompts of `WHOLE` tokens; the last prompt may be shorter, but has at least two tokens."""
    whole, rest = divmod(num_tokens, WHOLE)
    if rest == 1 and whole:
        return ((WHOLE, 0),) * (whole - 1) + ((WHOLE - 1, 0), (2, 0))
    return ((WHOLE, 0),) * whole + (((rest, 0),) if rest else ())


def spread(number: int, mean: int, most: int) -> tuple[int, ...]:
    """Returns contexts with this mean, spread evenly from half to one and a half times as long, at most `most`, in mixed order.

    Contexts of requests at different points of their outputs vary like this. Equal contexts are a special case: if they load all
    multiprocessors equally, as 33 requests with 8 KV heads load 132, attention takes a fifth less time (H200).
    """
    half = min(mean // 2, most - mean)
    order = sorted(range(number), key=lambda index: index * GOLDEN % 1)
    return tuple(mean + round(half * (2 * place + 1 - number) / number) for place in order)


def fit_in(sizes: Iterable[int], most: int) -> list[int]:
    """Returns the sizes up to `most`, and `most` itself in place of larger sizes."""
    sizes = sorted(sizes)
    kept = [size for size in sizes if size <= most]
    return kept if len(kept) == len(sizes) else sorted({*kept, most})


def contexts_before(tokens: int, most: int) -> list[int]:
    """Returns the measured contexts before a chunk. most: most tokens of a request."""
    return [context for context in fit_in(BEFORE, most - tokens) if context >= tokens]


def held_out(captured: Sequence[int], limits: Limits) -> list[Batch]:
    """Returns batches between the measured batches, on which interpolated times are compared with measured times."""
    max_batch, longest = limits.max_batch, min(limits.max_request_tokens, USUAL)
    between = [round(math.sqrt(low * high)) for low, high in pairwise(captured)]
    half, context = max(max_batch // 2 - 3, 1), longest // 6
    batches = [Batch((), (context,) * number) for number in between]
    batches += [Batch(((size, before),), (context,) * half) for size in (200, 450, 900) for before in (0, longest // 3)]
    batches += [Batch((), spread(number, context, longest)) for number in (half, max_batch)]
    batches.append(Batch(((700, 0), (900, 0), (300, 700)), spread(half, context, longest)))
    return batches
