"""The cost model: seconds of an iteration from its shape, interpolated from a hardware profile.

Matrix products come from the measured table where the profile has one for the model - linear between measured token
counts, so that measured steps at tile edges stay steps - and from the ceilings otherwise (`estimated` says which).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from cbatch.cost import BatchShape
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.sim.profile import LinearTable, Profile


class Parts(NamedTuple):
    """Device seconds of one iteration by operation."""

    linear: float
    attention: float
    head: float
    other: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head + self.other


class ProfileCost:
    """Predicts iterations of one model on one GPU."""

    def __init__(self, profile: Profile, spec: ModelSpec) -> None:
        self.profile = profile
        self.spec = spec
        self.estimated = not profile.covers(spec)
        self._linear_seconds: dict[int, float] = {}
        width = DTYPE_BYTES[spec.dtype]
        attention = profile.attention
        self._kv_seconds_per_token = (
            2 * spec.num_kv_heads * spec.head_dim * width / attention.bandwidth_bytes_per_second
        )
        self._seconds_per_score = 4 * spec.num_heads * spec.head_dim / attention.flops_per_second
        bytes_per_token = profile.small_operations.bytes_per_hidden_element * spec.hidden_size * width / 2
        self._other_per_layer = profile.small_operations.seconds_per_layer
        self._other_per_token = bytes_per_token / profile.bandwidth_bytes_per_second

    def predict(self, shape: BatchShape) -> float:
        """Seconds that the device computes an iteration of this shape."""
        return self.parts(shape).total

    def parts(self, shape: BatchShape) -> Parts:
        num_tokens, layers = shape.num_tokens, self.spec.num_layers
        linear = self._linear_seconds.get(num_tokens)
        if linear is None:
            linear = self._linear_seconds[num_tokens] = self._linear(num_tokens)
        return Parts(
            linear,
            layers * self._attention(shape),
            self._product(self.spec.hidden_size, self.spec.vocab_size, max(shape.num_requests, 1)),
            layers * (self._other_per_layer + self._other_per_token * num_tokens),
        )

    def _attention(self, shape: BatchShape) -> float:
        """One layer. Decodes are bound by reading the KV cache, chunks by arithmetic; one call serves both."""
        attention, seconds, longest = self.profile.attention, 0.0, 0.0
        if shape.num_decodes:
            seconds = shape.decode_context * self._kv_seconds_per_token
            longest = shape.decode_context / shape.num_decodes * attention.seconds_per_context_token
        for tokens, context in shape.chunks:
            scores = tokens * (context + (tokens + 1) / 2)
            seconds += max(scores * self._seconds_per_score, (context + tokens) * self._kv_seconds_per_token)
        return attention.base_seconds + max(seconds, longest)

    def _linear(self, num_tokens: int) -> float:
        table = self.profile.linear.get(self.spec.name)
        if table is not None:
            return interpolate(table, num_tokens)
        layer = sum(self._product(k, n, num_tokens) for k, n in self.spec.linear_shapes.values())
        return self.spec.num_layers * layer

    def _product(self, inputs: int, outputs: int, num_tokens: int) -> float:
        """A matrix product at the ceilings: whole tiles of arithmetic, or one read of weights and activations."""
        profile, width = self.profile, DTYPE_BYTES[self.spec.dtype]
        tiles = -(-num_tokens // profile.tile) * profile.tile
        moved = width * (inputs * outputs + num_tokens * (inputs + outputs))
        return max(2 * tiles * inputs * outputs / profile.flops_per_second, moved / profile.bandwidth_bytes_per_second)


def interpolate(table: LinearTable, num_tokens: int) -> float:
    """Seconds at `num_tokens`: linear between neighbours; beyond the last, in proportion to it."""
    tokens, seconds = table.tokens, table.seconds
    right = bisect_right(tokens, num_tokens)
    if right == 0:
        return seconds[0]
    if right == len(tokens):
        return seconds[-1] * num_tokens / tokens[-1]
    left = right - 1
    share = (num_tokens - tokens[left]) / (tokens[right] - tokens[left])
    return seconds[left] + share * (seconds[right] - seconds[left])
