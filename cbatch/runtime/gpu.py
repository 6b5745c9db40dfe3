"""Real tokens on a GPU: CUDA streams, the fused model, captured graphs, and the fastest attention at hand."""

from __future__ import annotations

import torch

from cbatch.errors import CapacityError, ConfigError
from cbatch.model import ModelSpec
from cbatch.policy import Limits
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
from cbatch.runtime.shapes import default_shapes
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams
from cbatch.runtime.vocabulary import Vocabulary
from cbatch.runtime.weights import load_model

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


def build(
    spec: ModelSpec,
    limits: Limits,
    *,
    num_blocks: int,
    block_size: int,
    graphs: str = "all",
    attention: str = "auto",
    fused: bool = True,
    compiled: bool = False,
    poison: bool = False,
    races: bool = False,
) -> GpuExecutor:
    """An executor that computes `spec` on the current GPU.

    Args:
        num_blocks, block_size: the KV cache, in blocks and tokens a block.
        graphs: iterations that replay a captured graph: "off", "decode" (those without prompts) or "all".
        attention: a name in `attention.choice.NAMES`, or "auto".
        fused: use the fused model where there is one; False: `transformers`' modules as they are.
        compiled: `transformers`' modules instead, compiled by `torch.compile`; comes before `fused`.
        poison: fill token buffers with what must not be read, and report when it was.
        races: check that accesses to the same memory are in an order; see `races`.

    Raises:
        ConfigError: there is no GPU, the attention does not fit, or requests may be longer than the model's positions.
        ModelError: the model cannot be built, loaded or captured.
        CapacityError: weights, KV cache and iterations exceed the GPU's memory.
    """
    device = _device()
    check_positions(spec, limits)
    check_memory(spec, limits, num_blocks * block_size, free_memory())
    choice = choose_attention(spec, block_size, device, attention)
    vocabulary = Vocabulary(spec)
    try:
        cache = PagedCache(spec, num_blocks, block_size, device)  # zeros: libraries multiply what they mask
        weights = load_model(spec, device)
        largest = _largest_shape(limits, block_size)
        model: Model = (
            FusedModel(
                weights,
                spec,
                cache,
                choice.attention,
                max_rows=limits.max_batch,
                max_positions=limits.max_request_tokens,
            )
            if fused and not compiled and can_fuse(spec)
            else PagedModel(weights, cache, choice.attention, compiled=compiled)
        )
        clock = CudaClock(device)
        compute = CudaStream(device, clock)
        streams = Streams(CudaStream(device, clock), compute, CudaStream(device, clock))
        streams = checked(streams) if races else streams
        slots = [Slot(index, largest, device, streams, poison=poison) for index in range(2)]
    except torch.cuda.OutOfMemoryError as error:
        raise CapacityError(
            f"model {spec.name} with a KV cache of {num_blocks * block_size} tokens exceeds the GPU's memory; "
            "lower kv_tokens"
        ) from error
    torch.cuda.synchronize()  # weights and cache were made on the default stream
    eager = EagerIteration(model, greedy=argmax, poison=poison)
    shapes = default_shapes(limits, block_size, graphs)
    iteration = GraphedIteration(eager, slots, compute.stream, cache, shapes)
    return GpuExecutor(streams, slots, iteration, vocabulary, str(choice))


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
    return Shape(max(limits.max_tokens, limits.max_batch), limits.max_batch, -(-limits.max_request_tokens // page_size))
