"""Captured graphs on a CPU: an iteration's tensor operations, recorded once and replayed on the same memory.

As in a CUDA graph, everything that Python decides while recording is fixed: buffers, branches and numbers. So a mistake
in what a graph may depend on shows here as it does on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


class Graph(TorchDispatchMode):
    """Records the operations within a `with` block; called, computes them again, each from what those before it make now."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []  # while recording; they are kept, so that no other has the identity of one
        self._calls: list[tuple[Any, list[Any], Any, list[tuple[int, int]]]] = []
        """Operation, its arguments as a list, their structure, and which of them were made: (place, index into `_made`)."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a graph cannot read a number back"
        given, structure = tree_flatten((args, kwargs or {}))
        index = {id(tensor): number for number, tensor in enumerate(self._made)}
        earlier = [(place, index[id(part)]) for place, part in enumerate(given) if id(part) in index]
        self._calls.append((operation, given, structure, earlier))
        made = operation(*args, **(kwargs or {}))
        self._made += _tensors(made)
        return made

    def __call__(self) -> None:
        made: list[Tensor] = []
        for operation, given, structure, earlier in self._calls:
            now = given.copy()
            for place, number in earlier:
                now[place] = made[number]
            args, kwargs = tree_unflatten(now, structure)
            made += _tensors(operation(*args, **kwargs))


def _tensors(made: Any) -> list[Tensor]:
    return [part for part in (made if isinstance(made, tuple | list) else [made]) if isinstance(part, Tensor)]


class CpuGraphs:
    """Replays a stage's graph for each shape and slot; see `Iteration`. Every step must fit one of the shapes."""

    def __init__(
        self, eager: EagerIteration, slots: Sequence[StageSlot], cache: PagedCache, shapes: Sequence[Shape]
    ) -> None:
        self._eager, self._slots, self._cache = eager, slots, cache
        self._shapes = sorted(shapes)
        self.num_replayed = 0
        self.graphs: dict[tuple[Shape, int], Graph] = {}
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
    def _capture(self, shape: Shape, slot: StageSlot) -> Graph:
        work = self.work(shape)
        pack_dummies(shape, *self._cache.size, host_views(slot.host_array, shape))
        slot.upload(work)
        with Graph() as graph:
            self._eager(slot, work)
        return graph
