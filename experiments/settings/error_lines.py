"""Converts each user error to one line: for Hydra's errors their first line, with the key and the nearest existing key."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from errno import ENOSPC
from traceback import walk_tb
from typing import Any, TypeGuard

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, MissingMandatoryValue
from yaml import MarkedYAMLError

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest
from experiments.keys import key_of
from experiments.report.headings import flat
from experiments.settings.backend import Pool
from experiments.settings.construct import BY_IMPORT_PATH, check_argument
from experiments.settings.groups import CONFIG_FOLDER, compose_config, initialized, parse, version_of_files
from experiments.settings.settings import GROUPS

OPEN_LOOP = "open_loop"
_REMEDIES = {
    "hydra": "; pip install 'cbatch[sweep]' has more",
    "model": "; for another give model.path=FOLDER of its checkpoint, or its shape as a file in --config-dir",
}
"""What to do for an option that none of the known ones is, by group."""
_FEW = 4  # keys of a section, which an error names instead of the nearest
_LAUNCHERS = ("hydra", "joblib", "submitit", "ray")


def one_line(error: BaseException) -> str | None:
    """Returns the message for a user's error; None for a fault in the program, or if the output cannot be written."""
    match error:
        case CbatchError():
            text = with_notes(error) or f"{type(error).__name__}, raised without a message"
        case OSError() if is_of_output(error):
            return None
        case OSError() if error.filename:
            text = f"{error.filename}: {error.strerror}; run where it can be read and written"
        case MemoryError():
            text = f"out of memory ({error}); lower the largest setting, such as workload.num_requests or kv_tokens"
        case BrokenExecutor():
            text = "a worker process was killed, perhaps out of memory; give a smaller hydra.launcher.n_jobs=N"
        case _:
            modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)]
            if not modules or modules[-1].partition(".")[0] not in _LAUNCHERS:
                return None
            text = f"hydra/launcher: {_first_line(error)}"
    return " ".join(text.split())


def with_notes(error: BaseException) -> str:
    """Returns the message of an error with its notes."""
    return "; ".join(filter(None, [str(error).strip(), *getattr(error, "__notes__", ())]))


def is_of_output(error: BaseException) -> TypeGuard[OSError]:
    """Returns whether an error means that standard output cannot be written. File errors name the file, or are a ResultsError."""
    if isinstance(error, BrokenPipeError):
        return True
    return isinstance(error, OSError) and error.errno == ENOSPC and not error.filename


def output_text(error: OSError) -> str:
    return f"standard output: {error.strerror}; send it elsewhere; finished results are kept"


def explain(error: Exception, name: str, overrides: Sequence[str]) -> str:
    """Returns a line for one of Hydra's errors. name: the command's file in conf/. overrides: the composed overrides."""
    match error:
        case MissingConfigException() if error.missing_cfg_file:
            return _unknown_option(str(error.missing_cfg_file), error.options or ())
        case OverrideParseException():
            return f"{error.override}: cannot be read ({_first_line(error)}); give key=value, or \"key='any text'\""
        case MarkedYAMLError() if error.problem_mark is not None:
            return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}; correct the file"
        case RecursionError() | OSError():
            return f"{' '.join(overrides)}: a file holds a number, or an alias of itself ({_first_line(error)}); correct it"
    cause = error.__cause__ or error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(str(cause.full_key), name, overrides)
    if isinstance(cause, InterpolationKeyError) and (asked := re.search(r"key '(.+?)' not found", str(cause))):
        keys = default_keys(name, [])
        near = get_close_matches(asked[1], [*keys, *dict(flat(keys))], 1)
        remedy = f"did you mean ${{{near[0]}}}?" if near else "--help lists all keys"
        return f"{cause.full_key or ' '.join(overrides)}: ${{{asked[1]}}}: no such key; {remedy}"
    if "No match in the defaults list" in str(error):
        return _no_such_group(str(error).split("'")[1], overrides)
    if "An item is already at" in str(error):
        added = next(text for text in overrides if text.startswith("+") and key_of(text) == str(error).split("'")[1])
        return f"{added}: adds a key that is there; give {added.lstrip('+')}"
    if removed := [key_of(text) for text in overrides if text.startswith("~") and f"'{key_of(text)}'" in str(error)]:
        return _unknown_key(removed[0], name, overrides)
    key = getattr(error, "full_key", None) or " ".join(overrides)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key}: has no value; give {key}={'FILE' if key.endswith(('path', 'dataset')) else 'VALUE'}"
    return ": ".join([key, *dict.fromkeys(_first_line(part) for part in (error, cause))])


def _no_such_group(group: str, overrides: Sequence[str]) -> str:
    text = next((text for text in overrides if text.partition("=")[0] == group), group)
    remedy = f"give +slo@workload.{text}" if group == "slo" else f"the groups are {', '.join(GROUPS)}"
    return f"{text}: is not a group of this command; {remedy}"


def _unknown_option(missing: str, options: Sequence[str]) -> str:
    group, _, option = missing.partition("/") if missing.partition("/")[0] in GROUPS else missing.rpartition("/")
    plain = filter(str.isidentifier, options)  # the other options have arguments: see `option_arguments`
    known = {*plain, *(path.stem for path in (CONFIG_FOLDER / group).glob("*.yaml"))}
    yours = f"{group}=my_module.My{group.capitalize()}"
    remedy = f"; for yours give the import path of its class, {yours}, or its --config-dir" * (group in BY_IMPORT_PATH)
    remedy = remedy or _REMEDIES.get(group.partition("/")[0], "")
    return f"{group}={option}: no such {group}; {nearest(option, known)}{remedy}"


def _unknown_key(key: str, name: str, overrides: Sequence[str]) -> str:
    """Suggests arguments of the class that the key's section builds, or else keys with the same ending or similar keys."""
    (section, _, argument), whole = key.rpartition("."), dict(text.partition("=")[::2] for text in overrides)
    if section in GROUPS and "_target_" in whole.get(section, ""):
        yours = "my_module.MyClass(KEY=VALUE)" if section in BY_IMPORT_PATH else "NAME of a file in --config-dir"
        return f"{section}={whole[section]}: would be mixed with the keys of the option in use; give {section}={yours}"
    first = [override.partition(",")[0] for override in overrides if "={" not in override]  # first of a sweep's values
    options = [text for text in first if text.partition("=")[0] in (*GROUPS, "hydra.searchpath")]
    keys = default_keys(name, options if options != list(overrides) else [])  # else the options have the key
    if of_pool := _of_pool(key, overrides, (keys.get("backend") or {}).get("pools") or {}):
        return of_pool
    values = dict(flat(keys))
    given = dict(text.partition("=")[::2] for text in first)
    if target := given.get(f"{section}._target_", values.get(f"{section}._target_")):
        check_argument(key, target)
        return f"{key}: is not in the settings; +{key}=... adds it to the arguments of {target}"
    if key in GROUPS:  # an argument of a group without an option, or with several in a sweep
        text = next((text for text in overrides if text.startswith(f"{key}.")), key)
        in_sweep = f"'{key}=NAME({text.partition('.')[2]})'"
        return f"{text}: belongs to no option of {key}; give {key}=NAME, in a sweep {in_sweep}"
    if section in values and values[section] is None:
        return f"{key}: is not in the settings; +{key}=... adds it"
    near = [known for known in values if known.endswith(f".{argument}")]
    inside = [known for known in values if section and known.startswith(f"{section}.")]
    if inside and len(inside) <= _FEW and not any(known.startswith(f"{section}.") for known in near):
        return f"{key}: no such key; {section} has {', '.join(known.removeprefix(f'{section}.') for known in inside)}"
    alike = inside or [*values, *keys, "seeds"]
    if not near and name != "server" and (elsewhere := _in_open_loop(argument, name)):
        return f"{key}: no such key; workload={OPEN_LOOP} has {elsewhere}"
    near = near or get_close_matches(key, [*alike, *GROUPS, "hydra/launcher"], 1) or ["one that --help lists"]
    return f"{key}: no such key; did you mean {' or '.join(near[:3])}?"


def _of_pool(key: str, overrides: Sequence[str], known: Mapping[str, Any]) -> str:
    """Returns the error for a key of a pool, such as `d.kv_tokens`; empty if it resembles none. known: the pools of the options."""
    given = next((key_of(text) for text in overrides if f"{key_of(text)}.".startswith(f"{key}.")), "")
    pool, _, argument = given.removeprefix("backend.pools.").rpartition(".")
    pools = "".join(text for text in overrides if key_of(text) == "backend.pools")
    near = get_close_matches(argument, Pool.__dataclass_fields__, 1)
    if not near or not pool or not (pool in known or re.search(rf"\b{re.escape(pool)}:", pools)):
        return ""
    return f"{given}: no such key; did you mean ++backend.pools.{pool}.{near[0]}?"


def _in_open_loop(argument: str, name: str) -> str:
    """Returns the key of open loops that ends in this name, such as `rate`; empty if there is none."""
    with suppress(ConfigError):
        known = dict(flat(default_keys(name, [f"workload={OPEN_LOOP}"])))
        return next((key for key in known if key.endswith(f".{argument}")), "")
    return ""  # a command without workloads


def default_keys(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Returns the unresolved keys of a command with these options. name: the command's file in conf/.

    Raises ConfigError if there is no such option.
    """
    try:
        with nullcontext() if GlobalHydra.instance().is_initialized() else initialized():  # initialized in a sweep
            config = compose_config(name, parse(options), version_of_files(options))
            keys: Any = OmegaConf.to_container(config, resolve=False)
    except HydraException as error:
        raise ConfigError(explain(error, name, options)) from error
    return {key: value for key, value in keys.items() if key != "hydra"}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
