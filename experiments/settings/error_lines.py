"""Turns errors of Hydra and OmegaConf into one line with the key, the value and what to give instead."""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, MissingMandatoryValue
from yaml import MarkedYAMLError, YAMLError

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest
from experiments.settings.construct import takes
from experiments.settings.settings import GROUPS
from experiments.store.text import flat

CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "conf"

_RAY_ADDRESS = "hydra.launcher.ray.init.address=HOST:PORT (with RAY_AUTH_MODE=token in the environment for a token)"
_ABSENT = object()
_MOST_CHOICES = 50  # that are tried to explain an unknown key
_HYDRAS = ("hydra", "omegaconf", "joblib", "submitit")
_LAUNCHERS = ("hydra/launcher/joblib", "hydra/launcher/ray", "hydra/launcher/submitit")


def search_path(config_dir: str) -> str:
    """Returns the override by which `compose` finds the groups in a folder; raises ConfigError if there is none."""
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir={config_dir}: no such folder; give the one that holds your groups")
    return f"hydra.searchpath=['file://{Path(config_dir).resolve()}']"


def one_line(
    error: BaseException, overrides: Sequence[str] = (), config_dir: str | None = None, name: str = "config"
) -> str | None:
    """The message for a user error; None for any other, and if the reader of the output has ended.

    overrides, config_dir: of the command line. name: of the command's file of settings in conf/.
    """
    without = partial(_without_keys, name, overrides, config_dir)
    match error:
        case CbatchError():
            text = str(error).strip() or f"{type(error).__name__}, raised without a message"
        case MissingConfigException():
            text = _unknown_option(error)
        case OverrideParseException():
            text = f"{error.override}: cannot be read ({_parse_reason(error.message)}); give key=value"
        case ConfigCompositionException():
            text = _composition(error, without)
        case MissingMandatoryValue():
            text = f"{error.full_key}: has no value; give {error.full_key}=..."
        case ConfigKeyError():
            text = _unknown_key(str(error.full_key), without(str(error.full_key)))
        case InterpolationResolutionError():
            text = f"{error.full_key}: {_first_line(error)}; correct the ${{...}} in it"
        case BrokenPipeError():
            return None
        case ConnectionError():
            text = f"hydra/launcher=ray_cluster: {_first_line(error)}; start one with ray start --head, or give {_RAY_ADDRESS}"
        case OSError() if error.filename:
            text = f"{error.filename}: {error.strerror}; run where it can be read and written"
        case YAMLError():
            text = _yaml(error)
        case UnicodeDecodeError() if any(_is_hydra(frame) for frame, _ in walk_tb(error.__traceback__)):
            text = "a file of the configuration is not UTF-8 text; convert it, or choose another option"
        case MemoryError():
            remedy = "lower the largest setting, such as workload.num_requests, batch or kv_tokens"
            text = f"out of memory ({error}); {remedy}"
        case BrokenExecutor():
            text = "a worker process of the sweep was killed, perhaps out of memory; give a smaller hydra.launcher.n_jobs=N"
        case _ if _is_hydra(list(walk_tb(error.__traceback__))[-1][0]):  # raised it
            given, reason = overrides, _first_line(error)
            if reason.startswith("Config group override must be"):
                groups = "|".join((*GROUPS, "slo"))
                given = [
                    override
                    for override in overrides
                    if re.fullmatch(rf"({groups}|)=(null|true|false|[^a-z]*)", override)
                ]
                reason = "a group takes the name of one of its options; give GROUP=NAME"
            text = f"{' '.join(given)}: {reason}".removeprefix(": ")
        case _:
            return None
    return " ".join(text.split())


def _unknown_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    if missing.startswith(_LAUNCHERS):
        return f"{missing.replace('launcher/', 'launcher=')}: is not installed; pip install -e '.[sweep]'"
    ours = missing.partition("/")[0] in GROUPS
    group, _, option = missing.partition("/") if ours else missing.rpartition("/")
    if not group:
        return f"{option}: no such file of settings; correct the defaults that name it"
    options = error.options or [path.stem for path in (CONFIG_FOLDER / group).glob("*.yaml")]
    files = [name for name in options if not set("(.") & set(name)] if group == "policy" else options  # see `choices`
    own = "; for one of yours give the import path of its class, policy=my_module.MyPolicy" if group == "policy" else ""
    meant = "cuda" if missing == "backend/gpu" else option
    return f"{group}={option}: no such {group}; {nearest(meant, files)}{own}"


def _parse_reason(message: str) -> str:
    """The reason in a parser's message, whose last line is a link."""
    if message.startswith("LexerNoViableAlt"):
        return "a space, quote or other character that needs quotes around the value: \"key='...'\""
    reason = message.splitlines()[-2]
    if "missing EQUAL" in reason:
        return "there is no ="
    found = re.search(r"input '(.+?)'", reason)
    return reason if found is None else f"unexpected {'end' if found[1] == '<EOF>' else repr(found[1])}"


def _composition(error: ConfigCompositionException, without: Callable[[str], DictConfig]) -> str:
    message = str(error)
    if found := re.match(r"Could not (?:override|delete from config\.) '([^']+)'", message):
        section, key = found[1], str(getattr(error.__cause__, "full_key", None) or found[1])
        config = without(key)
        built = key != section and OmegaConf.select(config, f"{section}._target_", default=None)
        replace = f"; to replace the section give '~{section}' '+{section}={{...}}'" if built else ""
        return _unknown_key(key, config, section.removeprefix(key)) + replace
    if found := re.match(r"Ambiguous value for argument '(.+)'", message):
        return f"{found[1]}: several values are a sweep; add -m to experiments.run, or quote the value"
    if found := re.match(r"Could not append to config. An item is already at '(.+)'", message):
        return f"{found[1]}: exists already; give it without the +"
    return ": ".join(_first_line(cause) for cause in (error, error.__cause__) if cause is not None)


def _unknown_key(key: str, config: DictConfig, rest: str = "") -> str:
    """Names the known keys nearest to an unknown one. config: the configuration without it. rest: what was given after it."""
    parent, _, name = key.rpartition(".")
    section = OmegaConf.select(config, parent, default=_ABSENT) if parent else config
    if section is _ABSENT:
        return _unknown_key(parent, config, f".{name}{rest}")
    if other := _other_name(parent, config):
        return f"{key}: {parent} is ${{{other}}}; give {other}.{name}=..."
    if isinstance(section, Mapping) and name in takes(section.get("_target_")):
        return f"{key}: is left at its default by this section; to set it give +{key}=..., with a plus"
    if section is None:
        return f"{key}: {parent} is null; give '{parent}={{{name}: ...}}'"
    group = parent.split(".")[0] if parent else ""
    others = section if isinstance(section, Mapping) else {}
    known = [str(other) for other in others if other not in ("hydra", "_target_")]
    choice = config.hydra.runtime.choices.get(group)
    of = f" of {group}={choice}" if choice else ""
    own = "; it is chosen when the run starts: give backend=sim, cpu or cuda for its keys" if choice == "auto" else ""
    if group == "policy":
        own = f"; for an argument of your own policy give +{key}=..., if it is one of several policy='NAME({name}=...)'"
    elsewhere = "" if own else _elsewhere(key, rest, group, config)
    return f"{key}: no such key{of}; {elsewhere or nearest(name, known)}{own}"


def _elsewhere(key: str, rest: str, group: str, config: DictConfig) -> str:
    """Asks whether a key of this name deeper in the configuration was meant, or of another option; empty if there is none."""
    name = key.rpartition(".")[2]
    if (key, rest) == ("slo", ""):
        return "requests have objectives; give +slo@workload.slo=NAME for a file of conf/slo, or 'workload.slo={ttft: ...}'"
    chosen: Any = OmegaConf.to_container(config, resolve=False)
    own = {key: value for key, value in chosen.items() if key != "hydra" and group in ("", key)}
    meant = [key for key, _ in flat(own) if key.endswith(f".{name}{rest}")]
    if rest:  # an empty section
        inner = rest.removeprefix(".").replace(".", ": {") + ": ..." + "}" * rest.count(".")
        meant += [f"'{key}={{{inner}'" for key, value in flat(own) if key.endswith(f".{name}") and value is None]
    if not meant:
        others = _of_other_options(f"{name}{rest}", [group] if group else GROUPS)
        if options := others.get(f"{key}{rest}"):
            return f"give {group}={' or '.join(options)} for it"
        meant = [f"{each}, of {each.partition('.')[0]}={' or '.join(options)}" for each, options in others.items()]
    if not group:
        meant += [f"{each}={name}" for each in GROUPS if (CONFIG_FOLDER / each / f"{name}.yaml").is_file()]
        meant += [f"hydra/{name}" for each in ("launcher", "sweeper") if name == each]
    return f"did you mean {' or '.join(meant[:3])}?" if meant else ""


def _of_other_options(key: str, groups: Sequence[str]) -> dict[str, list[str]]:
    """The keys that end so in most files of these groups, each with up to three options that have it, the plainest first."""
    found: dict[str, list[tuple[bool, int, str]]] = {}
    for path in sorted(path for group in groups for path in (CONFIG_FOLDER / group).glob("*.yaml")):
        options: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        based, size = "_target_" not in options, len(path.read_text())  # an option that is based on others has few keys
        for each, _ in flat(options):
            if f".{each}".endswith(f".{key}"):
                group = f"{path.parent.name}."
                found.setdefault(group + each.removeprefix(group), []).append((based, size, path.stem))
    most = max(map(len, found.values()), default=0)
    return {each: [name for *_, name in sorted(options)[:3]] for each, options in found.items() if len(options) == most}


def _other_name(section: str, config: DictConfig) -> str | None:
    """The section that an interpolation stands for, as in `policy.chunking: ${chunking}`; None for other sections."""
    parent, _, name = section.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not (name and isinstance(holder, DictConfig) and OmegaConf.is_interpolation(holder, name)):
        return None
    return str(OmegaConf.to_container(holder, resolve=False)[name]).strip("${}")  # type: ignore[call-overload, index]


def _without_keys(name: str, overrides: Sequence[str], config_dir: str | None, key: str) -> DictConfig:
    """Compose the configuration with the chosen groups, in a sweep the first that lack `key`, and no other override."""
    own = [search_path(config_dir)] if config_dir else []
    with initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
        try:
            for choices in islice(product(*map(_choices, overrides)), _MOST_CHOICES):
                config = compose(name, [*own, *chain(*choices)], return_hydra_config=True)
                if OmegaConf.select(config, key, default=_ABSENT) is _ABSENT:
                    break
            return config
        except Exception:  # one of the choices is wrong as well
            return compose(name, return_hydra_config=True)


def _choices(override: str) -> list[list[str]]:
    """Returns an override that chooses an option, once for each option of a sweep; for others, nothing to choose."""
    group = override.partition("=")[0]
    if group not in GROUPS:
        return [[]]
    parsed = OverridesParser.create().parse_override(override)
    swept = parsed.sweep_string_iterator() if parsed.is_sweep_override() else ()
    return [[f"{group}={option}"] for option in swept] or [[override]]


def _yaml(error: YAMLError) -> str:
    """Name the file, and the line if it is known."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}; correct the file"
    return f"{getattr(error, 'name', 'a file of the configuration')}: {_first_line(error)}; correct the file"


def _first_line(error: BaseException) -> str:
    if not str(error).strip() and error.__cause__ is not None:
        return _first_line(error.__cause__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _is_hydra(frame: FrameType) -> bool:
    """Whether a frame runs code of Hydra, its configuration library or one of its launchers."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _HYDRAS
