"""Composes settings with Hydra. Composing groups is slow: overrides that differ only in values share it, in one process."""

import copy
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "conf"


def parse(overrides: Sequence[str]) -> list[Override]:
    """Parses overrides. Hydra is initialized, as for all functions here."""
    return OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def version_of_files(overrides: Sequence[str]) -> int:
    """Returns a number that differs once a file in conf/ has changed; always, with folders of the user, which may be large."""
    if any(override.startswith("hydra.searchpath=") for override in overrides):
        return time.monotonic_ns()
    return max(path.stat().st_mtime_ns for path in CONFIG_FOLDER.rglob("*"))


def compose_config(name: str, overrides: Sequence[str], version: int) -> DictConfig:
    """Composes what `hydra.compose` does, with the section `hydra`. name: of the command's file in conf/. version: of the files."""
    parsed = parse(overrides)
    paths = tuple(override.input_line or "" for override in parsed if override.key_or_group == "hydra.searchpath")
    groups = [override for override in parsed if _chooses(override, name, paths, version)]
    stored = [ConfigStore.instance().repo.get(group.key_or_group, {}).get(f"{group.value()}.yaml") for group in groups]
    lines = tuple(override.input_line or "" for override in groups)
    config = copy.deepcopy(_compose_groups(name, (*paths, *lines), repr(stored), version))
    values = [override for override in parsed if override not in groups and override.key_or_group != "hydra.searchpath"]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    config.hydra.overrides.task = [override.input_line for override in parsed if not override.is_hydra_override()]
    config.hydra.runtime.cwd = str(Path.cwd())
    return config


@lru_cache(256)
def _compose_groups(name: str, overrides: tuple[str, ...], stored: str, version: int) -> DictConfig:
    """Composes options of groups. stored: the options in Hydra's ConfigStore that these overrides choose."""
    return hydra.compose(name, list(overrides), return_hydra_config=True)


def _chooses(override: Override, name: str, paths: tuple[str, ...], version: int) -> bool:
    """Whether an override chooses an option of a group."""
    return not isinstance(override.value(), dict) and _is_group(override.key_or_group, name, paths, version)


@lru_cache(1024)
def _is_group(key: str, name: str, paths: tuple[str, ...], version: int) -> bool:
    if not paths:
        return key.startswith("hydra/") or (CONFIG_FOLDER / key).is_dir()
    return bool(GlobalHydra.instance().config_loader().get_group_options(key, None, name, list(paths)))
