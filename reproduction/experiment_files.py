"""What an experiment of conf/experiment sweeps, for figures and benches that serve its runs themselves."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from cbatch import ConfigError
from experiments.settings.compose import compose
from experiments.settings.error_lines import CONFIG_FOLDER
from experiments.settings.settings import Composed, read_settings
from experiments.workloads import Workload

FOLDER = CONFIG_FOLDER / "experiment"


def composed(name: str) -> Mapping[str, Any]:
    """Returns every key of one run of the experiment; swept keys have their default values.

    Raises ConfigError if there is no such experiment, as the functions below do.
    """
    return _composed(name).keys


def swept(name: str, key: str) -> list[str]:
    """Returns the values that the experiment sweeps a key over, in order. Raises ConfigError for a key not swept."""
    values = _composed(name).swept
    if key not in values:
        raise ConfigError(f"{FOLDER / name}.yaml: does not sweep {key}; give it under hydra.sweeper.params")
    return [value.strip() for value in values[key].split(",")]


def swept_numbers(name: str, key: str) -> list[float]:
    """Returns the numbers that the experiment sweeps a key over."""
    return [float(value) for value in swept(name, key)]


def workload(name: str) -> Workload:
    """Returns the workload of the experiment."""
    return read_settings(_composed(name)).workload


@cache
def _composed(name: str) -> Composed:
    return compose(f"experiment={name}")
