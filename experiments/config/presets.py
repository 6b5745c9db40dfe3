"""The model presets of the configuration, for benchmarks that need no more of it."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import yaml

from cbatch import ConfigError
from cbatch.model import ModelSpec

FOLDER = Path(__file__).parents[2] / "conf" / "model"


def load_spec(name: str) -> ModelSpec:
    """
    Raises:
        ConfigError: no preset of that name.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = sorted(preset.stem for preset in FOLDER.glob("*.yaml"))
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"model={name} is unknown; {hint}known: {', '.join(known)}")
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    del fields["_target_"]
    return ModelSpec(**fields)
