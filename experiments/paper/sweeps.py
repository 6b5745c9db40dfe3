"""The values that an ablation sweeps over, read from the configuration that `experiments.run -m experiment=NAME` runs."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from cbatch import ConfigError

FOLDER = Path(__file__).parents[2] / "conf" / "experiment"


def swept(name: str, key: str) -> list[str]:
    """The values of one key in conf/experiment/NAME.yaml, in order.

    Raises:
        ConfigError: the experiment does not sweep that key.
    """
    path = FOLDER / f"{name}.yaml"
    parameters = OmegaConf.to_container(OmegaConf.load(path).hydra.sweeper.params)
    if not isinstance(parameters, dict) or key not in parameters:
        raise ConfigError(f"{path}: sweeps no {key}; give it under hydra.sweeper.params")
    return [value.strip() for value in str(parameters[key]).split(",")]


def swept_numbers(name: str, key: str) -> list[float]:
    return [float(value) for value in swept(name, key)]
