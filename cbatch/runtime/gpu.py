"""Real tokens on a GPU: CUDA streams, the fused model, captured graphs, and the fastest attention at hand."""

from __future__ import annotations

import torch

from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize, blocks_for
from cbatch.limits import Limits
from cbatch.model import ModelSpec
from cbatch.runtime.batch import Shape
from cbatch.runtime.checks.races import checked
from cbatch.runtime.cpu import check_positions
from cbatch.runtime.cuda_streams import CudaClock, CudaStream
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel, can_fuse
from cbatch.runtime.graphs import GraphedIteration
from cbatch.runtime.iteration import EagerIteration, Model
from cbatch.runtime.kv_cache import PagedCache
from cbatch.runtime.memory import check_memory, kv_tokens_that_fit
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import DEFAULT_OPTIONS, Options
from cbatch.runtime.shapes import default_shapes
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams
from cbatch.runtime.weights import load_model
from cbatch.vocabulary import Vocabulary

BLOCK_SIZE = 128
"""Tokens of a KV block by default: flash-attn-4's tile."""


class GpuExecutor(StreamExecutor):
    """A `StreamExecutor` on CUDA streams.

    attention: which kernels attend, and why not faster ones.
    iteration: tells how many iterations were replayed, and what the captures have cost.
    """

    def __init__(
        self, streams: Streams, slots: list[Slot], iteration: GraphedIteration, vocabulary: Vocabulary, attention: str
    ) -> None:
        super().__init__(streams, slots, iteration, vocabulary)
        self.attention = attention
        self.iteration = iteration


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = DEFAULT_OPTIONS) -> GpuExecutor:
    """An executor that computes `spec` on the current GPU.

    Args:
        kv: size of the KV cache.
        options: poison fills the token buffers only: attention libraries read masked keys and values.

    Raises:
        ConfigError: there is no GPU, the attention does not fit, or requests may be longer than the model's positions.
        ModelError: the model cannot be built, loaded or captured.
        CapacityError: weights, KV cache and iterations exceed the GPU's memory.
    """
    device, poison = _device(), options.check == "poison"
    check_positions(spec, limits)
    check_memory(spec, limits, kv.num_tokens, free_memory())
    choice = choose_attention(spec, kv.block_size, device, options.attention)
    vocabulary = Vocabulary(spec)
    try:
        cache = PagedCache(spec, kv, device)  # zeros: libraries multiply what they mask
        weights = load_model(spec, device)
        largest = _largest_shape(limits, kv.block_size)
        model: Model = (
            FusedModel(
                weights,
                spec,
                cache,
                choice.attention,
                max_rows=limits.max_batch,
                max_positions=limits.max_request_tokens,
            )
            if options.fused and not options.compiled and can_fuse(spec)
            else PagedModel(weights, cache, choice.attention, compiled=options.compiled)
        )
        clock = CudaClock(device)
        compute = CudaStream(device, clock)
        streams = Streams(CudaStream(device, clock), compute, CudaStream(device, clock))
        streams = checked(streams) if options.check == "races" else streams
        slots = [Slot(index, largest, device, streams, poison=poison) for index in range(2)]
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"model {spec.name} with a KV cache of {kv.num_tokens} tokens exceeds the GPU's memory; lower kv_tokens"
        ) from error
    torch.cuda.synchronize()  # weights and cache were made on the default stream
    eager = EagerIteration(model, greedy=argmax, poison=poison)
    shapes = default_shapes(limits, kv.block_size, options.graphs)
    iteration = GraphedIteration(eager, slots, compute.stream, cache, shapes)
    executor = GpuExecutor(streams, slots, iteration, vocabulary, str(choice))
    executor.times_copies = options.times_copies
    return executor


def free_memory() -> int:
    """Bytes of the current GPU's memory that are free, those that PyTorch holds unused among them."""
    device = _device()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_tokens_beside(spec: ModelSpec, limits: Limits) -> int:
    """Tokens of KV cache for which the current GPU has room beside the model; 0 or below if there is none."""
    return kv_tokens_that_fit(spec, limits, free_memory())


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("backend=cuda, but PyTorch finds no GPU; choose backend=cpu or backend=sim")
    return torch.device("cuda", torch.cuda.current_device())


def _largest_shape(limits: Limits, page_size: int) -> Shape:
    """The largest iteration within the limits, or of decodes alone."""
    pages = blocks_for(limits.max_request_tokens, page_size)
    return Shape(max(limits.max_tokens, limits.max_batch), limits.max_batch, pages)
