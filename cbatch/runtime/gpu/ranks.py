"""Ranks of a tensor-parallel group: how they take turns, and how they exchange parts on a CPU.

Each rank computes its share of every matrix (Megatron-LM, arXiv 1909.08053). A rank yields where it needs the parts of the
other ranks: after the attention and the feed-forward of each layer, and before a token is chosen. A rank continues once all
ranks have yielded. On a stream the group's iteration is one operation.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")
Part = TypeVar("Part")
Steps = Generator[None, None, Result]  # a rank's computation, which yields where it requires results of the other ranks


def finish(steps: Steps[Result]) -> Result:
    """Computes the steps of one rank without waiting for other ranks: for a single rank, or during a capture."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def lockstep(ranks: Sequence[Steps[Result]], places: Sequence[torch.Tensor]) -> Steps[list[Result]]:
    """Computes all ranks in turn, each up to its next yield, so that no rank waits for work that has not been enqueued.

    Yields after each turn of all ranks. places: a tensor on each rank's device; that device is the current device while the rank computes.

    Raises RuntimeError: the ranks do not yield equally often.
    """
    results: list[Result] = []
    while not results:
        for steps, place in zip(ranks, places, strict=True):
            with torch.cuda.device_of(place):
                try:
                    next(steps)
                except StopIteration as end:
                    results.append(end.value)
        if len(results) not in (0, len(ranks)):
            raise RuntimeError(f"{len(results)} of {len(ranks)} ranks have ended while the others wait for them")
        yield
    return results


class Meetings:
    """Exchanges parts among the ranks of a group on one CPU. Owner: the group's operation, which runs the ranks in turn.

    Two sets of parts alternate, since a rank stores its next part while others still read the previous parts.
    """

    def __init__(self, num_ranks: int) -> None:
        self._parts: list[list[object]] = [[None] * num_ranks, [None] * num_ranks]
        self._counts = [0] * num_ranks

    def exchange(self, rank: int, part: Part) -> Steps[list[Part]]:
        """Returns the parts of all ranks in the order of the ranks. Raises RuntimeError if a rank has not stored its part."""
        number = self._counts[rank]
        self._parts[number % 2][rank] = part
        self._counts[rank] += 1
        yield
        late = [other for other, count in enumerate(self._counts) if count <= number]
        if late:
            raise RuntimeError(f"rank {rank} needs part {number} of rank {late[0]}, which has not stored it")
        parts: list[Part] = list(self._parts[number % 2])  # type: ignore[arg-type]
        return parts
