"""Model presets of the configuration, for benchmarks that read no other settings."""

from pathlib import Path

import yaml

from cbatch import ConfigError, ModelSpec
from cbatch.validation import nearest

FOLDER = Path(__file__).parents[1] / "conf" / "model"


def load_spec(name: str, key: str = "model") -> ModelSpec:
    """Reads a model preset. Raises ConfigError, with the key, if there is no preset of this name."""
    presets = {path.stem: path for path in FOLDER.glob("*.yaml")}
    if name not in presets:
        raise ConfigError(f"{key}={name}: no such model; {nearest(name, presets)}")
    fields = yaml.safe_load(presets[name].read_text(encoding="utf-8"))
    return ModelSpec(**{key: value for key, value in fields.items() if key != "_target_"})
