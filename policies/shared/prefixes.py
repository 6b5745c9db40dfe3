"""Finds common prefixes of waiting requests that the prefix cache does not yet hold."""

from collections.abc import Callable, Iterable

from cbatch import BlockHash, Request, View

MOST_RANKED = 128
"""Waiting requests beyond which SGLang's `lpm` and `hrrn` are first come, first served."""

MOST_CACHED, LEAST_SHARED = 32, 32
"""Tokens: the thresholds of SGLang's in-batch prefix caching (IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD and _DEPRIORITIZE_)."""


def num_uncached(request: Request) -> int:
    """Returns the tokens that a waiting request lacks: `num_ready`, which is 0 while drafts are in flight that a preempted request may keep."""
    return request.num_tokens - request.num_computed


def repeated(waiting: Iterable[Request], view: View) -> set[Request]:
    """Returns requests with few cached tokens that share a prefix with an earlier request with few cached tokens."""
    seen, later, number = set[BlockHash](), set[Request](), view.kv.blocks_for(LEAST_SHARED)
    for request in waiting:
        hashes = view.kv.block_hashes(request, number)
        if request.num_computed <= MOST_CACHED and len(hashes) == number:
            if hashes[-1] in seen:  # the hash also identifies the preceding blocks
                later.add(request)
            seen.add(hashes[-1])
    return later


class SortedOrder:
    """A `KeptOrder` without state: each plan sorts all waiting requests by key; ties: arrival.

    in_batch: whether requests in `repeated` come last, by key or, with `later_by_arrival`, by arrival. most: waiting requests beyond which the order is first come, first served.
    """

    def __init__(
        self, key: Callable[[Request], float], in_batch: bool, most: float, later_by_arrival: bool = False
    ) -> None:
        self._key, self._in_batch, self._most, self._later_by_arrival = key, in_batch, most, later_by_arrival

    def expect(self, requests: Iterable[Request]) -> None: ...

    discard = expect

    def in_order(self, view: View) -> Iterable[Request]:
        """Returns the waiting requests in order."""
        if len(view.waiting) > self._most:
            return view.waiting
        later = repeated(view.waiting, view) if self._in_batch else set()
        key, unsorted = self._key, later if self._later_by_arrival else ()
        return sorted(view.waiting, key=lambda each: (each in later, 0.0 if each in unsorted else key(each)))
