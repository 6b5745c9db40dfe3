"""Objects from sections of the configuration, by Hydra's `_target_`; what goes wrong becomes one line that names the key."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cbatch import CbatchError, ConfigError
from cbatch.validation import nearest

_OWN_KEYS = ("_target_", "_convert_", "_partial_", "_recursive_", "_args_")


def construct(section: str, config: object, needs: Sequence[str] = ()) -> Any:
    """Build the object that a section describes, and those within it.

    needs: attributes that it must have to be of use.

    Raises:
        ConfigError: no section, a target that cannot be imported, an argument that it does not take or lacks, what it
            raised, or another kind of object than is needed.
        CbatchError: as raised by the target.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("_target_"), str):
        raise ConfigError(
            f"{section}={_short(config)}: does not say what to build; choose an option with {section}=NAME"
        )
    _check(section, config)
    built = _built(section, config)
    for name in needs:
        if not hasattr(built, name):
            raise ConfigError(
                f"{section}._target_={config['_target_']} makes an object without {name}, which is no "
                f"{section}; choose an option with {section}=NAME"
            )
    return built


def _built(section: str, config: Mapping[str, Any]) -> Any:
    try:
        return instantiate(dict(config), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, CbatchError):
            raise cause from None
        raise ConfigError(f"{section}._target_={config['_target_']}: {_why(cause or error)}") from error


def _check(path: str, config: Mapping[str, Any]) -> None:
    """Compare the keys of a section with the parameters of its target, and so on below."""
    if "_target_" in config:
        parameters = _parameters(_locate(path, config["_target_"]))
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for key in config:
            if key not in parameters and key not in _OWN_KEYS and not open_ended:
                raise ConfigError(
                    f"{path}.{key}: {config['_target_']} takes no such argument; "
                    f"{nearest(key, parameters)}{_remedy(path, key)}"
                )
        for name, parameter in parameters.items():
            required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if required and parameter.kind is not parameter.VAR_POSITIONAL and name not in config:
                raise ConfigError(f"{path}.{name}: {config['_target_']} needs it; add +{path}.{name}=...")
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check(f"{path}.{key}", value)


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    """What the target takes; of what is built into Python that is not always known."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def _locate(path: str, target: object) -> Any:
    """The class or function at an import path."""
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise ConfigError(f"{path}._target_={target}: give an import path, as in my_package.my_module.MyClass")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{path}._target_={target}: {module_name} cannot be imported ({_why(error)}); "
            "run in the folder that holds it, or install it"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise ConfigError(
            f"{path}._target_={target}: {module_name} has no class or function {name}; "
            f"{nearest(name, getattr(module, '__all__', own))}"
        )
    return found


def _remedy(path: str, key: str) -> str:
    return f"; if policy=NAME brought it, give policy=external instead, or ~{path}.{key}" if path == "policy" else ""


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _why(error: BaseException) -> str:
    """The innermost reason, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
