"""How much of a profiler's window the device was at work."""

from __future__ import annotations

from collections.abc import Iterable


def covered_share(events: Iterable[tuple[float, float, str]]) -> float:
    """Share of the time from the first kernel to the last end that (start, end, name) of kernels and copies cover.

    A profiler sees only what is launched after it was started. The iteration in flight at that moment therefore leaves a
    hole behind the copy of the next one's inputs, which is the first event: copies before the first kernel do not count.
    """
    spans = sorted(events)
    first = next(begin for begin, _, name in spans if not name.startswith("Memcpy"))
    busy, reached = 0.0, first
    for begin, end, _ in spans:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy / (reached - first)
