"""Predicts the KV cache that running requests will hold, from their current tokens and their remaining output."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from cbatch import SERVED, Request

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def most_held(held: Sequence[int], left: Sequence[float] | Floats) -> float:
    """Returns the most tokens that requests hold at any time when one of them ends.

    held: current tokens of each request. left: rounds until each request ends; a request grows by one token per round.
    """
    ends, tokens = np.asarray(left), np.array(held)
    by_end = np.argsort(-ends)  # the last to end first: preceding requests are present when a request ends
    alive = np.arange(1, len(held) + 1)
    return float((np.cumsum(tokens[by_end]) + alive * ends[by_end]).max())


def draw_left(random: Random, generated: Sequence[int], limits: Sequence[int], history: Sequence[int]) -> Floats:
    """Returns each request's remaining output tokens, drawn from ended requests' lengths (Past-Future, arXiv 2507.10150).

    If a request has generated tokens, its draw exceeds their number, and is linear between the lengths, up to the request's limit.
    history: the lengths, ascending.
    """
    ended, done, last = np.array(history), np.array(generated), len(history) - 1
    drawn = np.array([random.random() if tokens else random.randrange(last + 1) for tokens in generated])
    begun = done > 0
    first = np.searchsorted(ended, done, "right")
    place = drawn * (last - first + 2)
    step = np.where(begun, place, 0).astype(np.int64)
    low = np.where(step > 0, ended[np.minimum(first + step - 1, last)], done)
    high = np.where(first + step <= last, ended[np.minimum(first + step, last)], np.maximum(limits, done))
    whole = ended[np.where(begun, 0, drawn).astype(np.int64)]
    return np.where(begun, low + (place - step) * (high - low) - done, whole)


class EndedLengths:
    """Output lengths of the last ended requests, also in ascending order."""

    def __init__(self, window: int, lengths: Sequence[int] = ()) -> None:
        """window: number of lengths to keep. lengths: earlier lengths, oldest first."""
        self._lengths: deque[int] = deque(lengths, maxlen=window)
        self.ascending = sorted(self._lengths)

    def observe(self, request: Request) -> None:
        """Adds the output of an ended request, unless the request was rejected or cancelled."""
        if request.finish_reason not in SERVED:
            return
        if len(self._lengths) == self._lengths.maxlen:
            self.ascending.remove(self._lengths[0])
        self._lengths.append(request.num_output_tokens)
        insort(self.ascending, request.num_output_tokens)
