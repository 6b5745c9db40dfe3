"""GPUs: which ones the stages of a pipeline run on, and their streams, events and clocks."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from cbatch.errors import ConfigError
from cbatch.runtime.streams import Operation, StreamError, Streams


def choose_devices(num_stages: int = 1) -> list[torch.device]:
    """The GPUs of a pipeline's stages, from the current one on, with peer access between those that exchange data.

    Raises:
        ConfigError: there are fewer GPUs, or a stage's GPU cannot access the memory of the next one's.
    """
    if not torch.cuda.is_available():
        raise ConfigError("backend=cuda, but PyTorch finds no GPU; choose backend=cpu or backend=sim")
    first, found = torch.cuda.current_device(), torch.cuda.device_count()
    if first + num_stages > found:
        problem = f"backend.pipeline_stages={num_stages} needs a GPU per stage, and PyTorch finds {found - first}"
        raise ConfigError(f"{problem}; lower it, or simulate the others with backend=sim")
    devices = [torch.device("cuda", first + stage) for stage in range(num_stages)]
    if num_stages > 1:
        for here, there in pairwise([*devices, devices[0]]):
            _connect(here, there)
    return devices


def _connect(here: torch.device, there: torch.device) -> None:
    """Let kernels of one GPU store in another's memory: PyTorch switches peer access on at the first copy."""
    if not torch.cuda.can_device_access_peer(here, there):
        problem = f"GPU {here.index} cannot access the memory of GPU {there.index}, as pipeline stages need"
        remedy = "choose GPUs that NVLink connects by CUDA_VISIBLE_DEVICES (see `nvidia-smi topo -p2p w`)"
        raise ConfigError(f"{problem}; {remedy}, or backend.pipeline_stages=1")
    ends = torch.zeros(1, device=here), torch.zeros(1, device=there)
    ends[1].copy_(ends[0])
    ends[0].copy_(ends[1])


def make_streams(devices: Sequence[torch.device]) -> Streams:
    """The streams of the stages on these GPUs; tokens are copied out of the first one."""
    clocks = {device: CudaClock(device) for device in devices}
    return Streams.of([CudaStream(device, clocks[device]) for device in [*devices, *devices, devices[0]]])


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU's memory, those that PyTorch holds unused included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
