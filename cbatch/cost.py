"""Predicts an iteration's duration from the shape of its batch, for policies (`view.cost`), chunk selectors and the simulator.

`cbatch.sim` has implementations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


def scores(tokens: float, context: float) -> float:
    """Returns the number of query-key products in a causal chunk of `tokens` after `context` other tokens."""
    return tokens * (context + (tokens + 1) / 2)


class BatchShape(NamedTuple):
    """The features of a batch that determine the iteration's time.

    chunks: (tokens, context) for each request that computes prompt tokens; context = its tokens already in the KV cache.
    num_decodes: rows of one token, decodes and drafts. decode_context: tokens of KV cache before and in each row, summed.
    num_padding: tokens added to reach `Plan.pad_to`.
    num_shared: tokens of `decode_context` that repeat tokens of another row, in KV blocks that both hold.
    num_drafts: rows that are drafts.
    """

    chunks: tuple[tuple[int, int], ...] = ()
    num_decodes: int = 0
    decode_context: int = 0
    num_padding: int = 0
    num_shared: int = 0
    num_drafts: int = 0

    @property
    def num_tokens(self) -> int:
        """Returns the tokens in the linear layers, including padding."""
        total = self.num_decodes + self.num_padding
        for tokens, _ in self.chunks:
            total += tokens
        return total

    @property
    def num_requests(self) -> int:
        return len(self.chunks) + self.num_decodes

    @property
    def num_scores(self) -> int:
        """Returns the query-key products of one head."""
        total = self.decode_context
        for tokens, context in self.chunks:
            total += int(scores(tokens, context))
        return total

    @property
    def num_kv_reads(self) -> int:
        """Returns the tokens whose keys and values attention reads, its own tokens included, shared ones once."""
        total = self.decode_context - self.num_shared
        for tokens, context in self.chunks:
            total += tokens + context
        return total

    def with_drafts(self, number: int) -> "BatchShape":
        """Returns the shape with drafts of its decodes. A draft is a row of its own that shares the context of a decode."""
        context = number * self.decode_context // max(self.num_decodes, 1)
        return self._replace(
            num_decodes=self.num_decodes + number,
            decode_context=self.decode_context + context,
            num_shared=self.num_shared + context,
            num_drafts=self.num_drafts + number,
        )

    def read_together(self, rows: int) -> "BatchShape":
        """Returns the decodes of a kernel that reads a context once for up to `rows` rows of a request; drafts are spread evenly."""
        if not self.num_drafts:
            return self
        number = self.num_decodes - self.num_drafts
        reads = min(number * -(-self.num_decodes // (number * rows)), self.num_decodes)
        context = self.decode_context * reads // self.num_decodes
        num_shared = max(self.num_shared + context - self.decode_context, 0)
        return self._replace(num_decodes=reads, decode_context=context, num_shared=num_shared, num_drafts=0)


class CostModel(Protocol):
    def predict(self, shape: BatchShape) -> float:
        """Returns the seconds that the device is busy with an iteration of this shape."""

    def copy_seconds(self, num_out: int, num_back: int, block_size: int) -> float:
        """Returns the seconds to copy KV blocks of `block_size` tokens to host memory, and others back."""


@dataclass(frozen=True)
class CostFunction:
    """A cost model made from functions. Copies take no time by default."""

    predict: Callable[[BatchShape], float]
    copy_seconds: Callable[[int, int, int], float] = lambda num_out, num_back, block_size: 0.0


NO_COST = CostFunction(lambda shape: 0.0)  # the cost model for policies that do not predict
