"""Roofline estimates for unmeasured parts, which results list as estimated.

An estimate has the interface of a measured `PiecewiseLinear`: `at(size)` in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol, cast

from cbatch.errors import ProfileError
from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.sim.schema import BytesPerSecond, FlopsPerSecond
from cbatch.validation import whole

WideDtype = Literal["float32", "float64"]


class Seconds(Protocol):
    """Seconds against a size: a measured `PiecewiseLinear`, or an estimate."""

    def at(self, size: float) -> float: ...

    def covers(self, size: float) -> bool:
        """Returns whether the size lies within the measured range; True for an estimate."""
        return True


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The largest rates of memory and arithmetic.

    flops_per_second: of 16-bit products. flops_per_second_by_dtype: of float32 products, without TF32, and of float64 products.
    tile: the time of 16-bit products rises in steps of this many tokens.
    """

    bandwidth_bytes_per_second: BytesPerSecond
    flops_per_second: FlopsPerSecond
    tile: Annotated[int, whole(1, unit="number of tokens")]
    flops_per_second_by_dtype: Mapping[WideDtype, FlopsPerSecond] = field(default_factory=dict)

    def of(self, dtype: str) -> "Ceilings":
        """Returns the ceilings of products in this number format. Raises ProfileError if they are not stated."""
        if DTYPE_BYTES[dtype] == 2:
            return self
        if (rate := self.flops_per_second_by_dtype.get(cast(WideDtype, dtype))) is None:
            remedy = f"add ceilings.flops_per_second_by_dtype.{dtype}, or give a 16-bit model.dtype"
            raise ProfileError(f"the profile states no rate of {dtype} products; {remedy}")
        return replace(self, flops_per_second=rate, tile=1)


@dataclass(frozen=True, slots=True)
class MatrixProducts(Seconds):
    """Matrix products of (inputs, outputs): whole tiles of arithmetic, or one read of weights and activations."""

    shapes: tuple[tuple[int, int], ...]
    dtype_bytes: int
    ceilings: Ceilings

    def at(self, size: float) -> float:
        return sum(self._product(inputs, outputs, size) for inputs, outputs in self.shapes)

    def _product(self, inputs: int, outputs: int, num_tokens: float) -> float:
        ceilings = self.ceilings
        tiles = -(-num_tokens // ceilings.tile) * ceilings.tile
        flops = 2 * tiles * inputs * outputs
        moved = self.dtype_bytes * (inputs * outputs + num_tokens * (inputs + outputs))
        return max(flops / ceilings.flops_per_second, moved / ceilings.bandwidth_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Affine(Seconds):
    """A constant and a slope: seconds per token, or per byte."""

    seconds: float
    seconds_per_unit: float

    def at(self, size: float) -> float:
        return self.seconds + self.seconds_per_unit * size


def small_operations(share: ModelSpec, ceilings: Ceilings) -> Affine:
    """Estimates norms, residual sums, rotary embedding, KV write and activation of one layer from the moved bytes.

    Two norms and two residual sums move 2 + 3 hidden states each; queries, keys and values are read and written once;
    the activation reads its inputs and writes its output.
    """
    projected = (share.num_heads + 2 * share.num_kv_heads) * share.head_dim
    activation = share.intermediate_size * (3 if share.gated else 2)
    moved = DTYPE_BYTES[share.dtype] * (10 * share.hidden_size + 2 * projected + activation)
    return Affine(0.0, moved / ceilings.bandwidth_bytes_per_second)
