"""CUDA graphs of a stage's iterations: carry-over, layers and sampling in one launch per rank, for a few padded shapes.

The host takes longer to launch the several hundred kernels of a small iteration than the device takes to compute them. A graph
needs one launch. The shape of a graph is fixed, so a step is padded to the smallest captured shape that holds the step. A step that
no captured shape holds runs operation by operation and is counted.

Graphs never run at the same time, so they share a memory pool: the largest graph is captured first, and the others fit into its
memory. Graphs of few tokens have a separate pool. Inputs are views of the slot's buffer, so each shape is captured for each slot.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from cbatch.errors import CapacityError, ModelError
from cbatch.executor import Step
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Extents, Shape, Work, count_requests, host_views, most_drafts, pack_dummies
from cbatch.runtime.gpu.ranks import finish
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.slots import RankSlot, StageSlot

TOKENS_PER_CHUNK, MIN_CHUNKS = 32, 4  # a graph holds one chunk per 32 tokens, and at least 4 chunks

FEW_TOKENS = 4
"""Graphs of at most this many tokens have a separate memory pool. In the pool of mixed iterations the memory of small graphs is
scattered: a single decode of LLaMA-2-7B took 1.1% longer on an H200."""


class Captured(NamedTuple):
    """A rank's graph, and the tensor that receives its outputs (in the last stage, the logits)."""

    graph: torch.cuda.CUDAGraph
    outputs: torch.Tensor


class CaptureReport(NamedTuple):
    """The cost of capturing the graphs.

    seconds: total time, including warm-up. num_graphs: graphs per rank, over all shapes and slots.
    first_bytes, bytes: memory on the first rank's device for the first graph (largest shape, one slot), and for all graphs.
    """

    seconds: float
    num_graphs: int
    first_bytes: int
    bytes: int


def is_decode(shape: Shape) -> bool:
    """Returns whether a captured shape is for decode-only iterations, which have as many rows as tokens."""
    return shape.num_rows == shape.num_tokens


def max_chunks(shape: Shape) -> int:
    """Returns the most requests with several tokens that a captured shape can hold."""
    return min(max(shape.num_tokens // TOKENS_PER_CHUNK, MIN_CHUNKS), shape.num_rows)


class GraphedIteration:
    """Replays a captured graph if one fits the step; otherwise runs the step operation by operation. See `Iteration`.

    shapes: captured shapes that steps use, ascending.
    caches: one per rank. graphs: one graph per rank, by shape and slot.
    num_replayed, num_eager: iterations so far.
    """

    def __init__(
        self,
        eager: EagerIteration,
        slots: Sequence[StageSlot],
        streams: Sequence[torch.cuda.Stream],
        caches: Sequence[PagedCache],
        shapes: Sequence[Shape],
    ) -> None:
        """Captures every shape for every slot.

        Args:
            slots: the stage's part of each slot.
            streams: the compute stream of each rank.
            shapes: shapes with as many rows as tokens are for decode-only steps; the others are for mixed steps.

        Raises:
            CapacityError: the device does not have enough memory.
            ModelError: an operation cannot be captured.
        """
        self._eager, self._slots, self._streams = eager, slots, streams
        self._stream = streams[0]
        self.caches = caches
        self.graphs: dict[tuple[Shape, int], list[Captured]] = {}
        self.num_replayed = self.num_eager = 0
        self.report = self._capture_all(sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True))
        self.shapes = self._choose(sorted(shapes))

    def _choose(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """Returns the captured shapes that steps use, ascending."""
        return shapes

    def shape(self, step: Step) -> Shape:
        """Returns the smallest captured shape that holds the step, or the step's own shape if none does."""
        decode, num_drafts, num_requests = step.pad_to == len(step.rows), most_drafts(step), count_requests(step)
        num_chunks = 0 if decode else int((step.num_tokens > 1).sum())
        for shape in self.shapes:
            holds = shape.num_tokens >= step.pad_to and shape.num_drafts >= num_drafts
            holds &= shape.num_requests >= num_requests and max_chunks(shape) >= num_chunks
            if is_decode(shape) == decode and holds:
                return shape
        return self._eager.shape(step)

    @torch.inference_mode()
    def __call__(self, stage: StageSlot, work: Work) -> Iterator[None] | None:
        ranks = self.graphs.get((work.shape, stage.index))
        if ranks is None or work.bounds.max_chunks > max_chunks(work.shape):  # an unpadded step may have this shape
            self.num_eager += 1
            return self._eager.parts(stage, work)
        self.num_replayed += 1
        for rank in ranks:  # back to back, since the ranks wait for each other
            rank.graph.replay()
        if work.sampling and self._eager.is_last:
            self._eager.sample(stage, [rank.outputs for rank in ranks], work)
        return None

    def _capture_all(self, shapes: Sequence[Shape]) -> CaptureReport:
        begin = time.perf_counter()
        for shape in shapes:
            self._guard(shape, self._warm_up)
        torch.cuda.empty_cache()  # PyTorch cannot release memory unused since loading and warm-up during a capture
        pools = {few: torch.cuda.graph_pool_handle() for few in (True, False)}
        used = [self._used_bytes()]
        for shape in shapes:
            for slot in self._slots:
                pool = pools[shape.num_tokens <= FEW_TOKENS]
                self._guard(shape, partial(self._capture, slot=slot, pool=pool))
                used.append(self._used_bytes())
        seconds = time.perf_counter() - begin
        return CaptureReport(seconds, len(self.graphs), used[min(1, len(shapes))] - used[0], used[-1] - used[0])

    @torch.inference_mode()
    def _warm_up(self, shape: Shape) -> None:
        """Computes padding once, so that every kernel is compiled and loaded before the capture."""
        with self._current_streams():
            self._put_dummies(shape)
            self._eager(self._slots[0], self._work(shape))

    def _capture(self, shape: Shape, slot: StageSlot, pool: Any) -> None:
        self.graphs[shape, slot.index] = [
            self._capture_rank(index, shape, rank, pool) for index, rank in enumerate(slot.ranks)
        ]

    @torch.inference_mode()
    def _capture_rank(self, index: int, shape: Shape, rank: RankSlot, pool: Any) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._streams[index]):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = finish(self._eager.steps(index, rank, self._work(shape)))
            finally:
                graph.capture_end()
        return Captured(graph, outputs)

    @contextmanager
    def _current_streams(self) -> Iterator[None]:
        """Makes each rank's stream its GPU's current stream, and the first rank's GPU the current GPU."""
        with ExitStack() as current:
            for stream in reversed(self._streams):
                current.enter_context(torch.cuda.stream(stream))
            yield

    def _work(self, shape: Shape) -> Work:
        """Returns a work whose bounds hold for every iteration of this shape."""
        max_query_len = 1 if is_decode(shape) else shape.num_tokens
        bounds = Extents(max_query_len, shape.num_blocks * self.caches[0].size.block_size, max_chunks(shape))
        return Work(shape, bounds, sampling=False)

    def _guard(self, shape: Shape, operation: Callable[[Shape], None]) -> None:
        what = f"a CUDA graph of {shape.num_tokens} tokens and {shape.num_rows} requests"
        try:
            operation(shape)
        except torch.cuda.OutOfMemoryError as error:
            remedy = "lower kv_tokens or max_tokens, or set runtime.graphs=off"
            raise CapacityError(f"{what} does not fit beside the weights and the KV cache; {remedy}") from error
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{what} cannot be captured ({reason}); set runtime.graphs=off") from error

    def _used_bytes(self) -> int:
        """Returns the used device memory, read from the driver: PyTorch does not count all memory of graphs."""
        torch.cuda.synchronize(self._stream.device)
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return total - free

    def _put_dummies(self, shape: Shape) -> None:
        slot, size = self._slots[0], self.caches[0].size
        for stream in self._streams:
            stream.synchronize()
        pack_dummies(shape, size.num_blocks, size.block_size, host_views(slot.host_array, shape))
        slot.upload(self._work(shape))
