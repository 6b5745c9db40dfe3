"""Random numbers: one stream per purpose, one seed per request.

Streams are independent, so drawing other lengths does not move the arrivals. Each draw is a prefix of any longer draw,
so the first requests stay the same if a run has more requests.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(IntEnum):
    """Purposes of random numbers. The values are part of every seed: never reorder them."""

    ARRIVALS = 0
    LENGTHS = 1
    PROMPTS = 2
    SAMPLING = 3
    SERVEGEN = 4
    TIERS = 5
    PREDICTIONS = 6
    CLIENTS = 7
    GROUPS = 8
    STEADY = 9
    ORDER = 10


def generator(seed: int, stream: Purpose, *key: int) -> np.random.Generator:
    """Returns the generator of a stream. key: numbers from 0 that identify a part of the stream, such as a client."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, *key)))


def request_seeds(seed: int, stream: Purpose, num_requests: int) -> NDArray[np.uint64]:
    """Returns a seed for each request, [num_requests], from 0 to 2^63 - 1. Seed i depends only on `seed`, `stream` and i."""
    words = np.random.SeedSequence(seed, spawn_key=(stream,)).generate_state(num_requests, np.uint64)
    return words >> np.uint64(1)  # fits a signed 64-bit integer
