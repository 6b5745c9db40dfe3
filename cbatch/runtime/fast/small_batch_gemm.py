"""Products of a few rows with a large weight matrix, at the speed at which the weights can be read.

With up to 64 rows a product takes as long as reading its weights, so any moment without a read in flight is lost. Hence
three differences from a library's product:

* the weights are the tall operand (out^T = weight x^T), so that few rows still fill a tensor core's tile;
* if the outputs are too few to occupy the GPU, the inputs are split too, and the kernel that reads the product sums the
  parts (`fused_ops`): no extra pass, and always the same order of summation;
* programs are placed while the preceding kernel still runs ("programmatic dependent launch"): `gdc_wait` returns when
  that kernel has ended and what it wrote can be read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.model import Rank
from cbatch.runtime.fast.exchange import Meeting, store_for_others, tell_others

MAX_ROWS = 64

SHARED_MEMORY = 222 * 1024
"""Bytes of shared memory that the programs of one multiprocessor may use together (Hopper has 228 KB)."""


class Tiling(NamedTuple):
    """How a product is divided into programs.

    outputs: per program.
    inputs: per step of a program.
    splits: parts into which the inputs are divided, each with its own programs.
    per_processor: programs that should fit on one multiprocessor; sets how many steps each may have in flight.
    """

    outputs: int
    inputs: int
    splits: int
    per_processor: int

    def num_stages(self, block_rows: int, gated: bool) -> int:
        """Steps in flight, as many as the shared memory holds; weights and inputs have 16 bits."""
        step = (self.outputs * (2 if gated else 1) + block_rows) * self.inputs * 2
        return min(6, SHARED_MEMORY // self.per_processor // step)


def tiling_for(outputs: int, inputs: int, num_processors: int, *, gated: bool) -> Tiling | None:
    """Return a tiling for a matrix, or None if none divides it evenly.

    Measured on an H200 (`python -m experiments.bench step`): one program per multiprocessor with a deep pipeline is
    best, with tiles of 128 outputs if there are enough of them, else tiles of 64 and as many splits as needed.

    Args:
        outputs: of the product; if gated, half the matrix's.
        num_processors: multiprocessors of the GPU.
        gated: as in `small_batch_product`; the inputs of a gated product are not split.
    """
    tile = 128 if outputs // 128 >= 0.8 * num_processors else 64
    step = 128 if inputs % 128 == 0 else 64
    if outputs % tile or inputs % step:
        return None
    programs = outputs // tile
    splits = 1
    while not gated and programs * splits < 0.7 * num_processors and inputs % (2 * splits * step) == 0:
        splits *= 2
    two_waves = 1.1 * num_processors < programs * splits <= 2 * num_processors
    return Tiling(tile, step, splits, 2 if two_waves else 1)


@triton.jit(do_not_specialize=["num_rows"])
def _small_batch_gemm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # [rows, INPUTS]
    weight_ptr,  # [OUTPUTS, INPUTS]; gated: [2 * OUTPUTS, INPUTS], the gates first
    out_ptr,  # [SPLITS, rows, OUTPUTS]
    boxes_ptr,  # [RANKS]
    counters_ptr,  # [RANKS]
    num_rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    PART: tl.constexpr = INPUTS // SPLITS
    split = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.arange(0, BLOCK_ROWS)
    inputs = split * PART + tl.arange(0, BLOCK_INPUTS)
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * INPUTS + inputs[None, :]
    x_ptrs = x_ptr + rows[None, :] * INPUTS + inputs[:, None]
    real = rows[None, :] < num_rows
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    ups = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for _ in range(0, PART, BLOCK_INPUTS):
        x = tl.load(x_ptrs, real, other=0.0)
        sums = tl.dot(tl.load(weight_ptrs), x, sums)
        if GATED:
            ups = tl.dot(tl.load(weight_ptrs + OUTPUTS * INPUTS), x, ups)
        weight_ptrs += BLOCK_INPUTS
        x_ptrs += BLOCK_INPUTS
    if GATED:
        sums = sums / (1 + tl.exp(-sums)) * ups
    places = (split * num_rows + rows[None, :]) * OUTPUTS + outputs[:, None]
    part = sums.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, part, real)
    if RANKS > 1:
        store_for_others(boxes_ptr, places, part, real, RANK, RANKS)
        tell_others(counters_ptr, RANK, RANKS)


def small_batch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
    dependent: bool,
    out: torch.Tensor | None = None,
    meeting: Meeting | None = None,
) -> torch.Tensor:
    """Multiply up to `MAX_ROWS` rows with a weight matrix.

    Args:
        x: [rows, inputs], contiguous.
        weight: [outputs, inputs], contiguous, of x's 16-bit type; if gated, [2 * outputs, inputs], the gates first.
        tiling: from `tiling_for` for these sizes.
        gated: SiLU(x gates^T) * (x ups^T) instead of x weight^T.
        dependent: start while the preceding kernel still runs; needs compute capability 9.0.
        out: written instead of a new tensor; contiguous.
        meeting: where the parts are stored for the other ranks too.

    Returns:
        [splits, rows, outputs], partial sums in float32; if gated, or with a meeting, of x's type.
    """
    num_rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    block_rows = max(16, triton.next_power_of_2(num_rows))
    if out is None:
        dtype = torch.float32 if not gated and meeting is None else x.dtype
        out = torch.empty((tiling.splits, num_rows, outputs), dtype=dtype, device=x.device)
    grid = outputs // tiling.outputs, tiling.splits
    boxes, counters = meeting.expect(out, grid[0] * grid[1]) if meeting else (out, out)
    rank = meeting.rank if meeting else Rank()
    _small_batch_gemm_kernel[grid](
        x,
        weight,
        out,
        boxes,
        counters,
        num_rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        SPLITS=tiling.splits,
        GATED=gated,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=tiling.outputs,
        BLOCK_INPUTS=tiling.inputs,
        DEPENDENT=dependent,
        RANK=rank.index,
        RANKS=rank.size,
        num_warps=4,
        num_stages=tiling.num_stages(block_rows, gated),
        launch_pdl=dependent,
    )
    return out
