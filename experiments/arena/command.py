"""What the arena makes of the settings of a run. Not in `__main__`, from which other processes could not load it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.capacity.command import SimulatedSettings
from experiments.job import Command
from experiments.settings.settings import Keys, read_as
from experiments.store.run_folder import run_folders


@dataclass(frozen=True, kw_only=True)
class ArenaKeys(Keys):
    """The root keys with those of conf/arena.yaml."""

    slo: Mapping[str, Any]

    without_effect = (*Keys.without_effect, "slo")  # is within the workload


@dataclass(frozen=True, kw_only=True)
class ArenaSettings(ArenaKeys, SimulatedSettings):
    """The settings of a run of the arena."""


def _count(root: Path) -> str:
    return f"{len(run_folders(root))} runs"


COMMAND = Command("arena", partial(read_as, ArenaSettings, ArenaKeys), folders=run_folders, table=_count, stem="_arena")
