"""Measures a model's iterations and divides them, by differences, into the parts that the cost model adds up.

    mixed iteration      = base (tokens) + attention of each chunk (tokens, context) + attention of the decodes (number, context)
    decode-only          = base (decodes) + attention of the decodes (number, context)

A base is an iteration with nearly no attention. The attention of a chunk to preceding context is the time that the context adds.
The attention of a chunk to itself is the time that a context of half its length would add. The attention of decodes is the time
that their contexts add compared to contexts of one token. At every measured point the sum thus equals the measured iteration,
even if kernels overlap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear
from cbatch.sim.power import PowerLimit
from experiments.profile import batches
from experiments.profile.laboratory import Batch, Laboratory
from experiments.profile.power import power_limit

Report = Callable[[str], None]

LEAST_BASE = 0.01
"""Least share of the base in an iteration; needed since attention is overestimated below the smallest measured chunk."""

Point = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Iterations:
    """Seconds of one model's iterations, over all layers.

    mixed: base of an iteration with prompts, against tokens. chunks: attention of one chunk, against (tokens, preceding context).
    mixed_decodes: attention of decodes that share an iteration with a chunk, against (number, context).
    alone, decodes: base and attention of iterations without prompts.
    power: how the clock follows the GPU's load. shared_reads: see the function. Both are None if not measured.
    """

    mixed: PiecewiseLinear
    chunks: ChunkGrid
    mixed_decodes: BilinearGrid
    alone: PiecewiseLinear
    decodes: BilinearGrid
    power: PowerLimit | None
    shared_reads: PiecewiseLinear | None = None


def measure(
    laboratory: Laboratory,
    decode_sizes: Sequence[int],
    mixed_sizes: Sequence[int],
    report: Report,
    *,
    power_limited: bool = True,
) -> Iterations:
    """Measures all parts. report: called with a line when a part begins. decode_sizes, mixed_sizes: see `Machine`.

    power_limited: whether the device's clock follows its power; a CPU's clock varies for other reasons.
    """
    limits = laboratory.limits
    report("decodes alone")
    lone = {number: Batch((), (1,) * number) for number in batches.decode_counts(decode_sizes)}
    laboratory.time_in_rounds(lone.values())
    alone = PiecewiseLinear.through((number, laboratory.seconds(batch)) for number, batch in lone.items())
    decodes = _contexts(laboratory, batches.attention_counts(decode_sizes), partial(Batch, ()), alone.at)
    shared = shared_reads(laboratory, decode_sizes, decodes) if power_limited else None
    report("iterations with prompts")
    totals = batches.mixed_totals(mixed_sizes, limits.tile, limits.max_tokens)
    time_bases(laboratory, totals)
    report("chunks of prompts")
    sizes = batches.fit_in(batches.CHUNKS, min(limits.max_tokens, limits.max_request_tokens))
    small = _chunks(laboratory, [size for size in sizes if size <= batches.WHOLE])
    mixed = mixed_bases(laboratory, totals, ChunkGrid.through(small))
    large = _chunks(laboratory, [size for size in sizes if size > batches.WHOLE], mixed)
    power = None
    if power_limited:
        report("power")
        power = power_limit(laboratory, mixed, decode_sizes, max(mixed_sizes))
    chunks = ChunkGrid.through((*small, *large))
    report("decodes beside a chunk")
    mixed_decodes = _mixed_decodes(laboratory, decode_sizes, mixed_sizes, mixed, chunks)
    return Iterations(mixed, chunks, mixed_decodes, alone, decodes, power, shared)


def shared_reads(laboratory: Laboratory, decode_sizes: Sequence[int], decodes: BilinearGrid) -> PiecewiseLinear | None:
    """Returns `TableAttention.shared_reads`: the share of a token's read time saved if another decode also reads the token, against decodes.

    All decodes share the first half of their contexts.
    """
    points, context = [(1, 0.0)], batches.SHARING
    for number in decode_sizes:
        distinct = Batch((), (context,) * number)
        if number > 1 and laboratory.holds(distinct):
            shared = distinct._replace(shared=context // 2)
            saved = laboratory.seconds(distinct) - laboratory.seconds(shared)
            again = shared.shape().num_shared / (number * context)  # share of reads that are repeated
            points.append((number, min(max(saved / (again * decodes.at(number, context)), 0.0), 1.0)))
    return PiecewiseLinear.through(points) if len(points) > 1 else None


def drafted_bases(laboratory: Laboratory, sizes: Sequence[int]) -> dict[int, Batch]:
    """Returns the iterations of decodes with nearly no context and as many drafts as there may be, by rows."""
    drafts = {size: min(laboratory.limits.max_drafts, size - 1) for size in sizes}
    return {size: Batch((), (1,) * (size // (1 + number)), drafts=number) for size, number in drafts.items()}


def drafted_attention(
    laboratory: Laboratory, base: PiecewiseLinear, sizes: Sequence[int], together: int
) -> tuple[BilinearGrid, BilinearGrid]:
    """Returns the attention of decodes without drafts and with them, in graphs that hold drafts, by (number of reads, mean context), as `_contexts`.

    base: of `drafted_bases`. together: rows of each read with drafts; the largest batch also has two reads of each request, if there may be as many drafts.
    """
    limits = laboratory.limits
    reads = [(size, 1) for size in sizes if size <= limits.max_batch]
    return _reads(laboratory, base, reads, 1), _reads(laboratory, base, [*reads, (limits.max_batch, 2)], together)


def _reads(
    laboratory: Laboratory, base: PiecewiseLinear, numbers: Sequence[tuple[int, int]], together: int
) -> BilinearGrid:
    """Measures numbers of requests with reads of each; see `drafted_attention`."""
    points, limits = list[Point](), laboratory.limits
    longest = limits.max_request_tokens - limits.max_drafts
    for number, reads in numbers:
        for context in batches.fit_in(batches.CONTEXTS, longest):
            batch = Batch((), batches.spread(number, context, longest), drafts=reads * together - 1)
            if batch.drafts <= limits.max_drafts and laboratory.holds(batch):
                rows = next(size for size in base.sizes if size >= sum(batch.num_tokens))  # padded
                mean = context + batch.drafts / 2  # each row also reads the rows before it
                points.append((number * reads, mean, max(laboratory.seconds(batch) - base.at(rows), 0.0)))
    return BilinearGrid.through(points)


def _mixed_decodes(
    laboratory: Laboratory,
    decode_sizes: Sequence[int],
    mixed_sizes: Sequence[int],
    mixed: PiecewiseLinear,
    chunks: ChunkGrid,
) -> BilinearGrid:
    """Measures decodes beside a small chunk, in the smallest captured size that fits, since small products draw little power."""
    limits = laboratory.limits
    sizes = mixed_sizes or [2 * limits.max_batch]

    def total(number: int) -> int:
        return next((size for size in sizes if size >= number + 2), sizes[-1])

    def base(number: int) -> float:
        return mixed.at(total(number)) + chunks.at(total(number) - number, 0)

    def beside_chunk(contexts: tuple[int, ...]) -> Batch:
        return Batch(((total(len(contexts)) - len(contexts), 0),), contexts)

    most = min(limits.max_batch - 1, limits.max_tokens - 2)
    counts = sorted({*(number for number in decode_sizes if number < most), max(3 * most // 4, 1), most})
    return _contexts(laboratory, counts, beside_chunk, base)


def time_bases(laboratory: Laboratory, totals: Iterable[int]) -> None:
    """Times the iterations of `mixed_bases` in rounds."""
    laboratory.time_in_rounds(Batch(batches.prompts(total)) for total in totals)


def mixed_bases(laboratory: Laboratory, totals: Iterable[int], chunks: ChunkGrid) -> PiecewiseLinear:
    """Returns the base of iterations with these numbers of prompt tokens, in whole prompts: their times without attention."""
    points = []
    for total in totals:
        batch = Batch(batches.prompts(total))
        if laboratory.holds(batch):
            attention = sum(chunks.at(tokens, 0) for tokens, _ in batch.chunks)
            seconds = laboratory.seconds(batch)
            points.append((total, max(seconds - attention, LEAST_BASE * seconds)))
    return PiecewiseLinear.through(points)


def _chunks(laboratory: Laboratory, sizes: Iterable[int], base: PiecewiseLinear | None = None) -> list[Point]:
    """Returns the attention of a chunk by (tokens, preceding context).

    A chunk's attention to itself takes as long as attention to a context of half its length. With a base, it takes the time beyond the base.
    """
    limits = laboratory.limits
    points: list[Point] = []
    for tokens in sizes:
        contexts = batches.contexts_before(tokens, limits.max_request_tokens)
        chunks = {context: Batch(((tokens, context),)) for context in (0, *contexts)}
        seconds = {context: laboratory.seconds(batch) for context, batch in chunks.items() if laboratory.holds(batch)}
        timed = [(context, value) for context, value in seconds.items() if context or len(seconds) < 3]
        (first, low), (last, high) = timed[0], timed[-1]
        slope = max(high - low, 0.0) / (last - first) if last > first else 0.0
        itself = slope * (tokens + 1) / 2 if base is None else max(seconds[0] - base.at(tokens), 0.0)
        points += [(tokens, context, max(value - seconds[0], 0.0) + itself) for context, value in seconds.items()]
    return points


def _contexts(
    laboratory: Laboratory,
    counts: Sequence[int],
    batch_of: Callable[[tuple[int, ...]], Batch],
    base: Callable[[int], float],
) -> BilinearGrid:
    """Returns the attention of decodes by (number, mean context): the time of an iteration beyond its base."""
    points: list[Point] = []
    longest = laboratory.limits.max_request_tokens
    for number in counts:
        for context in batches.fit_in(batches.CONTEXTS, longest):
            batch = batch_of(batches.spread(number, context, longest))
            if laboratory.holds(batch):
                points.append((number, context, max(laboratory.seconds(batch) - base(number), 0.0)))
    return BilinearGrid.through(points)
