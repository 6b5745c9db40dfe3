"""The options and overrides of `experiments.run`'s command line, read and checked before Hydra composes anything."""

from argparse import ArgumentParser, Namespace
from typing import Annotated, NoReturn

from cbatch import ConfigError
from cbatch.validation import parse, whole
from experiments.settings.command_line import check_given_once, no_such_option
from experiments.settings.error_lines import search_path
from experiments.settings.settings import GROUPS, ROOT_KEYS

_OUR_OWN = {
    "hydra.run.dir": "output=FOLDER",
    "hydra.sweep.dir": "-m and sweep=NAME",
    "hydra.sweep.subdir": "-m and sweep=NAME",
    "hydra.mode": "-m for a sweep",
    "hydra.launcher": "-m and hydra/launcher=NAME",
    "hydra.sweeper": "-m and hydra/sweeper=NAME",
}
"""Settings of Hydra that have no effect here, and the keys to give instead: this process must know where a sweep's runs are."""

_ALWAYS_OURS = "settings begin with conf/config.yaml; add files of your own with --config-dir=FOLDER and GROUP=NAME"


class _Parser(ArgumentParser):
    """Parses Hydra's options (hydra.cc, "Hydra's command line flags"); raises ConfigError where argparse prints its usage."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.add_argument("overrides", nargs="*")
        for name in ("--hydra-help", "--version", "--resolve"):
            self.add_argument(name, action="store_true")
        for name, short in (("help", "h"), ("run", "r"), ("multirun", "m"), ("shell-completion", "sc")):
            self.add_argument(f"--{name}", f"-{short}", action="store_true")
        for name, short in (("package", "p"), ("config-path", "cp"), ("config-name", "cn"), ("config-dir", "cd")):
            self.add_argument(f"--{name}", f"-{short}")
        self.add_argument("--experimental-rerun")
        self.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        infos = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
        self.add_argument("--info", "-i", nargs="?", const="all", choices=infos)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; see --hydra-help")


def with_seeds(arguments: list[str], *, replications: bool = False) -> list[str]:
    """Replaces seeds=N by a sweep over N seeds, from the one that `seed` gives on, 0 by default.

    replications: the command has replications, with seeds of their own.

    Raises:
        ConfigError: not a whole number, `seed` has several values, or there are `replications`.
    """
    given = [argument for argument in arguments if argument.startswith("seeds=")]
    if not given:
        return arguments
    if replications:
        raise ConfigError(f"{given[-1]}: replications have seeds of their own here; give replications=N")
    others = [argument for argument in arguments if argument not in given]
    number = parse(Annotated[int, whole(1)], given[-1].partition("=")[2], "seeds")
    firsts = [argument for argument in others if argument.startswith("seed=")]
    if firsts and not firsts[-1].partition("=")[2].isdecimal():
        raise ConfigError(f"{given[-1]} {firsts[-1]}: give one of the two, or the first seed as a number")
    first = int(firsts[-1].partition("=")[2]) if firsts else 0
    others = [argument for argument in others if argument not in firsts]
    swept = [] if {"-m", "--multirun"} & set(others) else ["-m"]
    return [*swept, *others, f"seed={','.join(map(str, range(first, first + number)))}"]


def parse_options(arguments: list[str]) -> Namespace:
    """Parses and checks the command line.

    Raises:
        ConfigError: an option that does not exist, or that would bypass our own (`_check_overrides`).
    """
    parsed, unknown = _Parser().parse_known_args(arguments)
    for argument in unknown:
        if argument.startswith("-"):
            raise no_such_option(argument)
    if unknown:
        raise ConfigError(f"{unknown[0]}: separated from the other keys by an option; give options with dashes first")
    for option, value in (("--config-path", parsed.config_path), ("--config-name", parsed.config_name)):
        if value is not None:
            raise ConfigError(f"{option}={value}: {_ALWAYS_OURS}")
    if parsed.config_dir is not None:
        search_path(parsed.config_dir)
    named = [override for override in parsed.overrides if override.startswith("sweep=")]
    for override in parsed.overrides:
        if parsed.multirun and override.startswith("output=") and override != "output=null":
            raise ConfigError(f"{override} names the folder of a single run; name a sweep with sweep=")
    if named and not parsed.multirun:
        raise ConfigError(f"{named[0]}: names a sweep; add -m, or give output=FOLDER for a single run")
    _check_overrides(parsed.overrides)
    return parsed


def _check_overrides(overrides: list[str]) -> None:
    """Raises ConfigError for keys with which Hydra would bypass our own, or which it could not compose."""
    check_given_once(overrides, GROUPS, sweeps=True)
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if override in ("output=", "output=''"):
            raise ConfigError(f"{override}: names no folder; give output=FOLDER, or leave it out for one under runs/")
        if key in _OUR_OWN:
            raise ConfigError(f"{key}: has no effect here; give {_OUR_OWN[key]}")
        if override.startswith("~") and key in ROOT_KEYS:
            raise ConfigError(f"{override}: removes a key that every run needs; leave it out, or give {key}=...")
        if key in GROUPS and value.startswith("["):
            raise ConfigError(f"{override}: give one {key}; or several for a sweep, without brackets and with -m")
