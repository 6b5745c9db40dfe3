"""KV cache that running requests will hold, from what they hold now and how much output is still to come."""

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
    """The most tokens that requests hold at any time at which one of them ends.

    held: tokens of each request now. left: rounds until each ends; it holds one token more after each.
    """
    ends, tokens = np.asarray(left), np.array(held)
    by_end = np.argsort(-ends)  # the last to end first: those before a request in this order are there when it ends
    alive = np.arange(1, len(held) + 1)
    return float((np.cumsum(tokens[by_end]) + alive * ends[by_end]).max())


def draw_left(random: Random, generated: Sequence[int], limits: Sequence[int], history: Sequence[int]) -> Floats:
    """Output tokens still to come of each request, drawn from ended requests' lengths (Past-Future, arXiv 2507.10150).

    Of a request that has generated some, the draw is above these and linear between the lengths, up to its limit.
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
    """Output lengths of the last requests that ended, also in ascending order."""

    def __init__(self, window: int, lengths: Sequence[int] = ()) -> None:
        """window: how many are kept. lengths: those of earlier ones, oldest first."""
        self._lengths: deque[int] = deque(lengths, maxlen=window)
        self.ascending = sorted(self._lengths)

    def observe(self, request: Request) -> None:
        """Adds the output of a request that has ended, unless it was rejected or its client has left."""
        if request.finish_reason not in SERVED:
            return
        if len(self._lengths) == self._lengths.maxlen:
            self.ascending.remove(self._lengths[0])
        self._lengths.append(request.num_output_tokens)
        insort(self.ascending, request.num_output_tokens)
