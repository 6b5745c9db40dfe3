"""Prices of iterations, for devices whose iterations vary too much for differences of measured times, such as a CPU's.

An iteration takes a constant and a price each per token, per request, per token of context that decodes read, and per pair of
tokens in the attention of prompts: no price is below 0.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cbatch import Limits, Server
from cbatch.sim.interpolation import scores
from experiments.profile.laboratory import Batch, Laboratory


class FittedLaboratory(Laboratory):
    """Returns the seconds of a fit to few batches; `time` measures as in a `Laboratory`."""

    def __init__(self, server: Server, vocabulary_size: int) -> None:
        super().__init__(server, vocabulary_size)
        batches = [batch for batch in dict.fromkeys(_sample(self.limits)) if self.holds(batch)]
        self._prices = fit_prices(np.array([features(batch) / self.time(batch) for batch in batches]))

    def seconds(self, batch: Batch) -> float:
        return float(features(batch) @ self._prices)


def features(batch: Batch) -> NDArray[np.float64]:
    """Returns 1, tokens, requests, context that decodes read, and pairs of tokens in the attention of prompts."""
    shape = batch.shape()
    pairs = sum(scores(*chunk) for chunk in shape.chunks)
    return np.array([1.0, shape.num_tokens, shape.num_requests, shape.decode_context, pairs])


def fit_prices(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the prices, none negative, at which every row of features costs 1, by least squares.

    rows: [iterations, features], divided by the iteration's seconds: errors are relative.
    """
    scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens and pairs of tokens differ by orders of magnitude
    prices: NDArray[np.float64] = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return prices


def _sample(limits: Limits) -> Iterator[Batch]:
    """Yields decodes alone, chunks alone, and both together, from the smallest to the largest."""
    most, longest = limits.max_batch, limits.max_request_tokens
    for context in (1, longest // 4, longest - 1):
        yield from (Batch((), (context,) * number) for number in sorted({1, max(most // 4, 1), most}))
    for tokens in (16, 64, 256, 512):
        if tokens <= limits.max_tokens - most:
            yield from (Batch(((tokens, context),)) for context in (0, longest // 2))
            yield Batch(((tokens, 0),), (longest // 4,) * (most - 1))
