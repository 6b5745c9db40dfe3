"""Settings of an experiment or a policy, for figures and benchmarks that run it themselves.

They are those of `experiments.run -m experiment=NAME` and `experiments.run policy=NAME`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from cbatch import ConfigError
from cbatch.validation import nearest
from experiments.settings.choices import with_arguments
from experiments.settings.error_lines import CONFIG_FOLDER
from experiments.settings.settings import Settings, read_settings
from experiments.workloads import Workload

FOLDER = CONFIG_FOLDER / "experiment"


def composed(name: str) -> Mapping[str, Any]:
    """Returns every key of one run of the experiment, interpolations resolved; swept keys have their default values.

    Raises ConfigError if there is no such experiment, as the functions below do.
    """
    return _all(name)[0]


def swept(name: str, key: str) -> list[str]:
    """The values that the experiment sweeps a key over, in order. Raises ConfigError for a key not swept."""
    parameters = _all(name)[1]
    if key not in parameters:
        raise ConfigError(f"{FOLDER / name}.yaml: does not sweep {key}; give it under hydra.sweeper.params")
    return [value.strip() for value in str(parameters[key]).split(",")]


def swept_numbers(name: str, key: str) -> list[float]:
    return [float(value) for value in swept(name, key)]


def workload(name: str) -> Workload:
    """The workload of the experiment."""
    return read_settings(composed(name)).workload


def compose_keys(*overrides: str, name: str = "config") -> dict[str, Any]:
    """Returns every key of a run by the overrides of a command line, interpolations resolved. name: of the file in conf/."""
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        config = compose(name, [*with_arguments(overrides), "sweep=none"])
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def compose_run(*overrides: str) -> Settings:
    """Returns the settings of a run by the overrides of a command line."""
    return read_settings(compose_keys(*overrides), overrides=overrides)


def policy_names() -> list[str]:
    """The built-in policies, as `policy=` takes them."""
    return sorted(path.stem for path in (CONFIG_FOLDER / "policy").glob("*.yaml") if path.stem != "external")


@cache
def _all(name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the keys of a run, and the sweep's parameters."""
    try:
        with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            config = compose("config", [f"experiment={name}", "sweep=none"], return_hydra_config=True)
    except MissingConfigException:
        known = [path.stem for path in FOLDER.glob("*.yaml")]
        raise ConfigError(f"experiment={name}: no such experiment; {nearest(name, known)}") from None
    parameters: Any = OmegaConf.to_container(config.hydra.sweeper.params or OmegaConf.create())
    del config.hydra
    keys: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return keys, parameters
