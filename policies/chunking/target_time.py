"""The largest chunk that keeps an iteration within a target time: Medha's rule (arXiv 2409.17264)."""

from bisect import bisect_left

from cbatch import BatchShape, CostModel, Request


def largest_chunk(request: Request, shape: BatchShape, target: float, cost: CostModel) -> int:
    """Returns the tokens of a request's largest chunk that keeps an iteration of this shape within `target` seconds; 0 if none fits."""

    def fits(tokens: int) -> bool:
        chunks = (*shape.chunks, (tokens, request.num_computed))
        return cost.predict(shape._replace(chunks=chunks)) <= target

    return bisect_left(range(1, request.num_ready + 1), True, key=lambda tokens: not fits(tokens))
