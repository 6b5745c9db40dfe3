"""CUDA graphs of whole iterations: carry-over, model and sampling in one launch, for a handful of padded shapes.

An iteration of two hundred kernels takes the host longer to launch than the device to compute; a graph is one launch. Its
shape is fixed, so a step is padded up to the nearest captured one with dummy requests, and a step that fits none runs
operation by operation and is counted.

All graphs share one pool of memory for what they compute between inputs and tokens: they never run at the same time, and
captured largest first, each of the others fits into what the first has taken. Inputs are views of the slot's buffer, so
each shape is captured once for each slot.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cbatch.errors import CapacityError, ModelError
from cbatch.executor import Step
from cbatch.policy import Limits
from cbatch.runtime.batch import Shape, host_views, pack_dummies
from cbatch.runtime.iteration import EagerIteration, Work
from cbatch.runtime.kv_cache import PagedCache
from cbatch.runtime.slots import Slot

SLOWER = 1.03
"""A shape this much slower than a larger one is left out: the larger one takes its steps."""


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
            shapes: shapes with as many rows as tokens are for decodes alone, the others for any step; see `default_shapes`.

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
        self._decodes = sorted(shape for shape in shapes if shape.num_rows == shape.num_tokens)
        self._mixed = self._without_slow(sorted(shape for shape in shapes if shape.num_rows != shape.num_tokens))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the captured shapes that take any step, ascending."""
        return tuple(shape.num_tokens for shape in self._mixed)

    def shape(self, step: Step) -> Shape:
        """The smallest captured shape that holds the step, else the step's own."""
        decodes_only = step.pad_to == len(step.rows)
        fitting = self._decodes if decodes_only else self._mixed
        place = bisect_left(fitting, step.pad_to, key=lambda shape: shape.num_tokens)
        return fitting[place] if place < len(fitting) else self._eager.shape(step)

    @torch.inference_mode()
    def __call__(self, slot: Slot, previous: torch.Tensor, work: Work) -> None:
        captured = self.graphs.get((work.shape, slot.index))
        if captured is None:
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
        return Work(shape, max_query_len, shape.num_blocks * self.cache.page_size, sampling=False)

    def _guard(self, shape: Shape, operation: Callable[[Shape], None]) -> None:
        what = f"a CUDA graph of {shape.num_tokens} tokens and {shape.num_rows} requests"
        try:
            operation(shape)
        except torch.cuda.OutOfMemoryError as error:
            raise CapacityError(f"{what} does not fit beside the weights and the KV cache; lower kv_tokens or max_tokens, "
                                "or set runtime.graphs=off") from error  # fmt: skip
        except RuntimeError as error:
            raise ModelError(
                f"{what} cannot be captured ({' '.join(str(error).split())}); set runtime.graphs=off"
            ) from error

    def _used_bytes(self) -> int:
        """Device memory in use by anyone, from the driver: graphs take some that PyTorch does not see."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return total - free

    def _without_slow(self, shapes: list[Shape]) -> list[Shape]:
        """Leave out shapes that take longer than a larger one: matrix products of some sizes are slow (see `bench tiles`)."""
        kept: list[Shape] = []
        fastest = float("inf")
        for shape in reversed(shapes):
            seconds = self._replay_seconds(shape)
            if seconds < SLOWER * fastest:
                kept.insert(0, shape)
                fastest = min(fastest, seconds)
        return kept

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

    def _put_dummies(self, shape: Shape) -> None:
        """Inputs of the first slot that are padding alone."""
        slot, cache = self._slots[0], self.cache
        self._stream.synchronize()
        pack_dummies(shape, cache.keys.shape[1] - 1, cache.page_size, host_views(slot.host_array, shape))
        slot.upload(shape.size)


def default_shapes(limits: Limits, page_size: int, which: str) -> list[Shape]:
    """The shapes to capture: decodes up to the whole batch, and mixed iterations up to a few tiles.

    Args:
        which: "off", "decode" or "all".
    """
    width = -(-limits.max_request_tokens // page_size)
    if which == "off":
        return []
    shapes = [Shape(rows, rows, width) for rows in decode_sizes(limits.max_batch)]
    if which == "all":
        rows = limits.max_batch + 1
        shapes += [Shape(size, rows + (rows == size), width) for size in mixed_sizes(limits)]
    return shapes


def decode_sizes(max_batch: int) -> list[int]:
    """Batches of decodes: 1, powers of two from 4 on, and the largest; products of few rows take as long for any number."""
    sizes = [1, *(2**power for power in range(2, max_batch.bit_length()))]
    return [*(size for size in sizes if size < max_batch), max_batch]


def mixed_sizes(limits: Limits) -> list[int]:
    """Tokens of mixed iterations: `limits.graph_sizes`, or half tiles from one to two, whole ones up to four, then fewer.

    Each graph takes about 1 MiB of the device's memory, whatever its size. A full batch with a chunk beside its decodes has
    more tokens than requests, so smaller sizes are left out.
    """
    if limits.graph_sizes:
        return [size for size in limits.graph_sizes if size <= limits.max_tokens]
    sizes = [int(max(limits.tile, 16) * number) for number in (1, 1.5, 2, 3, 4, 6, 8, 16)]
    return [size for size in sizes if limits.max_batch < size <= limits.max_tokens]
