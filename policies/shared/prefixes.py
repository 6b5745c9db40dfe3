"""What waiting requests have in common: with each other, and with the prefix cache."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from math import inf

from cbatch import Name, Request, View

MOST_CACHED, LEAST_SHARED = 32, 32
"""Tokens: the thresholds of SGLang's in-batch prefix caching (IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD and _DEPRIORITIZE_)."""


def repeated(waiting: Iterable[Request], view: View) -> set[Request]:
    """Returns the requests of which little is cached, and that begin like an earlier one of which little is cached."""
    seen, later, number = set[Name](), set[Request](), view.kv.blocks_for(LEAST_SHARED)
    for request in waiting:
        names = view.kv.prefix_names(request, number)
        if request.num_computed <= MOST_CACHED and len(names) == number:
            if names[-1] in seen:  # the name stands for the blocks before, too
                later.add(request)
            seen.add(names[-1])
    return later


def paths_of(waiting: Sequence[Request], view: View) -> list[list[tuple[float, int]]]:
    """Returns each request's path through the tree of cached prefixes: of each step, how few wait beyond it, and the step's place."""
    size = view.kv.block_size
    names = [view.kv.prefix_names(request, request.num_computed // size) for request in waiting]
    weight = Counter(chain.from_iterable(names))
    place = {name: number for number, name in enumerate(weight)}
    return [[*((-weight[name], place[name]) for name in path), (inf, 0)] for path in names]
