"""What predicts iterations, by `hardware=`: a profile of the package, one in a file, or `cpu`, this machine's CPU.

The CPU is measured with a model when a policy first asks for a prediction (`experiments.profile.command.measure_cpu`),
and the profile kept in a file of the user's cache folder.
"""

import os
from copy import copy
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from cbatch import BatchShape, ConfigError, ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim import Profile, ProfileCost, load_profile
from cbatch.sim.roofline import Ceilings
from experiments.settings.this_machine import cpu_name, memory_bytes

CPU = "cpu"


class UnmeasuredError(ConfigError):
    """A policy asks for a prediction, and this machine's CPU was not measured with the model yet."""

    def __init__(self, spec: ModelSpec) -> None:
        remedy = "experiments.profile.command.measure_cpu(spec) measures it, experiments.run does so by itself"
        super().__init__(f"view.cost: this machine's CPU was not measured with model={spec.name}; {remedy}")
        self.spec = spec


class _UnmeasuredCost(ProfileCost):
    """Stands in for the cost model of a CPU that was not measured; raises UnmeasuredError when asked."""

    def _tables(self, shape: BatchShape) -> NoReturn:
        raise UnmeasuredError(self.spec)


def cost_model(
    hardware: str,
    spec: ModelSpec,
    topology: Topology = Topology(),  # noqa: B008 - frozen
    max_batch: int | None = None,
) -> ProfileCost:
    """Returns the cost model of a model on `hardware`; the other arguments are those of `ProfileCost`."""
    path = cpu_profile(spec)
    if hardware != CPU or path.is_file():
        file = path if hardware == CPU else Path(hardware)
        changed = file.stat().st_mtime_ns if file.is_file() else None
        # a copy counts its own iterations, and shares the times of iterations that earlier runs have computed
        return copy(_measured(str(file), changed, spec, topology, max_batch))
    facts: dict[str, Any] = {"name": CPU, "hardware": cpu_name(), "source": "", "error": "not measured"}
    unknown = Profile(**facts, memory_bytes=memory_bytes(), ceilings=Ceilings(1.0, 1.0, 1))
    return _UnmeasuredCost(unknown, spec, topology, max_batch)


@lru_cache(maxsize=4)
def _measured(profile: str, changed: int | None, *arguments: Any) -> ProfileCost:
    return ProfileCost(load_profile(profile), *arguments)


def cpu_profile(spec: ModelSpec) -> Path:
    """Returns the file for the measurements of this machine's CPU with a model.

    There is one for each processor, number of cores and threads, version of PyTorch and shape of a model.
    """
    shape = {key: value for key, value in asdict(spec).items() if key not in ("path", "seed")}
    measured = (cpu_name(), os.environ.get("OMP_NUM_THREADS"), version("torch"), shape)
    digest = sha256(repr(measured).encode()).hexdigest()[:12]
    return Path.home() / ".cache" / "cbatch" / f"{CPU}-{digest}.json"
