"""Composes settings with Hydra. Composing groups is slow, so overrides that differ only in values share a cached composition."""

import os
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from experiments.settings.faster_hydra import speed_up
from experiments.settings.overrides import folders_of

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "conf"
VERSION = "1.3"

speed_up()


@contextmanager
def initialized() -> Iterator[Any]:
    """Initializes Hydra and yields its composer."""
    with hydra.initialize_config_dir(str(CONFIG_FOLDER), job_name="run", version_base=VERSION):
        yield GlobalHydra.instance().hydra


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides. Hydra must be initialized, as for all functions here."""
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def version_of_files(overrides: Sequence[str]) -> int:
    """Returns a number that changes with the files in conf/. With user folders, which may be large, it always changes."""
    if folders_of(overrides):
        return time.monotonic_ns()
    inside = ((folder, name) for folder, *names in os.walk(CONFIG_FOLDER) for name in chain(*names))
    return max(os.stat(os.path.join(*each)).st_mtime_ns for each in inside)  # three times as fast as `rglob`


def compose_config(name: str, overrides: Sequence[Override], version: int) -> DictConfig:
    """Composes like `hydra.compose`, including the section `hydra`. name: the command's file in conf/. version: changes with the files."""
    folders = (CONFIG_FOLDER, *folders_of([str(override.input_line) for override in overrides]))
    groups = [override for override in overrides if _chooses(override, folders)]
    stored = [ConfigStore.instance().repo.get(group.key_or_group, {}).get(f"{group.value()}.yaml") for group in groups]
    lines = tuple(str(group.input_line) for group in groups)
    config: DictConfig = pickle.loads(_compose_groups(name, lines, repr(stored), version))
    # private, but the public way composes the groups again: 84 ms in place of 2 ms for each run of a sweep
    ConfigLoaderImpl._apply_overrides_to_config([override for override in overrides if override not in groups], config)
    config.hydra.overrides.task = [override.input_line for override in overrides if not override.is_hydra_override()]
    config.hydra.runtime.cwd = str(Path.cwd())
    return config


def _chooses(override: Override, folders: Sequence[Path]) -> bool:
    """Returns whether an override chooses an option of a group, or a folder of further groups."""
    key = override.key_or_group
    if isinstance(override.value(), dict):
        return False
    return key.startswith(("hydra/", "hydra.searchpath")) or any((folder / key).is_dir() for folder in folders)


@lru_cache(256)
def _compose_groups(name: str, overrides: tuple[str, ...], stored: str, version: int) -> bytes:
    """Composes options of groups. Returns the pickled configuration, since unpickling is 5 times as fast as copying.

    stored: the options in Hydra's ConfigStore that these overrides choose.
    """
    return pickle.dumps(hydra.compose(name, list(overrides), return_hydra_config=True))
