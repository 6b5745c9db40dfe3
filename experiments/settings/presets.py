"""Model presets of the configuration, for benchmarks that need no other settings."""

from pathlib import Path

import yaml

from cbatch import ConfigError, ModelSpec
from cbatch.validation import nearest

FOLDER = Path(__file__).parents[1] / "conf" / "model"


def load_spec(name: str) -> ModelSpec:
    """Reads a model preset. Raises ConfigError if there is none of that name."""
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        presets = [preset.stem for preset in FOLDER.glob("*.yaml")]
        raise ConfigError(f"model={name}: no such model; {nearest(name, presets)}")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    del fields["_target_"]
    return ModelSpec(**fields)
