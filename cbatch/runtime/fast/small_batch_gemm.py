"""Products of a few rows with a large weight matrix, as fast as the weights can be read.

With up to 128 rows a product takes about as long as reading its weights, so reads must always be in flight. The kernel differs from
a library's in five ways:

* the weights are the tall operand (out^T = weight x^T), so that few rows still fill a tensor core's tile;
* if the outputs are too few to occupy the GPU, the inputs are also split. The kernel that reads the product sums the parts
  (`fused_ops`), which needs no extra pass and fixes the order of summation;
* if the preceding kernel `overlaps`, programs start while it still runs ("programmatic dependent launch"). They fill their shared
  memory with weights, which depend on no kernel, then wait for the preceding kernel in `gdc_wait`, and then read the rows;
* the copy engine (TMA) reads tiles directly into shared memory: no registers and few instructions per byte;
* programs begin at different places along the inputs (`STRIDE`); otherwise all programs would read the same rows at once.

Written in Gluon, Triton's lower level, since Triton reads a step's weights and rows together. Requires compute capability 9.0.

Tried on an H200 without gain: prefetching the next product's first weights into the L2 cache while this product ends (slower), rows
shared by multicast among the programs of a cluster, and a warp that only loads. On an H100 fewer steps of rows than of weights in
flight are slower, even with rows copied by threads: reads of rows wait behind the many reads of weights.
"""

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.model import Rank
from cbatch.runtime.gpu.exchange import Meeting, signal_others, store_for_others

FEW_ROWS = 64  # most rows for one warp group; with more, the rows of a step take as much shared memory as its weights

MAX_ROWS = 128

STRIDE = 5
"""Steps between the places where two neighbouring programs begin, for 17 to `FEW_ROWS` rows. On an H100 the stride saves 1.1% of a
decode iteration of 32 requests, 1 to 7 steps perform alike, and more rows take 0.2% longer with a stride."""

SHARED_MEMORY = 222 * 1024
"""Bytes of shared memory that the programs of one multiprocessor may use together (Hopper has 228 KB)."""

read_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the latter: its name in Triton 3.6


class Tiling(NamedTuple):
    """How a product is divided into programs.

    outputs: per program.
    inputs: per step of a program.
    splits: parts into which the inputs are divided; each part has separate programs.
    per_processor: programs that should fit on one multiprocessor; limits the steps that a program may have in flight.
    """

    outputs: int
    inputs: int
    splits: int
    per_processor: int

    def num_stages(self, block_rows: int, gated: bool) -> int:
        """Returns the steps in flight that fit into shared memory; weights and inputs have 16 bits."""
        step = (self.outputs * (2 if gated else 1) + block_rows) * self.inputs * 2
        return SHARED_MEMORY // self.per_processor // step


def tiling_for(outputs: int, inputs: int, num_processors: int, *, gated: bool, wide: bool = False) -> Tiling | None:
    """Returns a tiling for a matrix, or None if no tiling divides the matrix evenly.

    Of the tilings tried on an H200, tiles of 64 outputs with as many splits as needed are best for few rows. Tiles of 128 are best
    if there are enough of them and the product is not gated; a gated product reads two weights per output. Up to 1.25 programs per
    multiprocessor take its whole memory each: with two halves, one half would be empty, and the next kernel would fill it too early.
    Up to 1.5 programs per multiprocessor are divided in two, so that all three places of each multiprocessor are taken.

    Args:
        outputs: the product's outputs; if gated, half the outputs of the matrix.
        num_processors: multiprocessors of the GPU.
        gated: as in `small_batch_product`; the inputs of a gated product are not split.
        wide: for more than `FEW_ROWS` rows. The result is then None if programs are too few, or if gated programs take two waves.
    """
    tile = 128 if wide or (outputs // 128 >= 0.8 * num_processors and not gated) else 64
    step = 128 if inputs % 128 == 0 and not wide else 64
    if outputs % tile or inputs % step:
        return None
    programs = outputs // tile
    splits = 1
    while not gated and programs * splits < 0.7 * num_processors and inputs % (2 * splits * step) == 0:
        splits *= 2
    if wide and (programs * splits < 0.6 * num_processors or (gated and programs > num_processors)):
        return None
    programs *= splits
    if programs <= 1.25 * num_processors:
        return Tiling(tile, step, splits, 1)
    if tile == 64 and not gated and programs <= 1.5 * num_processors and inputs % (2 * splits * step) == 0:
        return Tiling(tile, step, 2 * splits, 3)
    return Tiling(tile, step, splits, 2)


@gluon.jit
def _read_weights(  # type: ignore[no-untyped-def]
    weight,
    weights,  # [STAGES * WAYS, block of the weight]
    arrived,  # [STAGES, 1]
    output,
    step,
    stage,
    wanted,
    OUTPUTS: gl.constexpr,
    STEP_BYTES: gl.constexpr,
):
    """Starts reading the weights of a step into a stage. The stage is full once its rows have arrived as well."""
    WAYS: gl.constexpr = weights.shape[0] // arrived.shape[0]
    column = step * weight.block_type.shape[1]
    mbarrier.expect(arrived.index(stage), STEP_BYTES, pred=wanted)
    for way in gl.static_range(WAYS):
        tile = weights.index(stage * WAYS + way)
        read_tile(weight, [way * OUTPUTS + output, column], arrived.index(stage), tile, pred=wanted)


@gluon.jit(do_not_specialize=["num_rows"])
def _small_batch_gemm_kernel(  # type: ignore[no-untyped-def]
    weight,  # [OUTPUTS, INPUTS]; gated: [2 * OUTPUTS, INPUTS], the gates first
    x,  # [rows, INPUTS]
    out_ptr,  # [SPLITS, rows, OUTPUTS]
    boxes_ptr,  # [RANKS]
    counters_ptr,  # [RANKS]
    num_rows,
    OUTPUTS: gl.constexpr,
    STEPS: gl.constexpr,  # of a program
    STAGES: gl.constexpr,
    STRIDE: gl.constexpr,
    GATED: gl.constexpr,
    OVERLAPS: gl.constexpr,
    RANK: gl.constexpr,
    RANKS: gl.constexpr,
    num_warps: gl.constexpr,
):
    BLOCK_OUTPUTS: gl.constexpr = weight.block_type.shape[0]
    BLOCK_ROWS: gl.constexpr = x.block_type.shape[0]
    BLOCK_INPUTS: gl.constexpr = x.block_type.shape[1]
    WAYS: gl.constexpr = 2 if GATED else 1
    STEP_BYTES: gl.constexpr = (WAYS * BLOCK_OUTPUTS + BLOCK_ROWS) * BLOCK_INPUTS * 2
    LAG: gl.constexpr = 1 if STAGES > 1 else 0  # steps still computed when the next begins
    if OVERLAPS:
        gdc_launch_dependents()
    split, output = gl.program_id(1), gl.program_id(0) * BLOCK_OUTPUTS
    first, shift = split * STEPS, gl.program_id(0) * STRIDE % STEPS  # step i reads place first + (i + shift) % STEPS
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES * WAYS, BLOCK_OUTPUTS, BLOCK_INPUTS], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK_INPUTS], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        _read_weights(
            weight, weights, arrived, output, first + (stage + shift) % STEPS, stage, True, OUTPUTS, STEP_BYTES
        )
    gdc_wait()
    for stage in gl.static_range(STAGES):
        column = (first + (stage + shift) % STEPS) * BLOCK_INPUTS
        read_tile(x, [0, column], arrived.index(stage), inputs.index(stage))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_ROWS, 16])
    sums = gl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), gl.float32, layout)
    ups = gl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), gl.float32, layout)
    for step in range(STEPS):
        place = step % STAGES
        mbarrier.wait(arrived.index(place), step // STAGES % 2)
        tile = inputs.index(place).permute((1, 0))
        sums = warpgroup_mma(weights.index(place * WAYS), tile, sums, is_async=True)
        if GATED:
            ups = warpgroup_mma(weights.index(place * WAYS + 1), tile, ups, is_async=True)
        sums, ups = warpgroup_mma_wait(LAG * WAYS, deps=(sums, ups))
        done = step - LAG
        place = (done + STAGES) % STAGES
        later, wanted = first + (done + STAGES + shift) % STEPS, (done >= 0) & (done + STAGES < STEPS)
        _read_weights(weight, weights, arrived, output, later, place, wanted, OUTPUTS, STEP_BYTES)
        read_tile(x, [0, later * BLOCK_INPUTS], arrived.index(place), inputs.index(place), pred=wanted)
    sums, ups = warpgroup_mma_wait(0, deps=(sums, ups))
    if GATED:
        sums = sums / (1 + gl.exp(-sums)) * ups
    outputs = output + gl.arange(0, BLOCK_OUTPUTS, gl.SliceLayout(1, layout))[:, None]
    rows = gl.arange(0, BLOCK_ROWS, gl.SliceLayout(0, layout))[None, :]
    places = (split * num_rows + rows) * OUTPUTS + outputs
    part = sums.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + places, part, rows < num_rows)
    if RANKS > 1:
        store_for_others(boxes_ptr, places, part, rows < num_rows, RANK, RANKS)
        signal_others(counters_ptr, RANK, RANKS)


def small_batch_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiling: Tiling,
    *,
    gated: bool = False,
    overlaps: bool = True,
    out: torch.Tensor | None = None,
    meeting: Meeting | None = None,
) -> torch.Tensor:
    """Multiplies up to `MAX_ROWS` rows with a weight matrix.

    Args:
        x: [rows, inputs], contiguous.
        weight: [outputs, inputs], contiguous, of x's 16-bit type; if gated, [2 * outputs, inputs], the gates first.
        tiling: from `tiling_for` for these sizes; a wide tiling for more than `FEW_ROWS` rows.
        gated: compute SiLU(x gates^T) * (x ups^T) instead of x weight^T.
        overlaps: the next kernel's programs start while this kernel runs; otherwise when it ends.
        out: contiguous tensor to write to instead of a new tensor.
        meeting: meeting at which the parts are also stored for the other ranks.

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
    steps = inputs // tiling.splits // tiling.inputs
    _small_batch_gemm_kernel[grid](
        _tiles(weight, tiling.outputs, tiling.inputs),
        _tiles(x, block_rows, tiling.inputs),
        out,
        boxes,
        counters,
        num_rows,
        OUTPUTS=outputs,
        STEPS=steps,
        STAGES=min(steps, tiling.num_stages(block_rows, gated)),
        STRIDE=STRIDE if 16 < block_rows <= FEW_ROWS else 0,
        GATED=gated,
        OVERLAPS=overlaps,
        RANK=rank.index,
        RANKS=rank.size,
        num_warps=4 if block_rows <= FEW_ROWS else 8,
        launch_pdl=True,
    )
    return out


def _tiles(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describes a matrix to the copy engine as tiles of this size, with zeros beyond the matrix's edges."""
    layout = gl.NVMMASharedLayout.get_default_for(
        [rows, columns], getattr(gl, str(matrix.dtype).removeprefix("torch."))
    )
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)
