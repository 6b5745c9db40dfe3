"""Linear minorants: straight lines below a cost model, which charge each request for its share of each iteration.

If no iteration is faster than a line, the work of a request is known before any scheduling. Lines are lower envelopes of a
profile's tables, not regressions: a line through the middle of a table does not bound the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cbatch.cost import BatchShape, scores
from cbatch.limits import Limits
from cbatch.sim.attention import Attention, RateAttention, TableAttention
from cbatch.sim.cost import ProfileCost

_ROUNDING = 1e-9  # relative; more than the rounding of sums in another order
_MOST_LINES = 5


@dataclass(frozen=True, slots=True)
class Minorant:
    """A lower bound of an iteration's seconds: the sum of all parts.

    fixed: once per iteration. per_request, per_token: per member of the iteration; per_request may be negative. per_score: per
    product of a query and a key in chunks, of which a chunk has tokens * (context + (tokens + 1) / 2). per_context: per token of
    `BatchShape.decode_context`; a chunk of one token counts as a decode. per_score is capped at per_context, so that single
    tokens cost no less than chunks.
    """

    fixed: float
    per_token: float = 0.0
    per_score: float = 0.0
    per_context: float = 0.0
    per_request: float = 0.0

    def __post_init__(self) -> None:
        if min(self.fixed, self.fixed + self.per_request, self.per_token, self.per_score, self.per_context) < 0:
            raise ValueError(f"a minorant has negative parts: {self}")
        object.__setattr__(self, "per_score", min(self.per_score, self.per_context))

    def seconds(self, shape: BatchShape) -> float:
        products = sum(scores(tokens, context) for tokens, context in shape.chunks)
        of_attention = self.per_score * products + self.per_context * shape.decode_context
        of_members = self.per_request * shape.num_requests + self.per_token * shape.num_tokens
        return self.fixed + of_members + of_attention


def minorants_of(cost: ProfileCost, limits: Limits) -> list[Minorant]:
    """Returns lines below a profile's tables, at the GPU's full clock, from the flattest to the steepest.

    Proof. An iteration takes f(tokens) + h(requests) + a(shape): products and small operations, the output head, attention.
    f + min h is evaluated at every number of tokens up to `limits.max_tokens`, with and without prompts, minus the most that a
    full clock could save; of decodes alone it may save a share of a, too. The lines are edges of the lower convex hull of these points. Attention is a sum over chunks plus a
    term for the decodes, each bounded at the breakpoints of its table. For a fixed context, table and bound are both linear in
    the number of requests (or in a chunk's scores) between two rows. Along a row, both are linear in the context between two
    columns. A bound below the table at all breakpoints is thus below it everywhere. In a pipeline, times are the last stage's.
    """
    attention, layers = cost.operations.attention, cost.topology.share(cost.spec).num_layers
    base = layers * attention.rates.base_seconds if isinstance(attention, RateAttention) else 0.0
    per_score, saved = layers * _per_score(attention, limits), _saved_of_decodes(cost, limits.max_batch)
    lines = _hull(_least_seconds(cost, limits.max_tokens, saved))
    minorants = list[Minorant]()
    for spared, per_context in _per_context(attention, limits):
        of_decodes = layers * per_context * (1 - max(saved))
        slopes = per_score, of_decodes, -of_decodes * spared
        minorants += [Minorant(fixed + base, slope, *slopes) for fixed, slope in lines if fixed + base >= -slopes[2]]
    return minorants


def _saved_of_decodes(cost: ProfileCost, max_batch: int) -> list[float]:
    """Returns the share of the seconds of 1, 2, ... `max_batch` decodes alone that a full clock could save."""
    numbers = range(1, max_batch + 1)
    return [cost.power.of_decodes(number)(1.0).gain if cost.power is not None else 0.0 for number in numbers]


def _least_seconds(cost: ProfileCost, max_tokens: int, saved: Sequence[float]) -> dict[int, float]:
    """Returns the least seconds of an iteration, excluding attention, by number of tokens. saved: `_saved_of_decodes`."""
    operations, layers = cost.operations, cost.topology.share(cost.spec).num_layers
    heads = [operations.head.at(number) for number in range(len(saved) + 1)]
    spare = heads[0] - min(heads[1:])
    least = {}
    for tokens in range(1, max_tokens + 1):
        seconds = cost.predict(BatchShape(num_padding=tokens)) - spare
        if cost.power is not None:
            seconds -= cost.power.of_prompts(tokens, seconds).gain
        if tokens <= len(saved):
            shape = BatchShape((), tokens, tokens)
            alone = cost.predict(shape) - layers * operations.attention.seconds(shape)
            seconds = min(seconds, alone * (1 - saved[tokens - 1]))
        least[tokens] = seconds
    return least


def _hull(points: dict[int, float]) -> list[tuple[float, float]]:
    """Returns lines below all points as (value at 0, slope), both nonnegative: edges of the points' lower convex hull."""
    hull: list[tuple[int, float]] = []
    for point in sorted(points.items()):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) * (1 + _ROUNDING) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    edges = [(left[1] - left[0] * slope, slope) for left, right in pairwise(hull) if (slope := _slope(left, right)) > 0]
    flat = (min(points.values()), 0.0)
    through_origin = (0.0, min(seconds / tokens for tokens, seconds in points.items()))
    lines = [flat, *(line for line in edges if line[0] > 0), through_origin]
    step = max((len(lines) - 1) / (_MOST_LINES - 1), 1)
    return [lines[round(place * step)] for place in range(min(len(lines), _MOST_LINES))]


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def _per_score(attention: Attention, limits: Limits) -> float:
    """Returns the least seconds per score in one layer, over all chunks."""
    if isinstance(attention, RateAttention):
        return attention.per_score
    if not isinstance(attention, TableAttention):
        return 0.0
    points = attention.chunks.breakpoints(float(limits.max_tokens), float(limits.max_request_tokens))
    return min(attention.chunks.at(tokens, context) / scores(tokens, context) for tokens, context in points)


def _per_context(attention: Attention, limits: Limits) -> list[tuple[float, float]]:
    """Returns pairs: free tokens of context per decode, and least seconds in one layer per further token of context.

    In a table the shortest contexts may cost nothing; excluding them gives a steeper line for longer contexts.
    """
    if isinstance(attention, RateAttention):
        return [(0.0, attention.per_decode_context)]
    if not isinstance(attention, TableAttention):
        return [(0.0, 0.0)]
    tables = [attention.decodes, *([attention.mixed_decodes] if attention.mixed_decodes else [])]
    points = [
        (number, context, table.at(number, context))
        for table in tables
        for number, context in table.breakpoints(float(limits.max_batch), float(limits.max_request_tokens))
    ]
    lines = []
    for spared in (0.0, *attention.decodes.columns[0][1:2]):
        slopes = [seconds / (number * (context - spared)) for number, context, seconds in points if context > spared]
        lines.append((spared, min(slopes, default=0.0)))
    return lines
