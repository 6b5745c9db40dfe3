"""The share of a profiler's window in which the device was busy."""

from __future__ import annotations

from collections.abc import Iterable


def covered_share(events: Iterable[tuple[float, float, str]]) -> float:
    """Returns the share of the time from the first kernel to the last end that kernels and copies cover.

    events: (start, end, name). A profiler records only what is launched after its start. The iteration in flight then leaves
    a hole after the copy of the next one's inputs, so copies before the first kernel do not count.
    """
    spans = sorted(events)
    first = next(begin for begin, _, name in spans if not name.startswith("Memcpy"))
    busy, reached = 0.0, first
    for begin, end, _ in spans:
        busy += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return busy / (reached - first)
