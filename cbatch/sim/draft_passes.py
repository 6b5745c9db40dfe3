"""Prices the passes of a draft model in an iteration, as `cbatch.runtime.draft_model` computes them on a GPU."""

from functools import cache

from cbatch.cost import BatchShape
from cbatch.model import ModelSpec
from cbatch.sim.cost import ProfileCost


class DraftPasses:
    """The passes of a draft model that each GPU of the first stage holds whole.

    An iteration with k drafts of a request takes k + 1 passes, the last without the output head: it only writes keys and values. The first pass of an
    iteration with prompts computes all its rows. Its captured graphs have either no drafts or the most, and then take all passes.
    """

    def __init__(self, cost: ProfileCost, spec: ModelSpec, max_drafts: int) -> None:
        """cost: of the model that checks the drafts. max_drafts: of a request."""
        self._checks, self._max_drafts = cost, max_drafts
        self._drafts = ProfileCost(cost.profile, spec, max_batch=cost.max_batch)
        self._drafts.max_rows = cost.max_rows
        self._parts = cache(self._drafts.parts)

    def seconds(self, shape: BatchShape, most: int | None = None) -> float:
        """Returns the seconds of an iteration's passes. most: drafts of a request; None: drafts are spread evenly."""
        single = shape.num_decodes - shape.num_drafts
        k = -(-shape.num_drafts // max(single, 1)) if most is None else most
        graph, rows = self._checks.graph_tokens(shape), single + len(shape.chunks)
        if graph is not None and shape.chunks:
            rows = min(self._checks.max_rows, graph - 1)
        elif graph is not None:
            rows = each if (each := graph // (1 + k)) >= single else graph
        rows = min(rows, self._checks.max_batch or rows)
        context = shape.decode_context * single // max(shape.num_decodes, 1)
        one_each = self._parts(BatchShape((), rows, context))
        if not shape.chunks:
            return (k + 1) * one_each.total - one_each.head
        if k and graph is not None:
            k = self._max_drafts
        return self._drafts.predict(shape) + k * one_each.total - (one_each.head if k else 0.0)
