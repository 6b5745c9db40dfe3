"""Real tokens on a CPU: worker threads for streams, plain PyTorch for attention."""

from __future__ import annotations

import os

import torch

from cbatch.errors import CapacityError, ConfigError
from cbatch.model import ModelSpec
from cbatch.policy import Limits
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Shape
from cbatch.runtime.checks.races import checked
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.kv_cache import PagedCache
from cbatch.runtime.model import PagedModel
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams, ThreadStream
from cbatch.runtime.vocabulary import Vocabulary
from cbatch.runtime.weights import load_model


def build(
    spec: ModelSpec,
    limits: Limits,
    *,
    num_blocks: int,
    block_size: int,
    compiled: bool = False,
    poison: bool = False,
    races: bool = False,
) -> StreamExecutor:
    """An executor that computes `spec` on this machine's CPU.

    Args:
        num_blocks, block_size: the KV cache, in blocks and tokens a block.
        compiled: compile the model's layers by `torch.compile`; needs a C++ compiler.
        poison: fill buffers and cache with what must not be read, and report when it was.
        races: check that accesses to the same memory are in an order; see `races`.

    Raises:
        ModelError: the model cannot be built or loaded.
        ConfigError: requests may be longer than the model's positions.
        CapacityError: weights and KV cache exceed the machine's memory.
    """
    check_positions(spec, limits)
    _check_memory(spec, num_blocks * block_size)
    _leave_a_core_to_the_host()
    device = torch.device("cpu")
    vocabulary = Vocabulary(spec)
    cache = PagedCache(spec, num_blocks, block_size, device, poison=poison)
    model = PagedModel(load_model(spec, device), cache, ReferenceAttention(), compiled=compiled)
    streams = Streams(*map(ThreadStream, Streams._fields))
    return assemble(model, vocabulary, limits, checked(streams) if races else streams, poison=poison)


def assemble(
    model: PagedModel, vocabulary: Vocabulary, limits: Limits, streams: Streams | None = None, *, poison: bool = False
) -> StreamExecutor:
    """Put streams - threads, unless others are given - slots and a model on the CPU together."""
    if streams is None:
        streams = Streams(*map(ThreadStream, Streams._fields))
    largest = largest_shape(limits, model.cache.page_size)
    slots = [Slot(index, largest, torch.device("cpu"), streams, poison=poison) for index in range(2)]
    return StreamExecutor(streams, slots, EagerIteration(model, poison=poison), vocabulary)


def largest_shape(limits: Limits, page_size: int) -> Shape:
    """The largest iteration within the limits."""
    return Shape(limits.max_tokens, limits.max_batch, -(-limits.max_request_tokens // page_size))


def check_positions(spec: ModelSpec, limits: Limits) -> None:
    if limits.max_request_tokens > spec.max_positions:
        raise ConfigError(
            f"max_request_tokens={limits.max_request_tokens} exceeds the {spec.max_positions} positions of model "
            f"{spec.name}; lower it or choose another model"
        )


def _leave_a_core_to_the_host() -> None:
    """Let PyTorch use all cores but one: the host's thread plans while the compute stream's computes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(min(torch.get_num_threads(), max(cores - 1, 1)))


def _check_memory(spec: ModelSpec, kv_tokens: int) -> None:
    """Refuse what this machine can never hold, where the system says how much memory it has."""
    weights, cache = spec.weight_bytes, kv_tokens * spec.kv_bytes_per_token
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    if memory is not None and weights + cache > memory:
        raise CapacityError(
            f"model {spec.name} needs {weights / 1e9:.1f} GB for weights and {cache / 1e9:.1f} GB for the KV cache, "
            f"this machine has {memory / 1e9:.1f} GB; choose a smaller model (model=tiny) or lower kv_tokens"
        )
