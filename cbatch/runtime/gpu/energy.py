"""Reads the energy counters of GPUs while they serve. This module knows neither torch nor what the GPUs compute."""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any, Self

PERIOD = 0.1  # seconds between two readings at first; a driver renews its counters about as often
MOST_READINGS = 20_000

Counter = Callable[[], float]  # returns the joules that a GPU has taken since some moment before the run


class EnergyMeter:
    """Reads the counters at both ends of a `with`, and in between from a thread of its own. An error ends the readings, never the run.

    readings: seconds on the run's clock, and the joules of each GPU since the first reading. problem: why energy is unknown; empty: it is known.
    """

    def __init__(self, find: Callable[[], Sequence[Counter]], now: Callable[[], float], period: float = PERIOD) -> None:
        """find: returns a counter for each GPU. now: the run's clock."""
        self.readings: list[tuple[float, ...]] = []
        self.problem = ""
        self._first: list[float] = []
        self._now, self._period, self._ended = now, period, Event()
        self._thread = Thread(target=self._read_on, name="energy", daemon=True)
        try:
            self._counters = find()
        except ImportError as error:
            self.problem = f"{error}; install nvidia-ml-py, which reads the GPUs' energy counters"
        except Exception as error:  # whatever a driver's library raises
            self.problem = f"no energy counter: {error}"

    def __enter__(self) -> Self:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._read()

    def _read_on(self) -> None:
        while not self.problem and not self._ended.wait(self._period):
            self._read()
            if len(self.readings) > MOST_READINGS:
                del self.readings[1::2]
                self._period *= 2

    def _read(self) -> None:
        if self.problem:
            return
        began = self._now()
        try:
            joules = [read() for read in self._counters]
        except Exception as error:
            self.problem = f"an energy counter could not be read: {error}"
        else:
            self._first = self._first or joules
            since = [now - then for now, then in zip(joules, self._first, strict=True)]
            self.readings.append(((began + self._now()) / 2, *since))


def nvml_counters(uuids: Sequence[str]) -> list[Counter]:
    """Returns the counters of NVIDIA GPUs, which exist since Volta. uuids: as PyTorch has them."""
    import pynvml

    pynvml.nvmlInit()
    return [partial(_joules, pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")) for uuid in uuids]


def _joules(nvml: Any, handle: object) -> float:
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
