"""Products with a weight matrix: our own kernel for few rows, a library's kernel for many."""

import torch
from torch.nn.functional import linear

from cbatch.runtime.fast.fused_ops import gate
from cbatch.runtime.fast.quack_gemm import quack_product
from cbatch.runtime.fast.small_batch_gemm import FEW_ROWS, MAX_ROWS, Tiling, small_batch_product, tiling_for
from cbatch.runtime.gpu.exchange import Meeting, push


class Product:
    """Multiplies rows with one weight matrix.

    weight: [outputs, inputs]; if gated, the gates and then the ups, [2 * outputs, inputs].
    tiling, wide: tilings for up to `FEW_ROWS` and up to `MAX_ROWS` rows; None if the matrix or the GPU requires the library.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        num_processors: int,
        *,
        gated: bool = False,
        overlaps: bool = True,
        dependent: bool,
        quack: bool = False,
    ) -> None:
        """
        num_processors: multiprocessors of the GPU.
        overlaps: see `small_batch_product`.
        dependent: small operations start while the preceding kernel still runs; requires compute capability 9.0.
        quack: quack's kernels multiply many rows if they are faster than cuBLAS.
        """
        self.weight = weight
        self.num_processors = num_processors
        self.gated, self.overlaps = gated, overlaps
        self.quack = quack
        self.dependent = dependent
        outputs, inputs = weight.shape
        narrow = weight.dtype in (torch.bfloat16, torch.float16)
        takes = narrow and torch.cuda.get_device_capability(weight.device)[0] == 9
        outputs //= 2 if gated else 1
        self.tiling = tiling_for(outputs, inputs, num_processors, gated=gated) if takes else None
        self.wide = tiling_for(outputs, inputs, num_processors, gated=gated, wide=True) if takes else None

    def __call__(self, x: torch.Tensor, meeting: Meeting | None = None) -> torch.Tensor:
        """
        x: [rows, inputs].
        meeting: meeting at which the parts are also stored for the other ranks.

        Returns:
            [parts, rows, outputs]; the product is the sum over the parts. If gated, SiLU(gate) * up in one part.
        """
        if tiling := self._tiling_of(x, meeting):
            return small_batch_product(
                x, self.weight, tiling, gated=self.gated, overlaps=self.overlaps, meeting=meeting
            )
        if self.quack and meeting is None and len(x) > MAX_ROWS:
            product = quack_product(x, self.weight, self.num_processors, gated=self.gated)
            if product is not None:
                return product[None]
        out = linear(x, self.weight)
        if meeting is not None:
            push(out, meeting, dependent=self.dependent)
        return gate(out, dependent=self.dependent)[None] if self.gated else out[None]

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Writes the summed product of an ungated matrix to `out`, float32 [rows, outputs]."""
        tiling = self._tiling_of(x, None)
        if tiling and tiling.splits == 1:
            small_batch_product(x, self.weight, tiling, out=out[None])
        else:
            parts = self(x)
            out.copy_(parts[0] if len(parts) == 1 else parts.sum(0))

    def _tiling_of(self, x: torch.Tensor, meeting: Meeting | None) -> Tiling | None:
        """Returns the tiling for the rows of `x`, or None for the library. The boxes of a meeting are too small for wide tilings."""
        if len(x) <= FEW_ROWS:
            return self.tiling
        return self.wide if len(x) <= MAX_ROWS and meeting is None else None
