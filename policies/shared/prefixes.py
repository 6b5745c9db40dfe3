"""What waiting requests have in common that the prefix cache does not hold yet."""

from collections.abc import Iterable

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
