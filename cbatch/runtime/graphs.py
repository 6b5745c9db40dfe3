"""CUDA graphs of whole iterations: carry-over, model and sampling in one launch, for a handful of padded shapes.

A small iteration of several hundred kernels takes the host longer to launch than the device to compute; a graph is one
launch. Its shape is fixed, so a step is padded up to the nearest captured one (`shapes`). A step that fits none runs
operation by operation and is counted; so does a large one that padding would cost more than its launches.

All graphs share one pool of memory for what they compute between inputs and tokens: they never run at the same time, and
captured largest first, each of the others fits into what the first has taken. Inputs are views of the slot's buffer, so
each shape is captured once for each slot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cbatch.errors import CapacityError, ModelError
from cbatch.executor import Step
from cbatch.runtime.batch import Bounds, Shape, host_views, pack_dummies
from cbatch.runtime.iteration import EagerIteration, Work
from cbatch.runtime.kv_cache import PagedCache
from cbatch.runtime.shapes import fitting, least_tokens, max_chunks, without_slow
from cbatch.runtime.slots import Slot


class Captured(NamedTuple):
    """A graph, and where it leaves the logits, [rows, vocabulary]."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class CaptureReport(NamedTuple):
    """What the captures have cost.

    seconds: in all, warm-up counted.
    num_graphs: of all shapes and slots.
    first_bytes: device memory that the first graph - the largest shape, one slot - has taken.
    bytes: device memory that all graphs have taken.
    """

    seconds: float
    num_graphs: int
    first_bytes: int
    bytes: int


class GraphedIteration:
    """Replays a captured graph where a step fits one, and runs the others operation by operation. See `Iteration`.

    report: what the captures have cost.
    cache: that the model reads and writes.
    graphs: by shape and slot.
    num_replayed, num_eager: iterations so far.
    """

    def __init__(
        self,
        eager: EagerIteration,
        slots: Sequence[Slot],
        stream: torch.cuda.Stream,
        cache: PagedCache,
        shapes: Sequence[Shape],
    ) -> None:
        """Capture every shape for every slot.

        Args:
            stream: that iterations are computed on.
            cache: that the model reads and writes.
            shapes: shapes with as many rows as tokens are for decodes alone, the others for any step; see `shapes.default_shapes`.

        Raises:
            CapacityError: the device's memory does not suffice.
            ModelError: an operation cannot be captured.
        """
        self._eager = eager
        self._slots = slots
        self._stream = stream
        self.cache = cache
        self.graphs: dict[tuple[Shape, int], Captured] = {}
        self.num_replayed = 0
        self.num_eager = 0
        self.report = self._capture_all(sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True))
        self._decodes = {shape: 1 for shape in sorted(shapes) if shape.num_rows == shape.num_tokens}
        self._mixed = self._measured(sorted(shape for shape in shapes if shape.num_rows != shape.num_tokens))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Fewest and most tokens of the steps with prompts that each captured shape takes, ascending."""
        sizes = [0, *(shape.num_tokens for shape in self._mixed)]
        fewest = [max(least, below + 1) for least, below in zip(self._mixed.values(), sizes, strict=False)]
        return tuple(zip(fewest, sizes[1:], strict=True))

    def shape(self, step: Step) -> Shape:
        """The smallest captured shape that holds the step and is worth its padding, else the step's own."""
        if step.pad_to == len(step.rows):
            found = fitting(self._decodes, step.pad_to, num_chunks=0)
        else:
            found = fitting(self._mixed, step.pad_to, int((step.num_tokens > 1).sum()))
        return found or self._eager.shape(step)

    @torch.inference_mode()
    def __call__(self, slot: Slot, previous: torch.Tensor, work: Work) -> None:
        captured = self.graphs.get((work.shape, slot.index))
        if captured is None or work.bounds.max_chunks > max_chunks(work.shape):  # a step's own shape may be one of ours
            self.num_eager += 1
            self._eager(slot, previous, work)
            return
        self.num_replayed += 1
        captured.graph.replay()
        if work.sampling:
            self._eager.sample(slot, captured.logits, work)

    def _capture_all(self, shapes: Sequence[Shape]) -> CaptureReport:
        begin = time.perf_counter()
        for shape in shapes:
            self._guard(shape, self._warm_up)
        pool = torch.cuda.graph_pool_handle()
        used = [self._used_bytes()]
        for shape in shapes:
            for slot in self._slots:
                self._guard(shape, lambda shape, slot=slot: self._capture(shape, slot, pool))  # type: ignore[misc]
                used.append(self._used_bytes())
        seconds = time.perf_counter() - begin
        return CaptureReport(seconds, len(self.graphs), used[min(1, len(shapes))] - used[0], used[-1] - used[0])

    @torch.inference_mode()
    def _warm_up(self, shape: Shape) -> None:
        """Compute padding once, so that every kernel is compiled and loaded: a capture must do neither."""
        with torch.cuda.stream(self._stream):
            self._put_dummies(shape)
            self._eager(self._slots[0], self._slots[1].sampled, self._work(shape))

    @torch.inference_mode()
    def _capture(self, shape: Shape, slot: Slot, pool: Any) -> None:
        graph, work = torch.cuda.CUDAGraph(), self._work(shape)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                logits = self._eager.logits(slot, self._slots[slot.index - 1].sampled, work)
                self._eager.sample(slot, logits, work)
            finally:
                graph.capture_end()
        self.graphs[shape, slot.index] = Captured(graph, logits)

    def _work(self, shape: Shape) -> Work:
        """The most that an iteration of this shape may be."""
        max_query_len = 1 if shape.num_rows == shape.num_tokens else shape.num_tokens
        bounds = Bounds(max_query_len, shape.num_blocks * self.cache.page_size, max_chunks(shape))
        return Work(shape, bounds, sampling=False)

    def _guard(self, shape: Shape, operation: Callable[[Shape], None]) -> None:
        what = f"a CUDA graph of {shape.num_tokens} tokens and {shape.num_rows} requests"
        try:
            operation(shape)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(
                f"{what} does not fit beside the weights and the KV cache; lower kv_tokens or max_tokens, "
                "or set runtime.graphs=off"
            ) from error
        except RuntimeError as error:
            raise ModelError(
                f"{what} cannot be captured ({' '.join(str(error).split())}); set runtime.graphs=off"
            ) from error

    def _used_bytes(self) -> int:
        """Device memory in use by anyone, from the driver: graphs take some that PyTorch does not see."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return total - free

    def _measured(self, shapes: Sequence[Shape]) -> dict[Shape, int]:
        """The mixed shapes that are worth it, ascending, each with the fewest tokens of the steps that it takes."""
        if not shapes:
            return {}
        seconds = without_slow({shape: self._replay_seconds(shape) for shape in shapes})
        return least_tokens(seconds, self._launch_seconds(shapes[-1]))

    def _replay_seconds(self, shape: Shape) -> float:
        """The shorter of two replays on padding."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            self._put_dummies(shape)
            for _ in range(2):
                begin.record()
                self.graphs[shape, 0].graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    @torch.inference_mode()
    def _launch_seconds(self, shape: Shape) -> float:
        """Host time of an iteration that runs operation by operation; the shortest of three."""
        times: list[float] = []
        with torch.cuda.stream(self._stream):
            self._put_dummies(shape)
            for _ in range(3):
                self._stream.synchronize()
                begin = time.perf_counter()
                self._eager(self._slots[0], self._slots[1].sampled, self._work(shape))
                times.append(time.perf_counter() - begin)
            self._stream.synchronize()  # the slot's buffers are the host's again
        return min(times)

    def _put_dummies(self, shape: Shape) -> None:
        """Inputs of the first slot that are padding alone."""
        slot, cache = self._slots[0], self.cache
        self._stream.synchronize()
        pack_dummies(shape, cache.keys.shape[1] - 1, cache.page_size, host_views(slot.host_array, shape))
        slot.upload(shape.size)
