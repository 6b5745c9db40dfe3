"""Checks every run of a sweep before the first one starts: its keys and classes, and the files of its workload."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict

from experiments import workloads
from experiments.settings.construct import check_section
from experiments.workloads.readers.servegen import read_servegen
from experiments.workloads.readers.source import json_objects, read_text

_BUILT = ("backend", "runtime", "model", "workload", "policy")
"""Sections of which a run builds an object."""


def check_jobs_first(check: Callable[[dict[str, Any]], object]) -> None:
    """Has Hydra's sweeper check all runs before it launches any; by itself it composes them then, and looks no further.

    A search is not checked: it chooses its runs one after another.

    check: raises ConfigError for settings that the command cannot use.
    """

    def check_batch(sweeper: Sweeper, batch: Sequence[Sequence[str]]) -> None:
        """Hydra's own launcher composes each run again, in this process: it gets what was checked, kept in 20 KB each."""
        assert sweeper.hydra_context is not None and sweeper.config is not None
        loader = sweeper.hydra_context.config_loader
        compose = partial(type(loader).load_sweep_config, loader)
        checked: dict[tuple[str, ...], bytes] = {}

        def load_sweep_config(master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
            kept = checked.pop(tuple(sweep_overrides), None)
            return pickle.loads(kept) if kept else compose(master_config, sweep_overrides)

        files: set[str] = set()
        for overrides in batch:
            config = compose(sweeper.config, list(overrides))
            checked[tuple(overrides)] = pickle.dumps(config)
            check(check_job(config, files))
        if sweeper.config.hydra.launcher._target_.endswith(".BasicLauncher"):  # others compose in their workers
            loader.load_sweep_config = load_sweep_config  # type: ignore[method-assign]

    Sweeper.validate_batch_is_legal = check_batch  # type: ignore[method-assign, assignment]


def check_job(config: DictConfig, files: set[str]) -> dict[str, Any]:
    """Checks the settings of one run, which a sweeper has composed, and returns them.

    files: those that were read for other runs, and how; each is read once.

    Raises:
        ConfigError: as `check_section`.
        MissingMandatoryValue: a required key has no value.
        WorkloadError: a file that a built-in workload names is not there, or is malformed.
    """
    with open_dict(config):
        del config["hydra"]
    settings: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    for section in _BUILT:
        check_section(section, settings[section])
    if settings["workload"]["_target_"].startswith(f"{workloads.__name__}."):
        _check_files("workload", settings["workload"], files)
    return dict(settings)


def _check_files(section: str, keys: Mapping[str, Any], files: set[str]) -> None:
    """Reads the files that a section, or one within it, names."""
    for name, value in keys.items():
        if isinstance(value, Mapping):
            _check_files(f"{section}.{name}", value, files)
    how = {name: keys[name] for name in ("path", "dataset", "format", "columns") if name in keys}
    if "path" not in how or (key := repr((section, how))) in files:
        return
    files.add(key)
    if "dataset" in how:
        read_servegen(how["path"], how["dataset"])
    elif "format" in how:
        from experiments.workloads.readers.traces import read_trace  # loads pandas

        read_trace(how["path"], how["format"], section, how.get("columns"))
    else:
        json_objects(how["path"], read_text(how["path"], f"{section}.path"))
