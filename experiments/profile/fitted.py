"""A laboratory for devices whose iterations vary too much for differences of measured times, such as a CPU's.

Few batches are measured. What an iteration takes is a constant and a price each per token, per request, per token of
context that decodes read, and per pair of tokens in the attention of prompts: no price is below 0.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cbatch import Limits, Server
from experiments.profile.laboratory import Batch, Laboratory


class FittedLaboratory(Laboratory):
    """Returns the seconds of a fit, the same for the same batch; `time` measures as in a `Laboratory`."""

    def __init__(self, server: Server[Any], vocabulary_size: int) -> None:
        super().__init__(server, vocabulary_size)
        measured = {batch: self.time(batch) for batch in _sample(self.limits) if self.holds(batch)}
        self._prices = fit(measured)

    def seconds(self, batch: Batch) -> float:
        return float(features(batch) @ self._prices)


def features(batch: Batch) -> NDArray[np.float64]:
    """Returns 1, tokens, requests, context that decodes read, and pairs of tokens in the attention of prompts."""
    pairs = sum(count_pairs(*chunk) for chunk in batch.chunks)
    return np.array([1.0, sum(batch.num_tokens), len(batch.ends), sum(batch.decodes), pairs])


def fit(measured: Mapping[Batch, float]) -> NDArray[np.float64]:
    """Returns the prices of `features` with the least squares of relative errors, none negative."""
    return fit_prices(np.array([features(batch) / seconds for batch, seconds in measured.items()]))


def count_pairs(tokens: int, context: int) -> float:
    """Returns how many pairs of tokens the attention of a chunk has, with this context before it."""
    return tokens * (context + (tokens + 1) / 2)


def fit_prices(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the prices, none negative, at which every row of features costs 1, by least squares."""
    scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens and pairs of tokens differ by orders of magnitude
    prices: NDArray[np.float64] = nnls(rows / scale, np.ones(len(rows)))[0] / scale
    return prices


def _sample(limits: Limits) -> Iterator[Batch]:
    """Yields decodes alone, chunks alone, and both together, from the smallest to the largest."""
    most, longest = limits.max_batch, limits.max_request_tokens
    numbers = sorted({1, max(most // 4, 1), most})
    chunks = [size for size in (16, 64, 256, 512) if size <= limits.max_tokens - most]
    for context in (1, longest // 4, longest - 1):
        yield from (Batch((), (context,) * number) for number in numbers)
    for tokens in chunks:
        yield from (Batch(((tokens, context),)) for context in (0, longest // 2))
        yield Batch(((tokens, 0),), (longest // 4,) * (most - 1))
