"""Sarathi-Serve with the longest output admitted first: the LPT rule (Graham, SIAM J. Appl. Math. 17(2), 1969).

For a queue that is all there, where only the end of the last request counts. First come, first served lets a long output
begin late, and the batch runs nearly empty until it has ended; the longest first, the batch stays full to the end. The
length that counts is the client's: `predicted_new_tokens` where there is one, else `max_new_tokens`. Under steady arrivals
short requests may starve.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from cbatch import Request, View
from policies.sarathi_serve import SarathiServe


class LongestFirst(SarathiServe):
    def prompts(self, view: View) -> Iterable[Request]:
        return chain(view.prefilling, _by_length(view))


def _by_length(view: View) -> Iterator[Request]:
    """The waiting requests, longest output first; sorted only if one can be admitted."""
    if len(view.running) < view.limits.max_running:
        yield from sorted(view.waiting, key=lambda request: request.predicted_new_tokens or request.max_new_tokens,
                          reverse=True)  # fmt: skip
