"""Real tokens on a GPU: CUDA streams, the fused model, captured graphs, and the fastest attention that fits."""

from collections.abc import Sequence
from typing import cast

import torch

from cbatch.errors import CapacityError
from cbatch.kv import KVSize
from cbatch.limits import Limits
from cbatch.model import Layers, ModelSpec, split_layers
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.checks.poison import PoisonedIteration, poison_slots
from cbatch.runtime.checks.races import checked
from cbatch.runtime.cpu import check_positions
from cbatch.runtime.devices import CudaStream, choose_devices, free_memory, make_streams, synchronize
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.choice import Choice, choose_attention
from cbatch.runtime.fast.fused_model import FusedModel, can_fuse
from cbatch.runtime.fast.graph_shapes import MeasuredGraphs, default_shapes
from cbatch.runtime.fast.peers import send
from cbatch.runtime.iteration import EagerIteration, Send, copy
from cbatch.runtime.memory import check_memory, kv_tokens_that_fit
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import Options
from cbatch.runtime.slots import Slot, make_slots
from cbatch.runtime.streams import Streams
from cbatch.runtime.weights import load_model, move_stages
from cbatch.vocabulary import Vocabulary

BLOCK_SIZE = 128
"""Default tokens of a KV block: flash-attn-4's tile."""


class GpuExecutor(StreamExecutor):
    """A `StreamExecutor` on CUDA streams.

    attention: the attention kernels in use, and why no faster ones.
    iteration: of the first stage; has the number of replayed iterations and the cost of the captures.
    """

    def __init__(
        self,
        streams: Streams,
        slots: list[Slot],
        iterations: list[MeasuredGraphs],
        vocabulary: Vocabulary,
        attention: str,
    ) -> None:
        super().__init__(streams, slots, iterations, vocabulary)
        self.attention = attention
        self.iteration = iterations[0]


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = Options()) -> GpuExecutor:
    """Return an executor that computes `spec` on the current GPU, and on those after it if there are several stages.

    Poison fills the token buffers only: attention libraries multiply masked keys and values, so these must be finite.

    Raises:
        ConfigError: GPUs are missing or not connected, the attention does not fit, more stages than layers, or requests
            may be longer than the model's positions.
        ModelError: the model cannot be built, loaded or captured.
        CapacityError: weights, KV cache and iterations exceed a GPU's memory.
    """
    check_fits(spec, limits, kv, options.layers)
    devices = choose_devices(limits.num_stages)
    layers = split_layers(spec, limits.num_stages, options.layers)
    choices = [choose_attention(spec, kv.block_size, device, options.attention) for device in devices]
    vocabulary = Vocabulary(spec)
    try:
        models = _load(spec, limits, kv, layers, devices, choices, options)
        streams = make_streams(devices)
        compute = streams.compute
        if options.check == "races":
            streams = checked(streams)
        slots = make_slots(limits, kv.block_size, devices, streams, spec.hidden_size)
    except torch.cuda.OutOfMemoryError as error:
        need = f"model {spec.name} with a KV cache of {kv.num_tokens} tokens"
        raise CapacityError(f"{need} exceeds the GPU's memory; lower kv_tokens") from error
    make = EagerIteration
    if options.check == "poison":
        poison_slots(slots)
        make = PoisonedIteration
    synchronize(devices)  # weights, cache and slots were filled on the default streams
    shapes = default_shapes(limits, kv.block_size, options.graphs)
    iterations = [
        MeasuredGraphs(
            make(model, greedy=argmax, send=_sender(devices)),
            [slot.stages[stage] for slot in slots],
            cast(CudaStream, stream).stream,
            model.cache,
            shapes,
        )
        for stage, (model, stream) in enumerate(zip(models, compute, strict=True))
    ]
    executor = GpuExecutor(streams, slots, iterations, vocabulary, str(choices[0]))
    executor.times_copies = options.times_copies
    return executor


def check_fits(spec: ModelSpec, limits: Limits, kv: KVSize, sizes: Sequence[int] | None = None) -> None:
    """Raises ConfigError or CapacityError if `build` would, before weights are loaded. sizes: see `kv_tokens_beside`."""
    devices = choose_devices(limits.num_stages)
    check_positions(spec, limits)
    layers = split_layers(spec, limits.num_stages, sizes)
    check_memory(spec, limits, kv.num_tokens, layers, [free_memory(device) for device in devices])


def kv_tokens_beside(spec: ModelSpec, limits: Limits, sizes: Sequence[int] | None = None) -> int:
    """Tokens of KV cache that fit on the GPUs beside the model. Raises CapacityError if not even one does.

    sizes: number of layers of each stage; None: equal.
    """
    devices = choose_devices(limits.num_stages)
    layers = split_layers(spec, limits.num_stages, sizes)
    return kv_tokens_that_fit(spec, limits, layers, [free_memory(device) for device in devices])


def _sender(devices: Sequence[torch.device]) -> Send:
    return send if len(devices) > 1 else copy


def _load(
    spec: ModelSpec,
    limits: Limits,
    kv: KVSize,
    layers: Sequence[Layers],
    devices: Sequence[torch.device],
    choices: Sequence[Choice],
    options: Options,
) -> list[FusedModel | PagedModel]:
    """Each stage's model: the fused one if the options and the family allow, else `transformers`' modules."""
    weights = load_model(spec, devices[0] if spec.path is None else torch.device("cpu"))
    move_stages(weights, layers, devices)
    fused = options.fused and not options.compiled and can_fuse(spec)
    rows, positions = limits.max_batch, limits.max_request_tokens
    models: list[FusedModel | PagedModel] = []
    for part, device, choice in zip(layers, devices, choices, strict=True):
        cache, attention = PagedCache(spec, kv, device, part), choice.attention
        models.append(
            FusedModel(weights, spec, cache, attention, max_rows=rows, max_positions=positions)
            if fused
            else PagedModel(weights, cache, attention, compiled=options.compiled, send=_sender(devices))
        )
    return models
