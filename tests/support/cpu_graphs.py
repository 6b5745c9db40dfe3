"""Captured graphs on a CPU: an iteration's tensor operations, recorded once and replayed on the same memory.

As in a CUDA graph, everything that Python decides while recording is fixed: buffers, branches and numbers. So a mistake
in what a graph may depend on shows here as it does on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention

from cbatch.executor import Step
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Bounds, Fields, Shape, Work, host_views, pack_dummies
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.slots import StageSlot


class FixedShapeAttention:
    """Paged attention that reads no length as a Python number, so that it can be captured: everything is masked."""

    name = "fixed shape"

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Fields[Tensor], bounds: Bounds, *, scaling: float
    ) -> Tensor:
        """See `Attention`. Each query sees its row's pages up to `bounds.max_context_len`, masked to its own position."""
        place = torch.arange(query.shape[0])
        row = torch.searchsorted(batch.query_starts[1:], place, right=True)  # [tokens]
        row = row.clamp(max=len(batch.context_lens) - 1)  # padding is in none
        length = batch.context_lens[row] - (
            batch.query_starts[row + 1] - 1 - place
        )  # keys that each query sees, [tokens]
        columns = -(-bounds.max_context_len // keys.shape[1])
        tables = batch.block_tables[:, :columns][row]  # [tokens, pages]
        own, other = (pages[tables].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
        seen = torch.arange(own.shape[2]) < length.clamp(min=1)[:, None]  # [tokens, keys]
        own, other = (part.masked_fill(~seen[:, None, :, None], 0) for part in (own, other))
        mask = seen[:, None, None]
        return scaled_dot_product_attention(query[:, :, None], own, other, mask, scale=scaling, enable_gqa=True)[
            :, :, 0
        ]


class CpuGraphs:
    """Replays a stage's graph for each shape and slot; see `Iteration`. Every step must fit one of the shapes."""

    def __init__(
        self, eager: EagerIteration, slots: Sequence[StageSlot], cache: PagedCache, shapes: Sequence[Shape]
    ) -> None:
        self._eager, self._slots, self._cache = eager, slots, cache
        self._shapes = sorted(shapes)
        self.num_replayed = 0
        self.graphs: dict[tuple[Shape, int], Callable[[], Any]] = {}
        self.capture()

    def shape(self, step: Step) -> Shape:
        return next(
            shape for shape in self._shapes if shape.num_tokens >= step.pad_to and shape.num_rows >= len(step.rows)
        )

    @torch.inference_mode()
    def __call__(self, stage: StageSlot, work: Work) -> None:
        self.num_replayed += 1
        self.graphs[work.shape, stage.index]()

    def capture(self) -> None:
        self.graphs = {
            (shape, slot.index): self._capture(shape, slot) for shape in self._shapes for slot in self._slots
        }

    def work(self, shape: Shape) -> Work:
        """The most that an iteration of this shape may be."""
        return Work(
            shape,
            Bounds(shape.num_tokens, shape.num_blocks * self._cache.size.block_size, shape.num_rows),
            sampling=False,
        )

    @torch.inference_mode()
    def _capture(self, shape: Shape, slot: StageSlot) -> Callable[[], Any]:
        work = self.work(shape)
        pack_dummies(shape, *self._cache.size, host_views(slot.host_array, shape))
        slot.upload(work).body()
        return make_fx(lambda: self._eager(slot, work))()
