"""Describes this machine's processors, and makes the cost model for `hardware=`: a shipped profile, a file, or `cpu` for this CPU.

`python -m experiments.profile cpu` measures the CPU with a model, and writes a file in the user's cache folder.
"""

import ctypes
import os
import platform
import re
from contextlib import suppress
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from cbatch import BatchShape, ConfigError, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim import Profile, ProfileCost, load_profile
from cbatch.sim.profile_file import profile_names
from cbatch.sim.roofline import Ceilings
from experiments.store.provenance import slug, versions

CPU = "cpu"


class UnmeasuredCost(ProfileCost):
    """Replaces the cost model of an unmeasured CPU. Predictions raise ConfigError."""

    def _tables(self, shape: BatchShape) -> NoReturn:
        spec = self.spec
        model = f"model={spec.name}" if spec.path is None else f"model.path={spec.path}"
        remedy = f"run python -m experiments.profile cpu {model}, with the run's model.* keys if it has any"
        raise ConfigError(f"view.cost: this machine's CPU was not measured with model={spec.name}; {remedy}")


def cost_model(
    hardware: str,
    spec: ModelSpec,
    topology: Topology = Topology(),  # noqa: B008 - frozen
    max_batch: int | None = None,
) -> ProfileCost:
    """Returns the cost model of a model on `hardware`. For the other arguments, see `ProfileCost`."""
    path = cpu_profile(spec)
    if hardware != CPU or path.is_file():
        file = path if hardware == CPU else Path(hardware)
        changed = file.stat().st_mtime_ns if file.is_file() else None
        # a copy has separate counters, and shares the cached times of earlier runs
        return copy(_measured(str(file), changed, spec, topology, max_batch))
    facts: dict[str, Any] = {"name": CPU, "hardware": cpu_name(), "source": "", "error": "not measured"}
    ceilings = Ceilings(1.0, 1.0, 1, dict.fromkeys(("float32", "float64"), 1.0))
    unknown = Profile(**facts, memory_bytes=memory_bytes(), ceilings=ceilings)
    return UnmeasuredCost(unknown, spec, topology, max_batch)


@lru_cache(maxsize=4)
def _measured(profile: str, changed: int | None, *arguments: Any) -> ProfileCost:
    return ProfileCost(load_profile(profile), *arguments)


def cpu_profile(spec: ModelSpec) -> Path:
    """Returns the file for the measurements of this machine's CPU with a model.

    Each combination of processor, number of cores and threads, version of PyTorch and shape of the model has a separate file.
    """
    shape = {key: value for key, value in asdict(spec).items() if key not in ("path", "seed")}
    measured = (cpu_name(), os.environ.get("OMP_NUM_THREADS"), versions().get("torch"), shape)
    digest = sha256(repr(measured).encode()).hexdigest()[:12]
    return Path.home() / ".cache" / "cbatch" / f"{CPU}-{digest}.json"


def cpu_name() -> str:
    """Returns the processor's name and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return f"{match.group(1) if match else platform.machine()}, {cores} cores"


def memory_bytes() -> float:
    """Returns the size of this machine's memory in bytes."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def card_name() -> str:
    """Returns the current GPU's name and the first digits of its UUID, which distinguish cards of one type. Imports torch."""
    import torch

    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name} {str(properties.uuid)[:8]}"


def count_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may use. Queries the driver, since importing torch takes seconds."""
    count = ctypes.c_int(0)
    if (driver := _driver()) is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def profile_of_gpu() -> str | None:
    """Returns the name of the package's profile for the first GPU, or None. Queries the driver."""
    device, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
    if (driver := _driver()) is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetName(name, len(name), device)
    profile = slug(name.value.decode())
    return profile if profile in profile_names() else None


def _driver() -> ctypes.CDLL | None:
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        return None if driver.cuInit(0) else driver
    return None
