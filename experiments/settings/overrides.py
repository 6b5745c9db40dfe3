"""The overrides of a command line, such as `chunk=256`: their values, and errors for overrides that Hydra would misread."""

import re
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cbatch import ConfigError
from cbatch.validation import parse, whole
from experiments.keys import key_of
from experiments.settings.settings import GROUPS, ROOT_KEYS, Composed

_OUR_OWN = {
    "hydra.run.dir": "give output=FOLDER",
    "hydra.sweep.dir": "give -m and sweep=NAME",
    "hydra.sweep.subdir": "give -m and sweep=NAME",
    "hydra.mode": "give -m for a sweep",
    "hydra.launcher": "give -m and hydra/launcher=NAME",
    "hydra/sweeper": "give -m and values, KEY=A,B",
    "hydra.sweeper": "give -m and values, KEY=A,B",
}
"""Replacements for Hydra's own settings, which are refused, since this process must know where a sweep's runs are."""

_NO_NAME = re.compile(r"\[.*|null|true|false|[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?inf|nan", re.IGNORECASE)
"""What Hydra reads as a list, null, a truth value or a number."""

_READ = ("hydra/launcher", "hydra.launcher.", "hydra.sweeper.params", "hydra.searchpath")
"""Hydra's own settings that have an effect."""


def values_by_key(overrides: Iterable[str]) -> dict[str, list[str]]:
    """Returns the values of each key on the command line, in order."""
    values: dict[str, list[str]] = {}
    for override in overrides:
        key, equals, value = override.lstrip("+").partition("=")
        if equals and not key.startswith("~"):
            values.setdefault(key, []).append(value)
    return values


_SEARCH_PATH = "hydra.searchpath=['file://"


def with_search_path(arguments: Sequence[str]) -> list[str]:
    """Replaces --config-dir FOLDER by the equivalent override, placed after the other arguments."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", nargs="?", const="?")
    options, others = parser.parse_known_args(arguments)
    if options.config_dir is None:
        return others
    return [*others, f"{_SEARCH_PATH}{Path(options.config_dir).resolve()}']"]


def folders_of(overrides: Iterable[str]) -> list[Path]:
    """Returns the folders of groups from --config-dir."""
    texts = [override.removeprefix(_SEARCH_PATH) for override in overrides if override.startswith(_SEARCH_PATH)]
    return [Path(text.removesuffix("']")) for text in texts]


def check_search_path(overrides: Iterable[str]) -> None:
    """Raises ConfigError if the --config-dir of a command or of a recorded command is not a folder."""
    for folder in folders_of(overrides):
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={folder}: no such folder; give the one that holds your groups")


def with_seeds(arguments: Sequence[str], *, replications: bool = False) -> list[str]:
    """Replaces seeds=N by a sweep over N seeds; the first is `seed`, by default 0.

    replications: whether the command has replications, which have separate seeds.
    Raises ConfigError if N is not a whole number, `seed` has several values, or there are `replications`.
    """
    given = values_by_key(arguments)
    if "seeds" not in given:
        return list(arguments)
    text = given["seeds"][-1]
    if replications:
        raise ConfigError(f"seeds={text}: replications have seeds of their own here; give replications=N")
    number, first = parse(Annotated[int, whole(1)], text, "seeds"), given.get("seed", ["0"])[-1]
    if not first.isdecimal():
        raise ConfigError(f"seeds={text} seed={first}: give one of the two, or the first seed as a number")
    others = [argument for argument in arguments if not argument.startswith(("seeds=", "seed="))]
    swept = [] if {"-m", "--multirun"} & set(others) else ["-m"]
    return [*swept, *others, f"seed={','.join(map(str, range(int(first), int(first) + number)))}"]


def check_overrides(overrides: Sequence[str], *, sweeps: bool) -> None:
    """Raises ConfigError for overrides that Hydra would misread. sweeps: whether the command has -m."""
    for override in overrides:
        key, value = key_of(override), override.partition("=")[2]
        if override.startswith("~") and key in ROOT_KEYS:
            raise ConfigError(f"{override}: removes a key that every run needs; leave it out, or give {key}=...")
        if key == "output" and value in ("", "''"):
            raise ConfigError(f"{override}: names no folder; give output=FOLDER, or leave it out for one under runs/")
        if key == "output" and sweeps and value != "null":
            raise ConfigError(f"{override} names the folder of a single run; name a sweep with sweep=")
        if key == "sweep" and not sweeps:
            raise ConfigError(f"{override}: names a sweep; add -m, or give output=FOLDER for a single run")


def check_composable(overrides: Collection[str], *, sweeps: bool) -> None:
    """Raises ConfigError for a group's option that is no name, and for Hydra's settings without effect. sweeps: the command has -m."""
    launched = any(override.startswith("hydra/launcher=") for override in overrides)
    for override in overrides:
        key, value = key_of(override), override.partition("=")[2]
        if key in (*GROUPS, "slo", "hydra/launcher") and any(map(_NO_NAME.fullmatch, value.split(","))):
            remedy = f"give {key}=none" if override == "drafting=null" else "several are a sweep, with -m"
            raise ConfigError(f"{override}: a group takes the name of one of its options; {remedy}")
        if key.startswith("hydra/launcher") and not sweeps:
            raise ConfigError(f"{override}: launches the runs of a sweep; add -m, or leave it out")
        in_workers = launched and key.startswith("hydra.job.env_")
        if key.startswith(("hydra.", "hydra/")) and not key.startswith(_READ) and not in_workers:
            raise ConfigError(f"{key}: has no effect here; {_OUR_OWN.get(key, 'leave it out')}")


def check_given_once(overrides: Iterable[str], *, sweeps: bool = False) -> None:
    """Raises ConfigError if the command line gives a key twice. sweeps: whether the command accepts several values of a key."""
    for key, (first, *others) in values_by_key(overrides).items():
        if others:
            lists = {name: f",{name}," for name in (first, *others)}  # a list may contain another list
            values = [name for name in lists if sum(f",{name}," in other for other in lists.values()) == 1]
            several = f"; or {key}={','.join(values)} for a sweep, with -m" if sweeps and len(lists) > 1 else ""
            raise ConfigError(f"{key}: is given twice, as {first} and as {others[0]}; give it once{several}")


def log_unused(overrides: Iterable[str], unused: Collection[str], log: Callable[[str], object] = print) -> None:
    """Logs a line for overrides of keys that no section refers to."""
    if text := " ".join(given for given in overrides if key_of(given).split(".")[0] in unused):
        log(f"{text}: no effect, as nothing reads it; a policy of your own takes arguments as +policy.NAME=...")


def log_unread(runs: Sequence[Composed]) -> None:
    """Prints a line for each key of a sweep's command line that some policies do not read, with these policies.

    A policy whose argument equals the key's value, as `budget=512` beside `chunk=512`, is not among them.
    """
    unread: dict[str, dict[str, None]] = {}
    for run in runs:
        own = {str(value) for value in run.keys["policy"].values() if type(value) is int}
        given = {key_of(text).split(".")[0] for text in run.overrides if text.partition("=")[2] not in own}
        for key in given & {*run.unused}:
            unread.setdefault(key, {})[run.choices["policy"]] = None
    for key, policies in unread.items():
        yours = [policy.partition("(")[0] for policy in policies if "." in policy.partition("(")[0]]
        remedy = f"; 'policy={yours[0]}(NAME=${{{key}}})' gives it to an argument" if yours else ""
        print(f"{key}: not read by {', '.join(policies)}{remedy}", flush=True)


def check_effects(overrides: Iterable[str], keys: Collection[str], command: str) -> None:
    """Raises ConfigError for a key of a run without effect on this command. keys: first parts of the keys with an effect."""
    for key in values_by_key(overrides):
        if (first := re.split(r"[.@]", key)[0]) in ROOT_KEYS and first not in keys:
            raise ConfigError(f"{key}: has no effect on a {command}, which takes {', '.join(keys)}; leave it out")
