"""Builds objects from sections of the configuration with Hydra's `_target_`. Errors are one line that names the key."""

import inspect
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache
from inspect import isclass, isfunction
from pathlib import Path
from pkgutil import resolve_name
from sysconfig import get_path
from traceback import extract_tb
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from cbatch import CbatchError, ConfigError, Eviction
from cbatch.errors import Interruption, type_and_message
from cbatch.validation import nearest, shorten
from policies.evictions import LRU

_ROOT, _OURS = Path(__file__).parents[2], ("cbatch", "experiments", "policies")
_FRAMEWORK = (str(_ROOT / package) for package in ("cbatch", "experiments"))
_NOT_THE_USERS = ("<frozen", *_FRAMEWORK, *map(get_path, ("stdlib", "purelib", "platlib")))
"""Path prefixes of code in Python, installed packages and this framework."""

_PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", NoneType: "null"}
"""Types of values on a command line, with their names in errors."""

_LISTS, _MAPPINGS = (Sequence, list), (Mapping, dict)
_OWN_KEYS = ("_target_", "_convert_", "_recursive_")  # Hydra's `_convert_` and `_recursive_` have no effect

_WORKLOADS = {"open_loop": "OpenLoop", "chat": "Chat", "trace": "TraceReplay"}
"""Options of `workload`, with their classes, that errors name for keys that another option does not have."""

BY_IMPORT_PATH = ("policy", "eviction", "chunking", "predictor", "autoscale", "drafter", "drafting")
"""Groups whose option may be the import path of a class."""

PASSED_ON = ("chunking", "predictor", "chunk", "seed")
"""Keys that have an effect only if a section refers to them, as policies do with `${chunk}`. `chunking` and `predictor` are themselves
sections that refer to `chunk` and `seed`."""


def construct(path: str, section: object, needs: Sequence[str] = ()) -> Any:
    """Builds the object that a section describes, including nested objects. needs: attributes that the object must have.

    Raises ConfigError like `check_section`, and if the target fails or lacks an attribute; CbatchError if the target raises it.
    """
    checked = check_section(path, section)
    target, built = _typed(path, checked["_target_"]), call(path, checked, build_arguments(path, checked))
    for name in needs:
        if not hasattr(built, name):
            problem = f"the object has no {name}, so it is not a {path}"
            remedies = {"plan": "define plan(self, view)", "drafter": "subclass cbatch.drafts.Drafter"}
            remedies["drafting"] = "subclass policies.drafting.DraftingRule"
            remedy = remedies.get(name) or remedies.get(path, f"choose an option with {path}=NAME")
            raise ConfigError(f"{target}: {problem}; {remedy}")
    return built


def build_arguments(path: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a section's target, with nested objects built."""
    return {key: _built(f"{path}.{key}", value) for key, value in section.items() if key not in _OWN_KEYS}


def call(path: str, section: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a section's target. Raises like `construct`."""
    target = _typed(path, section["_target_"])
    try:
        built = locate(path, section["_target_"])(**arguments)
    except CbatchError:
        raise
    except SystemExit as error:
        raise ConfigError(f"{target}: {_why(error)}; it must not end the process") from error
    except Exception as error:
        _check_types(path, section)
        raise ConfigError(f"{target}: {_why(error)}") from error
    _check_types(path, section)
    return built


def _built(path: str, value: object) -> Any:
    match value:
        case {"_target_": _}:
            return construct(path, value)
        case Mapping():
            return {key: _built(f"{path}.{key}", item) for key, item in value.items()}
        case list():
            return [_built(f"{path}[{place}]", item) for place, item in enumerate(value)]
    return value


def check_section(path: str, section: object) -> Mapping[str, Any]:
    """Returns a section after checking that it describes an object, and that its targets can be imported and accept its keys.

    Raises ConfigError if it is no such section, a target cannot be imported, or an argument is unknown or missing.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("_target_"), str):
        text = f"{path}={shorten(section)}"
        raise ConfigError(f"{text}: has no _target_, the class to build; give one, or choose with {path}=NAME")
    _check(path, section)
    return section


def _check(path: str, config: Mapping[str, Any]) -> None:
    """Compares the keys of a section and its nested sections with the parameters of their targets."""
    if "_target_" in config:
        target = config["_target_"]
        parameters = parameters_of(locate(path, target))
        for key in (key for key in config if key not in _OWN_KEYS):
            remedy = f"; ~{path}.{key} removes the one that policy=NAME set" * (path == "policy" and key in PASSED_ON)
            remedy = remedy or f"; '{path}={{_target_: {target}, ...}}' leaves out what a preset sets" * ("." in path)
            check_argument(f"{path}.{key}", target, remedy)
        for name, parameter in parameters.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if parameter.default is parameter.empty and not variadic and name not in config:
                if path == "policy" and isfunction(locate(path, target)):
                    raise ConfigError(f"{_typed(path, target)}: is a function; give a class with a method plan(view)")
                passed_on = path == "policy" and name in PASSED_ON
                remedy = f"'+{path}.{name}=${{{name}}}'" if passed_on else f"+{path}.{name}=..."
                raise ConfigError(f"{path}.{name}: {target} needs it; add {remedy}")
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check(f"{path}.{key}", value)


def check_argument(key: str, target: str, remedy: str = "") -> None:
    """Raises ConfigError if the target of the key's section does not accept the argument."""
    path, _, name = key.rpartition(".")
    parameters = parameters_of(located := locate(path, target))
    if not takes(parameters, name):
        if getattr(located, "requests", None) == ():
            raise ConfigError(f"{key}: a server's clients send its requests; {nearest(name, parameters)}")
        if path == "backend" and not parameters:
            raise ConfigError(f"{key}: backend=auto has no {name}; give backend=sim, cpu or cuda")
        # `compose` gives the `chunk` of `policy=NAME(chunk=N)` to `chunking`
        lifted = {"chunk"} - {name} if path == "policy" and "chunking" in parameters else set()
        choice = f"'{path}={{_target_: ...}}'" if "." in path else f"{path}=NAME"
        none = f"it takes none; choose another option with {choice}"
        known = nearest(name, [*parameters, *lifted]) if parameters else none
        for option, kind in _WORKLOADS.items() if path == "workload" else ():
            if name in parameters_of(locate(path, f"experiments.workloads.{kind}")):
                known = f"use workload={option}, which does; {known}"
                break
        raise ConfigError(f"{key}: {target} takes no such argument; {known}{remedy}")


def takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    """Returns whether these are the parameters of a target that accepts an argument of this name."""
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _check_types(path: str, config: Mapping[str, Any]) -> None:
    """Compares the values in a section with the annotations of the target."""
    parameters = parameters_of(locate(path, config["_target_"])) if "_target_" in config else {}
    for key, value in config.items():
        annotation = parameters[key].annotation if key in parameters else Any
        fit, words = fits(value, annotation), words_of(annotation)
        if fit and isinstance(value, Mapping):
            _check_types(f"{path}.{key}", value)
        elif value is None and isclass(annotation) and annotation is not Any:
            needed = f"one; choose it with {key}=NAME" if key in PASSED_ON else words or "a value"
            raise ConfigError(f"{path}.{key}=null: {config['_target_']} needs {needed}")
        elif not fit:
            raise ConfigError(f"{path}.{key}={shorten(value)}: give {words}")


def fits(value: object, annotation: Any) -> bool:
    """Returns whether a value may be of an annotated type: of a type that is unknown here it may."""
    return any(_fits(value, part) for part in _parts(annotation))


def _fits(value: object, part: Any) -> bool:
    if isclass(part) and part in _PLAIN:  # a NaN is of no use to any parameter: all comparisons with it are false
        return value == value and (type(value) is part or (type(value) is int and part is float))
    if (kind := get_origin(part)) in _LISTS:
        return isinstance(value, list) and all(fits(item, get_args(part)[0]) for item in value)
    if kind in _MAPPINGS:
        return isinstance(value, Mapping) and all(fits(item, get_args(part)[1]) for item in value.values())
    return not _is_ours(part) or type(value) not in (*_PLAIN, list)


def words_of(annotation: Any) -> str:
    """Returns the values of an annotated type in words, for errors; empty if the type is unknown here."""
    words = [_words(part) for part in _parts(annotation)]
    return " or ".join(sorted(filter(None, words), key="null".__eq__))


def _words(part: Any) -> str:
    if isclass(part) and part in _PLAIN:
        return _PLAIN[part]
    if (kind := get_origin(part)) in _LISTS:
        return f"a list, each item {item}" if (item := words_of(get_args(part)[0])) else ""
    if kind in _MAPPINGS:
        return f"values by name, each {item}" if (item := words_of(get_args(part)[1])) else ""
    return f"the keys of {part.__name__}" if _is_ours(part) else ""


def _parts(annotation: Any) -> Sequence[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_ours(part: Any) -> bool:
    """Returns whether a class is built from the keys of a section, never from a plain value."""
    return isclass(part) and part.__module__.partition(".")[0] in _OURS


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a target; arbitrary keywords if Python does not know them, as for some built-in functions."""
    return _parameters_of(target) if isinstance(target, Hashable) else _parameters_of.__wrapped__(target)


@lru_cache(1024)  # each run of a sweep asks some 130 times, for fewer than 20 classes
def _parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    for evaluates in (True, False):  # annotations that are text, unless their names are unknown at runtime
        with suppress(NameError, AttributeError, TypeError, ValueError):
            return inspect.signature(target, eval_str=evaluates).parameters
    return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def locate(path: str, target: object) -> Any:
    """Imports a class or function. Raises ConfigError if it does not exist, or if its module raises an error."""
    typed, (module, _, name) = _typed(path, target), str(target).rpartition(".")
    try:
        located = resolve_name(f"{module}:{name}")
    except (KeyboardInterrupt, Interruption):
        raise
    except BaseException as error:  # includes SystemExit
        remedy = "the class must be importable from the current folder: correct the name, change the folder or install the module"
        if near := get_close_matches(name, dir(sys.modules.get(module)), 1):  # the module has no such class
            remedy = f"did you mean {module}.{near[0]}?"
        folder = Path(module.partition(".")[0])
        if folder.name in _OURS and folder.is_dir() and not folder.samefile(_ROOT / folder):
            remedy = f"{folder} is a package of cbatch: give your folder {folder}/ another name"
        raise ConfigError(f"{typed}: cannot be imported ({_why(error)}); {remedy}") from error
    if not callable(located):
        kind = type(located).__name__
        raise ConfigError(f"{typed}: is a {kind}; give the import path of a class, as in my_package.my_module.MyClass")
    return located


def _typed(path: str, target: object) -> str:
    """Returns a target as key and value: policy=my_module.Mine, or backend.router._target_=my_module.Mine."""
    return f"{path}={target}" if path in BY_IMPORT_PATH else f"{path}._target_={target}"


def _why(error: BaseException) -> str:
    """Returns the innermost cause on one line, with the file and line of the user's code that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: " if frames else ""
    return where + type_and_message(error)


def check_eviction(eviction: object, prefix_cache: bool) -> Eviction:
    """Returns the eviction. Raises ConfigError if it is not an `Eviction`, defines no order, or there is no prefix cache."""
    name = f"eviction={type(eviction).__name__}"
    if not isinstance(eviction, Eviction):
        raise ConfigError(f"{name}: is not an eviction; derive it from cbatch.Eviction")
    if type(eviction).keys is Eviction.keys and type(eviction) is not LRU:
        raise ConfigError(f"{name}: has no method keys(blocks, now); define it, or give eviction=lru")
    hooks = [hook for hook in dir(Eviction) if hook.startswith("on_")]
    if unknown := [hook for hook in dir(eviction) if hook.startswith("on_") and hook not in hooks]:
        raise ConfigError(f"{name}: {unknown[0]} would never be called; the hooks are {', '.join(hooks)}")
    check_evicts(name, prefix_cache)
    return eviction


def check_evicts(text: str, prefix_cache: bool) -> None:
    if not prefix_cache:
        problem = f"{text}: has no effect with prefix_cache=false, which keeps no block"
        raise ConfigError(f"{problem}; give prefix_cache=true")
