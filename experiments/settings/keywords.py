"""Settings from Python: keywords replace a command line, and objects may replace the names of policy and workload."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from os import PathLike, fspath
from typing import Any

import numpy as np

from cbatch import ConfigError, Policy
from cbatch.described import name_of_class
from cbatch.validation import nearest, shorten
from experiments.keys import key_of
from experiments.settings.compose import compose, keys_within
from experiments.settings.construct import PASSED_ON, check_eviction, parameters_of
from experiments.settings.error_lines import OPEN_LOOP, default_keys
from experiments.settings.option_arguments import for_hydra
from experiments.settings.recipe import Recipe
from experiments.settings.settings import GROUPS, Composed, Settings, check_scaling, read_settings
from experiments.workloads import Workload

_OF_POLICY = ("drafting", "predictor", "chunking")
_SECTIONS = ("workload", "policy", "backend", "eviction", "runtime", "model", "autoscale", "drafter", *_OF_POLICY)
"""Groups whose keys are keywords by their last part: `rate` is `workload.arrivals.rate`. If two groups share a key, the first counts."""

_OBJECTS = {"policy": "plan", "workload": "requests", "eviction": "keys", "router": "choose", "autoscale": "wanted"}
"""Keywords that accept objects, and the method that each object must have."""

OF_FILES = ("decisions", "stream", "tables", "timeline")
_OF_COMMANDS = ("experiment", "other_code", "output", "sweep")


def settings_of(
    policy: Policy | str,
    workload: Workload | str,
    keys: Mapping[str, Any],
    config: str = "config",
    read: Callable[[Composed], Settings] = read_settings,
    caller: Callable[..., Any] | None = None,
) -> Settings:
    """Returns the settings of a run, or of a command with root keys of its own.

    Args:
        config, read: see `experiments.job.Command`.
        caller: the function that was given `keys`; errors name its own keywords, too.
        policy, workload: objects, or names as on the command line.
        keys: values by keyword. Keywords are keys of conf/config.yaml, or last parts of a group's keys. The values of `eviction`,
            `router` and `autoscale` may be objects.

    Raises:
        ConfigError: a keyword is unknown, a value cannot be used, or an object lacks the method of its kind.
        CbatchError: see `read_settings`.
    """
    given = {"policy": policy, "workload": workload, **keys}
    objects = {key: given.pop(key) for key in _OBJECTS if not isinstance(given.get(key, ""), str)}
    for key, value in objects.items():
        if isinstance(value, type):
            raise ConfigError(f"{key}={value.__name__}: is a class; give an object, as in {value.__name__}()")
        if not callable(getattr(value, _OBJECTS[key], None)):
            raise ConfigError(f"{key}={shorten(value)}: give a name, or an object with a method {_OBJECTS[key]}()")
    settings = read(compose(*_overrides(given, tuple(objects), config, caller), name=config))
    composed, sections = settings.composed, {key: section_of(value) for key, value in objects.items()}
    if "workload" in objects:
        served = _served(objects["workload"], settings, keys)
        sections["workload"] = section_of(served)
    backend = {"backend": {**composed.keys["backend"], "router": sections["router"]}} if "router" in sections else {}
    groups = {key: name_of_class(type(objects[key])) for key in sections if key in GROUPS}
    composed = replace(
        composed,
        keys={**composed.keys, **{key: sections[key] for key in groups}, **backend},
        overrides=[*composed.overrides, *(f"{key}={value!r}" for key, value in objects.items())],
        choices={**composed.choices, **groups},
    )
    replaced: dict[str, Any] = {"composed": composed}
    if "policy" in objects:
        replaced |= {"policy": Recipe(sections["policy"], objects["policy"]), "chunk": None}
    if "workload" in objects:
        within = isinstance(served, Workload)
        replaced["workload"] = served.within(settings.model.max_positions) if within else served
    if "eviction" in objects:
        replaced["eviction"] = check_eviction(objects["eviction"], settings.prefix_cache)
    if "autoscale" in objects:
        check_scaling(settings.backend)
        replaced["autoscale"] = objects["autoscale"]
    if "router" in objects:
        replaced["backend"] = replace(settings.backend, router=objects["router"])
    return replace(settings, **replaced)


def check_read(runs: Sequence[Settings]) -> None:
    """Raises ConfigError for a keyword that the policy of no run reads, such as `chunk` of one without chunks."""
    unread = set.intersection(*({*run.composed.unused} - {"seed"} for run in runs))  # with seeds= every run has a seed
    if text := next((text for text in runs[0].composed.overrides if key_of(text).split(".")[0] in unread), None):
        remedy = "leave it out; arguments of your own policy stand in its name: 'my_module.Mine(budget=512)'"
        raise ConfigError(f"{text}: has no effect, as no policy here reads it; {remedy}")


def _served(workload: Any, settings: Settings, keys: Mapping[str, Any]) -> Any:
    """Returns a workload with the seed and the objectives that keywords give. Raises ConfigError if it has no such field."""
    for key in {"seed", "slo"} & keys.keys():
        try:
            workload = replace(workload, **{key: getattr(settings, key)})
        except TypeError:
            raise ConfigError(f"{key}={keys[key]}: is not a field of {type(workload).__name__}; leave it out") from None
    return workload


def section_of(value: object) -> Any:
    """Returns an object as a section of the configuration: its class, and the arguments that it keeps as attributes."""
    match value:
        case None | str() | int() | float():
            return value
        case Mapping():
            return {str(key): section_of(item) for key, item in value.items()}
        case Sequence():
            return [section_of(item) for item in value]
    kind = type(value)
    arguments = {name: section_of(getattr(value, name)) for name in parameters_of(kind) if hasattr(value, name)}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **arguments}


def _overrides(
    keys: Mapping[str, Any], objects: tuple[str, ...], config: str, caller: Callable[..., Any] | None
) -> Iterator[str]:
    """Yields the command line that the keywords describe. objects: groups that are given as objects."""
    groups = {key: f"{key}={value}" for key, value in keys.items() if key in GROUPS}
    if other := next((key for key in groups if not isinstance(keys[key], str | Mapping)), None):
        raise ConfigError(f"{other}={shorten(keys[other])}: give the name of a file in conf/{other}")
    yield from groups.values()
    known = _known_keywords(tuple(groups.values()), objects, config)
    spelled = {"backend.router": "router"} if "router" in objects else dict[str, str]()
    for keyword, value in keys.items():
        if "policy" in objects and keyword in (*PASSED_ON, "drafting") and keyword != "seed":
            raise ConfigError(f"{keyword}={value}: has no effect on a policy object; give it to the policy")
        if keyword not in known:
            of_caller = parameters_of(caller).items() if caller else ()
            own = [name for name, of in of_caller if of.kind is of.KEYWORD_ONLY]
            others = {*known, *GROUPS} - {"_target_", *_OF_COMMANDS, *objects}
            names = [*filter(str.isidentifier, others), *own]
            hint = f"; settings of the {' and the '.join(objects)} are given to the object itself" * bool(objects)
            if not objects and keyword in _known_keywords((f"workload={OPEN_LOOP}",), (), config):
                raise ConfigError(f"{keyword}: no such keyword; workload={OPEN_LOOP!r} has it")
            raise ConfigError(f"{keyword}: no such keyword{hint}; {nearest(keyword, names)}")
        if (other := spelled.setdefault(known[keyword], keyword)) != keyword:
            raise ConfigError(f"{keyword}: is the same key as {other}; give only one of them")
        if keyword not in groups:
            yield f"{known[keyword]}={_text(keyword, value)}"


@lru_cache(64)
def _known_keywords(groups: tuple[str, ...], objects: tuple[str, ...], config: str) -> dict[str, str]:
    """Returns the command line's keys by keyword. groups: the chosen options."""
    keys = default_keys(config, for_hydra(groups))
    known: dict[str, str] = {}
    without = (*objects, *_OF_POLICY * ("policy" in objects))
    for section in reversed([name for name in _SECTIONS if name in keys and name not in without]):
        inside = [f"{section}.{key}" for key in keys_within(keys[section])]
        ends = Counter(key.rpartition(".")[2] for key in inside)
        known |= {key.rpartition(".")[2]: key for key in inside if ends[key.rpartition(".")[2]] == 1}
        known |= {key: key for key in inside}
    known |= {"requests": known["num_requests"]} if "num_requests" in known else {}
    unread = ("traces",) if "workload" in objects else ()  # the folder of traces is read only by named workloads
    return {**known, **{key: key for key in keys if key not in (*_OF_COMMANDS, *objects, *unread)}}


def _text(keyword: str, value: object) -> str:
    """Returns a value as text for Hydra's command line. Raises ConfigError for an object without such a text."""
    match value:
        case None | int() | float():
            return json.dumps(value)
        case np.generic():
            return _text(keyword, value.item())
        case str() | PathLike():
            text = fspath(value).replace('"', '\\"')
            return f'"{text}"'
        case Mapping():
            return "{" + ",".join(f"{key}:{_text(keyword, item)}" for key, item in value.items()) + "}"
        case Sequence():
            return "[" + ",".join(_text(keyword, item) for item in value) + "]"
    raise ConfigError(f"{keyword}={shorten(value)}: give a name, a number, a list or a dictionary")
