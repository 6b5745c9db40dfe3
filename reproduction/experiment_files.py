"""What an experiment of conf/experiment sweeps, for figures and benches that serve its runs themselves."""

from functools import cache

from experiments.settings.compose import compose
from experiments.settings.settings import Composed, read_settings
from experiments.workloads import Workload


@cache
def composed(name: str) -> Composed:
    """Returns one run of the experiment; swept keys have their default values."""
    return compose(f"experiment={name}")


def swept(name: str, key: str) -> list[str]:
    """Returns the values that the experiment sweeps a key over, in order."""
    return [value.strip() for value in composed(name).swept[key].split(",")]


def swept_numbers(name: str, key: str) -> list[float]:
    """Returns the numbers that the experiment sweeps a key over."""
    return [float(value) for value in swept(name, key)]


def workload(name: str) -> Workload:
    """Returns the workload of the experiment."""
    return read_settings(composed(name)).workload
