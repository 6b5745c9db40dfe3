"""Real tokens on a CPU: worker threads for streams, plain PyTorch for attention."""

from __future__ import annotations

import os

import torch

from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize, blocks_for
from cbatch.limits import Limits
from cbatch.model import ModelSpec
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Shape
from cbatch.runtime.checks.races import checked
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.iteration import EagerIteration
from cbatch.runtime.kv_cache import PagedCache
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import DEFAULT_OPTIONS, Options
from cbatch.runtime.slots import Slot
from cbatch.runtime.streams import Streams, ThreadStream
from cbatch.runtime.weights import load_model
from cbatch.vocabulary import Vocabulary


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = DEFAULT_OPTIONS) -> StreamExecutor:
    """An executor that computes `spec` on this machine's CPU.

    Args:
        kv: size of the KV cache.
        options: `compiled` needs a C++ compiler.

    Raises:
        ModelError: the model cannot be built or loaded.
        ConfigError: requests may be longer than the model's positions.
        CapacityError: weights and KV cache exceed the machine's memory.
    """
    check_positions(spec, limits)
    _check_memory(spec, kv.num_tokens)
    _leave_a_core_to_the_host()
    device, poison = torch.device("cpu"), options.check == "poison"
    vocabulary = Vocabulary(spec)
    cache = PagedCache(spec, kv, device, poison=poison)
    model = PagedModel(load_model(spec, device), cache, ReferenceAttention(), compiled=options.compiled)
    streams = Streams(*map(ThreadStream, Streams._fields))
    if options.check == "races":
        streams = checked(streams)
    executor = assemble(model, vocabulary, limits, streams, poison=poison)
    executor.times_copies = options.times_copies
    return executor


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
    return Shape(limits.max_tokens, limits.max_batch, blocks_for(limits.max_request_tokens, page_size))


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
