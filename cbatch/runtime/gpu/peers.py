"""Sends the output of a pipeline stage: one kernel stores the output in the memory of the next stage's GPU.

PyTorch's copies between GPUs make both GPUs wait for each other by events, which a graph cannot capture. A store requires
peer access, which `devices.choose_devices` checks and switches on.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cbatch.runtime.gpu.exchange import COUNTS, Awaited, Meeting, add_parts, wait_for_others

BLOCK = 1024


@triton.jit(do_not_specialize=["num_signals"], do_not_specialize_on_alignment=COUNTS)
def _send_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [SPLITS, values]
    values_ptr,  # [values]
    out_ptr,  # [values]
    inbox_ptr,  # [RANKS - 1, box]
    arrived_ptr,  # [RANKS]
    base_ptr,  # [1]
    next_ptr,  # [1]
    num_values,  # specialized: if it is a multiple of 16, as usual, a thread stores 16 bytes at once
    box,
    num_signals,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if RANKS > 1:
        wait_for_others(arrived_ptr, base_ptr, next_ptr, num_signals, tl.program_id(0) == 0, RANK, RANKS)
    values = tl.load(values_ptr + place, inside)
    if SPLITS > 0:
        values = values.to(tl.float32)
    stride = tl.cast(num_values, tl.int64)  # num_values=1 is compiled as a constant
    values = add_parts(values, parts_ptr, inbox_ptr, stride, box, place, inside, SPLITS, RANK, RANKS)
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), inside)


def send(
    values: torch.Tensor,
    out: torch.Tensor,
    *,
    parts: torch.Tensor | None = None,
    dependent: bool = False,
    meeting: Meeting | None = None,
) -> None:
    """Stores values, or the float32 sum of values and parts, on the GPU of `out`.

    Args:
        values: contiguous, on this GPU.
        out: same shape, contiguous, any type.
        parts: [splits, ...]; partial sums of a product, as in `fused_ops`.
        meeting: as in `fused_ops.add_norm`.
    """
    awaited = Awaited.at(meeting, values)
    _send_kernel[(triton.cdiv(values.numel(), BLOCK),)](
        values if parts is None else parts,
        values,
        out,
        *awaited.tensors,
        values.numel(),
        awaited.box,
        awaited.num_signals,
        SPLITS=0 if parts is None else len(parts),
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        RANK=awaited.rank.index,
        RANKS=awaited.rank.size,
        num_warps=4,
        launch_pdl=dependent,
    )
