"""Composes settings with Hydra, for one run or for each run of a sweep, which Hydra's launchers execute.

This module converts Hydra's errors to a ConfigError of one line, since it knows the overrides that caused them.
"""

import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cbatch import ConfigError
from experiments.keys import key_of
from experiments.progress import bar
from experiments.settings.construct import PASSED_ON, locate, parameters_of, takes
from experiments.settings.error_lines import explain
from experiments.settings.groups import CONFIG_FOLDER, VERSION, compose_config, initialized, parse, version_of_files
from experiments.settings.option_arguments import for_hydra
from experiments.settings.overrides import check_composable, check_search_path
from experiments.settings.settings import Composed, Settings, read_settings
from experiments.store.provenance import write_text

MULTIRUN = "multirun.yaml"  # file that Hydra writes into the folder of a sweep

_COMPOSES = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError, RecursionError)


def compose_run(*overrides: str) -> Settings:
    """Composes and validates the settings of one run of `experiments.run`."""
    return read_settings(compose(*overrides))


def compose(*overrides: str, name: str = "config") -> Composed:
    """Composes the settings of one run. name: the command's file in conf/. Raises ConfigError, like all functions here."""
    plain = for_hydra(overrides)
    check_composable(plain, sweeps=False)
    with _explained(name, plain), initialized():
        # the default name of a sweep is the time, which would differ in each composition of a single run
        unnamed = [] if any(override.startswith("sweep=") for override in plain) else ["sweep=none"]
        parsed = parse([*plain, *unnamed])
        if swept := [override.input_line for override in parsed if override.is_sweep_override()]:
            remedy = "give one, a list in brackets as [1,2], quote a text, or add -m to experiments.run for a sweep"
            raise ConfigError(f"{swept[0]}: is several values; {remedy}")
        return _resolve(compose_config(name, parsed, version_of_files(plain)))


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep. master: the shared settings. in_turn: whether the runs execute one by one in this process."""

    master: DictConfig
    jobs: Sequence[Composed]
    in_turn: bool

    @property
    def shared(self) -> frozenset[str]:
        """The overrides that all runs have."""
        return frozenset.intersection(*(frozenset(composed.named) for composed in self.jobs or [Composed({})]))

    def launch(self, job: Callable[[Composed], None]) -> None:
        """Calls a function for each run of the sweep, with Hydra's launcher unless `in_turn`."""
        if self.in_turn:
            for composed in self.jobs:
                job(composed)
            return
        with initialized() as composer:
            # Hydra's basic sweeper would compose all runs again before the first run starts
            context = HydraContext(composer.config_loader, Callback())  # type: ignore[arg-type]
            launcher = Plugins.instance().instantiate_launcher(context, partial(_call, job), self.master)
            jobs = [[text for text in composed.overrides if not text.startswith("hydra.")] for composed in self.jobs]
            launcher.launch(jobs, initial_job_idx=0)


def compose_sweep(*overrides: str, name: str = "config") -> Sweep:
    """Composes every run of a sweep."""
    plain = for_hydra(overrides)
    check_composable(plain, sweeps=True)
    with _explained(name, plain), initialized() as composer:
        master = composer.compose_config(name, plain, run_mode=RunMode.MULTIRUN, with_log_configuration=False)
        chosen, folder = master.hydra.runtime.choices, Path(master.hydra.sweep.dir)
        swept = for_hydra([f"{key}={value}" for key, value in _swept(master).items()])
        jobs = list(_compose_jobs(name, master, _grid([*swept, *master.hydra.overrides.task])))
    write_text(folder / MULTIRUN, OmegaConf.to_yaml(master))
    return Sweep(master, jobs, chosen["hydra/launcher"] == "basic")


def show(name: str, hidden: Sequence[str]) -> str:
    """Returns Hydra's output for options such as --help. hidden: prefixes of lines to leave out."""
    with redirect_stdout(StringIO()) as text:
        try:
            hydra.main(config_path=str(CONFIG_FOLDER), config_name=name, version_base=VERSION)(print)()
        except SystemExit as end:
            if end.code:
                raise
    return "".join(line for line in text.getvalue().splitlines(keepends=True) if not line.startswith(tuple(hidden)))


def policy_names() -> list[str]:
    """Returns the names of the built-in policies, for `policy=`."""
    return sorted(path.stem for path in (CONFIG_FOLDER / "policy").glob("*.yaml"))


@contextmanager
def _explained(name: str, overrides: Sequence[str]) -> Iterator[None]:
    check_search_path(overrides)  # for a missing folder Hydra would only print a warning
    try:
        yield
    except (*_COMPOSES, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # no errno: OmegaConf's, for a file with a number
            raise
        raise ConfigError(explain(error, name, overrides)) from error


def _grid(overrides: Sequence[str]) -> list[list[str]]:
    """Returns the overrides of each run: all combinations of the keys' values. A later override replaces an earlier override."""
    values: dict[str, list[str]] = {}
    for override in parse(overrides):
        key, swept = override.get_key_element(), override.is_sweep_override()
        if swept and not override.is_discrete_sweep():
            raise ConfigError(f"{override.input_line}: an interval is not a list of values; list the values")
        texts = override.sweep_string_iterator() if swept else [override.get_value_element_as_str()]
        values[key] = [f"{key}={text}" for text in texts]
    return [list(job) for job in product(*values.values())]


def _compose_jobs(name: str, master: DictConfig, grid: Sequence[list[str]]) -> Iterator[Composed]:
    """Composes the runs of a sweep. The runs share values that the master has resolved, such as the time."""
    launching = list(master.hydra.overrides.hydra)
    version = version_of_files(launching)
    for number, job in enumerate(bar(grid, desc="checking", unit="run", delay=2)):
        with _explained(name, job):
            config = compose_config(name, parse([*launching, *job]), version)
            OmegaConf.copy_cache(from_config=master, to_config=config)
            yield _resolve(config, number)


def _resolve(config: DictConfig, number: int | None = None) -> Composed:
    node = config.hydra
    paths = [override for override in node.overrides.hydra if override.startswith("hydra.searchpath=")]
    excluded, task = node.job.config.override_dirname.exclude_keys, node.overrides.task
    overrides, swept = [*paths, *task], _swept(config)
    replaced = [f"{key_of(text)}=null" for text in task if text.startswith("++")]
    named = sorted(text for text in task if key_of(text) not in excluded and text not in replaced)
    choices = {str(group): str(option) for group, option in node.runtime.choices.items()}
    with open_dict(config):
        del config["hydra"]
        # for ${hydra:...}, as Hydra's own `set_config`, which would copy all
        HydraConfig.instance().cfg = root = OmegaConf.create(flags={"no_deepcopy_set_nodes": True})  # type: ignore[assignment]
        root.hydra = node
        node._set_parent(config)
        _lift_chunk(config)
        _check_parts(config)
        for key in ("chunk", "seed"):  # sections that refer to these keys require whole numbers
            if isinstance(value := config.get(key), float) and value.is_integer():  # 1e3
                config[key] = int(value)
    keys: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return Composed(keys, overrides, choices, _shorten(named, keys), number, swept, _unused(config))


def _lift_chunk(config: DictConfig) -> None:
    """Makes an argument `chunk` of the policy, as in policy=sarathi(chunk=512), the run's `chunk`, which the policy's other arguments follow."""
    policy = config.get("policy")
    given = isinstance(policy, DictConfig) and "chunk" in policy and "_target_" in policy
    if given and not takes(parameters_of(locate("policy", policy["_target_"])), "chunk"):
        own = policy.pop("chunk")
        (policy if "chunk" in _unused(config) else config)["chunk"] = own


def _check_parts(config: DictConfig) -> None:
    """Raises ConfigError for arguments of a part that is the run's own, as in policy=srpt(predictor.share=0.2): they would replace the part."""
    sections: Any = OmegaConf.to_container(config, resolve=False)
    policy = sections.get("policy")
    for part in PASSED_ON if isinstance(policy, dict) else ():
        if isinstance(section := policy.get(part), dict) and "_target_" not in section:
            keys = " ".join(f"{part}.{key}={value}" for key, value in section.items())
            raise ConfigError(f"policy.{part}: the policy has the run's own {part}; give {keys} outside the policy")


def _unused(config: DictConfig) -> list[str]:
    """Returns the keys that no other refers to, those without effect left out."""
    plain: Any = OmegaConf.to_container(config, resolve=False)
    unused = []
    for key in PASSED_ON:
        section = plain.pop(key)
        if re.search(rf"\${{(\.\.+)?{key}\b", str(plain)):
            plain[key] = section
        else:
            unused.append(key)
    return unused


def _shorten(overrides: Sequence[str], keys: Mapping[str, Any]) -> list[str]:
    """Returns overrides with only the last part of a key, if unique, and with `_chunk_` in an option's name replaced by the key's value."""
    known, shortened = Counter(key.rpartition(".")[2] for key in keys_within(keys)), []
    plain = {key: str(value) for key, value in keys.items() if isinstance(value, str | int | float)}
    for text in overrides:
        text = re.sub(r"(?<==)_(\w+)_(?=[,)])", lambda match: plain.get(match[1], match[0]), text)
        end = key_of(text).rpartition(".")[2]
        shortened.append(f"{end}={text.partition('=')[2]}" if known[end] == 1 and "=" in text else text)
    return shortened


def keys_within(section: Mapping[str, Any]) -> Iterator[str]:
    """Yields the keys of a section, and the keys of nested sections as dotted names."""
    for key, value in section.items():
        yield key
        yield from (f"{key}.{inner}" for inner in keys_within(value if isinstance(value, Mapping) else {}))


def _swept(config: DictConfig) -> dict[str, str]:
    return {str(key): str(value) for key, value in (config.hydra.sweeper.get("params") or {}).items()}


def _call(job: Callable[[Composed], None], config: DictConfig) -> None:
    """Serves a run that Hydra's launcher composed, in the process and folder that the launcher started."""
    node = HydraConfig.get()
    # Hydra makes the folder on every machine, but this file exists only where the sweep was started
    if not (Path(node.sweep.dir) / MULTIRUN).is_file():
        problem = f"{node.sweep.dir}: not shared with {socket.gethostname()}"
        raise ConfigError(f"{problem}; give the command in a folder that all machines of the cluster see")
    os.chdir(node.runtime.cwd)
    with open_dict(config):
        config["hydra"] = node
    job(_resolve(config, node.job.num))
