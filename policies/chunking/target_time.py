"""The largest chunk that fits a target time of the iteration: Medha's rule (arXiv 2409.17264)."""

from bisect import bisect_left

from cbatch import BatchShape, CostModel, Request


def largest_chunk(request: Request, shape: BatchShape, target: float, cost: CostModel) -> int:
    """Tokens of a request's largest chunk with which an iteration of this shape takes no longer than `target` seconds; 0 if none."""

    def fits(tokens: int) -> bool:
        chunks = (*shape.chunks, (tokens, request.num_computed))
        return cost.predict(shape._replace(chunks=chunks)) <= target

    return bisect_left(range(1, request.num_ready + 1), True, key=lambda tokens: not fits(tokens))
