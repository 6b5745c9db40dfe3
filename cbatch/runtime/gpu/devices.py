"""Chooses the GPUs of each pipeline stage's ranks, and makes their streams, events and clocks."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, pairwise, permutations
from typing import Any

import torch

from cbatch.errors import ConfigError
from cbatch.runtime.slots import Devices
from cbatch.runtime.streams import Operation, StreamError, Streams


def choose_devices(num_stages: int = 1, num_ranks: int = 1) -> list[list[torch.device]]:
    """Returns the GPUs of each stage's ranks, from the current GPU on, with peer access between GPUs that exchange data.

    Raises ConfigError: there are too few GPUs, or a GPU cannot access the memory of a GPU that it sends to.
    """
    check_number(num_stages, num_ranks)
    first, number = torch.cuda.current_device(), num_stages * num_ranks
    devices = [torch.device("cuda", first + place) for place in range(number)]
    stages = [devices[place : place + num_ranks] for place in range(0, number, num_ranks)]
    pairs = [pair for group in stages for pair in permutations(group, 2)]  # (writer, owner): every two ranks of a stage
    for group, following in pairwise([*stages, stages[0]] if num_stages > 1 else ()):  # each rank and its successor
        pairs += zip(group, following, strict=True)
    for here, there in pairs:
        connect(here, there, _settings(num_stages, num_ranks))
    return stages


def check_number(num_stages: int = 1, num_ranks: int = 1, num_replicas: int = 1) -> None:
    """Raises ConfigError if there are too few GPUs from the current GPU on."""
    if not torch.cuda.is_available():
        raise ConfigError("backend=cuda, but PyTorch finds no GPU; choose backend=cpu or backend=sim")
    number, available = num_stages * num_ranks * num_replicas, torch.cuda.device_count() - torch.cuda.current_device()
    if number > available:
        problem = f"{_settings(num_stages, num_ranks, num_replicas)} needs {number} GPUs, and PyTorch finds {available}"
        raise ConfigError(f"{problem}; lower it, or simulate the others with backend=sim")


def _settings(num_stages: int, num_ranks: int, num_replicas: int = 1) -> str:
    degrees = {"tensor_parallel": num_ranks, "pipeline_stages": num_stages, "replicas": num_replicas}
    return " ".join(f"backend.{key}={value}" for key, value in degrees.items() if value > 1)


def connect(here: torch.device, there: torch.device, settings: str) -> None:
    """Enables peer access between two GPUs, which PyTorch switches on at the first copy in each direction.

    settings: what needs it, for the ConfigError without NVLink.
    """
    if here == there:
        return
    if not torch.cuda.can_device_access_peer(here, there):
        problem = f"GPU {here.index} cannot access the memory of GPU {there.index}, which {settings} requires"
        remedy = "choose GPUs that NVLink connects by CUDA_VISIBLE_DEVICES (see `nvidia-smi topo -p2p w`)"
        raise ConfigError(f"{problem}; {remedy}, or fewer GPUs")
    ends = torch.zeros(1, device=here), torch.zeros(1, device=there)
    ends[1].copy_(ends[0])
    ends[0].copy_(ends[1])


def make_streams(stages: Devices) -> Streams:
    """Returns the streams of the stages on these GPUs; tokens are copied out from the first GPU."""
    clocks = {device: CudaClock(device) for device in chain(*stages)}
    groups = [*stages, *stages, stages[0][:1]]
    return Streams.of([CudaStream([clocks[device] for device in group]) for group in groups])


def synchronize(stages: Devices) -> None:
    for device in chain(*stages):
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU's memory, including bytes that PyTorch reserves but does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class CudaClock:
    """Converts the times of a device's events to the host's clock, using one moment that is known on both clocks.

    The moment is uncertain by the time that the host waits for it, so the shortest of several waits is used. Precision matters
    because bubbles are differences between the times of two devices.

    Durations are float32 milliseconds: exact to 8 microseconds in the first minute, to 0.25 ms in the first hour.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        stream = torch.cuda.Stream(device)
        moments = [_moment(stream) for _ in range(9)]
        _, self._host_time, self._origin = min(moments, key=lambda moment: moment[0])

    def time_of(self, event: torch.cuda.Event) -> float:
        """Returns when the event was reached, in seconds of `time.perf_counter`."""
        milliseconds: float = self._origin.elapsed_time(event)
        return self._host_time + milliseconds / 1e3


def _moment(stream: torch.cuda.Stream) -> tuple[float, float, torch.cuda.Event]:
    """Records an event. Returns the host's wait in seconds, the middle of the wait by `time.perf_counter`, and the event."""
    event = torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    event.record(stream)
    event.synchronize()
    end = time.perf_counter()
    return end - begin, (begin + end) / 2, event


class CudaEvent:
    """An event of `CudaStream`s: one CUDA event per GPU of a stream, reached when all of the CUDA events are."""

    def __init__(self, clocks: Sequence[CudaClock]) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in clocks]
        self._clocks = clocks

    def synchronize(self) -> None:
        try:
            for event in self.events:
                event.synchronize()
        except RuntimeError as error:
            raise StreamError(f"the device failed: {error}") from error

    def is_reached(self) -> bool:
        try:
            return all(event.query() for event in self.events)
        except RuntimeError:
            return True  # `synchronize` raises it

    def time(self) -> float:
        return max(clock.time_of(event) for clock, event in zip(self._clocks, self.events, strict=True))


class CudaStream:
    """A stream on each GPU of a tensor-parallel group, never the default stream; events and waits treat them as one stream.

    An operation enqueues kernels or copies on the current stream of each GPU, and returns. The kernels themselves wait for
    results that other GPUs compute in this operation or in the previous one.

    streams: one per GPU.
    """

    def __init__(self, clocks: Sequence[CudaClock]) -> None:
        self.streams = [torch.cuda.Stream(clock.device) for clock in clocks]
        self._clocks = clocks

    def event(self) -> CudaEvent:
        return CudaEvent(self._clocks)

    def run(self, operation: Operation) -> Any:
        with ExitStack() as current:
            for stream in reversed(self.streams):  # the first GPU becomes the current one
                current.enter_context(torch.cuda.stream(stream))
            return operation()

    def record(self, event: CudaEvent) -> None:
        for stream, part in zip(self.streams, event.events, strict=True):
            part.record(stream)

    def wait(self, event: CudaEvent) -> None:
        for stream in self.streams:
            for part in event.events:
                stream.wait_event(part)

    def close(self) -> None:
        for stream in self.streams:
            stream.synchronize()
