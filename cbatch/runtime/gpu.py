"""Real tokens on a GPU: CUDA streams, the fused model, captured graphs, and the fastest attention that fits."""

import time
from typing import Any

import torch

from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.limits import Limits
from cbatch.model import ModelSpec
from cbatch.runtime.attention import Attention, PagedCache
from cbatch.runtime.checks.poison import PoisonedIteration, poison_slots
from cbatch.runtime.checks.races import checked
from cbatch.runtime.cpu import check_positions
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.fast.argmax import argmax
from cbatch.runtime.fast.attention.choice import choose_attention
from cbatch.runtime.fast.fused_model import FusedModel, can_fuse
from cbatch.runtime.fast.graph_shapes import MeasuredGraphs, default_shapes
from cbatch.runtime.iteration import EagerIteration, Model
from cbatch.runtime.memory import check_memory, kv_tokens_that_fit
from cbatch.runtime.model import PagedModel
from cbatch.runtime.options import Options
from cbatch.runtime.slots import Slot, make_slots
from cbatch.runtime.streams import Operation, StreamError, Streams
from cbatch.runtime.weights import load_model
from cbatch.vocabulary import Vocabulary

BLOCK_SIZE = 128
"""Default tokens of a KV block: flash-attn-4's tile."""


class CudaClock:
    """Converts the times of a device's events to the host's clock, from one moment known on both.

    Distances are float32 milliseconds: exact to 8 microseconds in the first minute, to 0.25 ms in the first hour.
    """

    def __init__(self, device: torch.device) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.Stream(device))
        self._origin.synchronize()
        self._host_time = time.perf_counter()

    def time_of(self, event: torch.cuda.Event) -> float:
        """Seconds of `time.perf_counter` at which the event was reached."""
        milliseconds: float = self._origin.elapsed_time(event)
        return self._host_time + milliseconds / 1e3


class CudaEvent:
    """An event of `CudaStream`s."""

    def __init__(self, clock: CudaClock) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self._clock = clock

    def synchronize(self) -> None:
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise StreamError(f"the device failed: {error}") from error

    def time(self) -> float:
        return self._clock.time_of(self.event)


class CudaStream:
    """A stream of a GPU, never the default one. The body of an operation enqueues kernels or copies and returns."""

    def __init__(self, device: torch.device, clock: CudaClock) -> None:
        self.stream = torch.cuda.Stream(device)
        self._clock = clock

    def event(self) -> CudaEvent:
        return CudaEvent(self._clock)

    def run(self, operation: Operation[Any]) -> None:
        with torch.cuda.stream(self.stream):
            operation.body()

    def record(self, event: CudaEvent) -> None:
        event.event.record(self.stream)

    def wait(self, event: CudaEvent) -> None:
        self.stream.wait_event(event.event)

    def close(self) -> None:
        self.stream.synchronize()


class GpuExecutor(StreamExecutor):
    """A `StreamExecutor` on CUDA streams.

    attention: the attention kernels in use, and why no faster ones.
    iteration: has the number of replayed iterations and the cost of the captures.
    """

    def __init__(
        self, streams: Streams, slots: list[Slot], iteration: MeasuredGraphs, vocabulary: Vocabulary, attention: str
    ) -> None:
        super().__init__(streams, slots, iteration, vocabulary)
        self.attention = attention
        self.iteration = iteration


def build(spec: ModelSpec, limits: Limits, kv: KVSize, options: Options = Options()) -> GpuExecutor:
    """Return an executor that computes `spec` on the current GPU.

    Poison fills the token buffers only: attention libraries multiply masked keys and values, so these must be finite.

    Raises:
        ConfigError: there is no GPU, the attention does not fit, or requests may be longer than the model's positions.
        ModelError: the model cannot be built, loaded or captured.
        CapacityError: weights, KV cache and iterations exceed the GPU's memory.
    """
    device = _device()
    check_positions(spec, limits)
    check_memory(spec, limits, kv.num_tokens, free_memory())
    choice = choose_attention(spec, kv.block_size, device, options.attention)
    vocabulary = Vocabulary(spec)
    try:
        cache = PagedCache(spec, kv, device)
        model = _load(spec, limits, cache, choice.attention, options)
        clock = CudaClock(device)
        compute = CudaStream(device, clock)
        streams = Streams(CudaStream(device, clock), compute, CudaStream(device, clock))
        if options.check == "races":
            streams = checked(streams)
        slots = make_slots(limits, kv.block_size, device, streams)
    except torch.cuda.OutOfMemoryError as error:
        need = f"model {spec.name} with a KV cache of {kv.num_tokens} tokens"
        raise CapacityError(f"{need} exceeds the GPU's memory; lower kv_tokens") from error
    eager = EagerIteration(model, greedy=argmax)
    if options.check == "poison":
        poison_slots(slots)
        eager = PoisonedIteration(model, greedy=argmax)
    torch.cuda.synchronize()  # weights, cache and slots were filled on the default stream
    shapes = default_shapes(limits, kv.block_size, options.graphs)
    iteration = MeasuredGraphs(eager, slots, compute.stream, cache, shapes)
    executor = GpuExecutor(streams, slots, iteration, vocabulary, str(choice))
    executor.times_copies = options.times_copies
    return executor


def free_memory() -> int:
    """Free bytes of the current GPU's memory, those that PyTorch holds unused included."""
    device = _device()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def kv_tokens_beside(spec: ModelSpec, limits: Limits) -> int:
    """Tokens of KV cache that fit on the current GPU beside the model. Raises CapacityError if not even one does."""
    return kv_tokens_that_fit(spec, limits, free_memory())


def _load(spec: ModelSpec, limits: Limits, cache: PagedCache, attention: Attention, options: Options) -> Model:
    """The fused model if the options and the model's family allow, else `transformers`' modules."""
    weights = load_model(spec, cache.keys.device)
    if options.fused and not options.compiled and can_fuse(spec):
        rows, positions = limits.max_batch, limits.max_request_tokens
        return FusedModel(weights, spec, cache, attention, max_rows=rows, max_positions=positions)
    return PagedModel(weights, cache, attention, compiled=options.compiled)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("backend=cuda, but PyTorch finds no GPU; choose backend=cpu or backend=sim")
    return torch.device("cuda", torch.cuda.current_device())
