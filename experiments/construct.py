"""Objects from sections of the configuration, by Hydra's `_target_`; what goes wrong becomes one line that names the key."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cbatch import CbatchError, ConfigError
from experiments.settings import nearest

_OWN_KEYS = ("_target_", "_convert_", "_partial_", "_recursive_", "_args_")


def construct(section: str, config: Mapping[str, Any]) -> Any:
    """Build the object that a section describes, and those within it.

    Raises:
        ConfigError: a target that cannot be imported, an argument that it does not take or lacks, or what it raised.
        CbatchError: as raised by the target.
    """
    _check(section, config)
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
        parameters = inspect.signature(_locate(path, config["_target_"])).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for key in config:
            if key not in parameters and key not in _OWN_KEYS and not open_ended:
                raise ConfigError(f"{path}.{key}: {config['_target_']} takes no such argument; "
                                  f"{nearest(key, parameters)}{_remedy(path, key)}")  # fmt: skip
        for name, parameter in parameters.items():
            required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            if required and parameter.kind is not parameter.VAR_POSITIONAL and name not in config:
                raise ConfigError(f"{path}.{name}: {config['_target_']} needs it; add +{path}.{name}=...")
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check(f"{path}.{key}", value)


def _locate(path: str, target: object) -> Any:
    """The class or function at an import path."""
    module_name, _, name = str(target).rpartition(".")
    if not module_name:
        raise ConfigError(f"{path}._target_={target}: give an import path, as in my_package.my_module.MyClass")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise ConfigError(f"{path}._target_={target}: {module_name} cannot be imported ({_why(error)}); "
                          "run in the folder that holds it, or install it") from error  # fmt: skip
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise ConfigError(f"{path}._target_={target}: {module_name} has no class or function {name}; "
                          f"{nearest(name, getattr(module, '__all__', own))}")  # fmt: skip
    return found


def _remedy(path: str, key: str) -> str:
    return (
        f"; for a policy from outside: policy=external policy._target_=..., or ~{path}.{key}"
        if path == "policy"
        else ""
    )


def _why(error: BaseException) -> str:
    """The innermost reason, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
