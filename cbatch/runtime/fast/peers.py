"""What leaves a stage of a pipeline: one kernel stores it in the memory of the next stage's GPU.

PyTorch's own copies between GPUs make both wait for each other by events, which a graph cannot capture. A store needs
peer access, which `devices.choose_devices` checks and switches on.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 1024


@triton.jit(do_not_specialize=["num_values"])
def _send_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,  # [SPLITS, values]
    values_ptr,  # [values]
    out_ptr,  # [values]
    num_values,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_values
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(values_ptr + place, inside)
    if SPLITS > 0:
        values = values.to(tl.float32)
    for split in tl.static_range(SPLITS):
        values += tl.load(parts_ptr + split * num_values.to(tl.int64) + place, inside).to(tl.float32)
    tl.store(out_ptr + place, values.to(out_ptr.dtype.element_ty), inside)


def send(
    values: torch.Tensor, out: torch.Tensor, *, parts: torch.Tensor | None = None, dependent: bool = False
) -> None:
    """Store values, or the sum of values and parts in float32, on the GPU that `out` is on.

    Args:
        values: contiguous, on this GPU.
        out: of the same shape, contiguous, of any type.
        parts: [splits, ...]; partial sums of a product, as in `fused_ops`.
    """
    _send_kernel[(triton.cdiv(values.numel(), BLOCK),)](
        values if parts is None else parts,
        values,
        out,
        values.numel(),
        SPLITS=0 if parts is None else len(parts),
        BLOCK=BLOCK,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
