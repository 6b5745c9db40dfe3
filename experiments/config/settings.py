"""The root keys of a run, checked: each error names the key, the value and what to give instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cbatch import ConfigError
from cbatch.results.metrics import Objectives
from experiments.progress import Setting

GROUPS = ("policy", "chunking", "workload", "model", "runtime", "backend", "experiment")
"""Keys whose value is one of the files in a folder of conf/."""

_SECTIONS = ("policy", "workload", "model", "runtime", "backend")
"""Of these, those that a run cannot do without."""

MOST_REQUESTS_AT_ONCE = 1_000_000
"""Far above what any device holds; the engine's tables have a row for each."""

MOST_TOKENS = 2**31 - 1
"""Of a chunk, an iteration or the KV cache; its blocks are numbered in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What counts: see `cbatch.results.summary.summarize`."""

    warmup_requests: int
    drain_requests: int
    objectives: Objectives


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The root keys that are no groups; what each means is said in conf/config.yaml. None stands for `auto`."""

    chunk: int | None
    batch: int
    seed: int
    hardware: str
    kv_tokens: int | None
    block_size: int | None
    max_tokens: int | None
    metrics: Metrics
    output: str | None
    sweep: str
    progress: Setting
    timeline: bool
    decisions: bool


ROOT_KEYS = (*Settings.__dataclass_fields__, *GROUPS)
"""All that a configuration has outside its sections."""


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The root keys of a resolved configuration.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    check_known(config, ROOT_KEYS)
    check_there(config, [*Settings.__dataclass_fields__, *_SECTIONS])
    progress = config["progress"]
    return Settings(
        chunk=_tokens_or_auto("chunk", config["chunk"]),
        batch=whole("batch", config["batch"], 1, MOST_REQUESTS_AT_ONCE),
        seed=whole("seed", config["seed"], 0),
        hardware=str(config["hardware"]),
        kv_tokens=_tokens_or_auto("kv_tokens", config["kv_tokens"]),
        block_size=_tokens_or_auto("block_size", config["block_size"]),
        max_tokens=_tokens_or_auto("max_tokens", config["max_tokens"]),
        metrics=_read_metrics(config["metrics"]),
        output=None if config["output"] is None else str(config["output"]),
        sweep=str(config["sweep"]),
        progress="auto" if progress == "auto" else "on" if switch("progress", progress, "auto") else "off",
        timeline=switch("timeline", config["timeline"]),
        decisions=switch("decisions", config["decisions"]),
    )


def _read_metrics(config: object) -> Metrics:
    metrics = section("metrics", config, Metrics.__dataclass_fields__)
    check_there(metrics, Metrics.__dataclass_fields__, "metrics.")
    limits = section("metrics.objectives", metrics["objectives"], Objectives.__dataclass_fields__)
    for name, value in limits.items():
        if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0):
            raise ConfigError(f"metrics.objectives.{name}={value}: give seconds above 0, or null for none")
    return Metrics(
        warmup_requests=whole("metrics.warmup_requests", metrics["warmup_requests"], 0),
        drain_requests=whole("metrics.drain_requests", metrics["drain_requests"], 0),
        objectives=Objectives(**limits),
    )


def whole(key: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Raise ConfigError unless the value is a whole number from `minimum` to `maximum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{key}={value}: give a whole number, at least {minimum}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{key}={value}: give at most {maximum}")
    return value


def switch(key: str, value: object, *others: str) -> bool:
    """The value of a switch: true, false, on or off; `others` are further values that the message names."""
    if isinstance(value, bool):
        return value
    if value not in ("on", "off"):
        raise ConfigError(f"{key}={value}: give {one_of(['on', 'off', *others])}")
    return value == "on"


def one_of(choices: Sequence[str]) -> str:
    """`a, b or c`, for messages."""
    return " or ".join([", ".join(choices[:-1]), choices[-1]])


def check_known(given: Collection[str], known: Collection[str], prefix: str = "") -> None:
    """Raise ConfigError for a key that is not known, with the nearest one that is."""
    for key in given:
        if key not in known:
            raise ConfigError(f"{prefix}{key}: no such key; {nearest(key, known)}")


def check_there(given: Collection[str], needed: Collection[str], prefix: str = "") -> None:
    """Raise ConfigError for a key that was taken away."""
    for key in needed:
        if key not in given:
            raise ConfigError(f"{prefix}{key}: is missing; leave out what takes it away")


def section(key: str, value: object, known: Collection[str]) -> Mapping[str, Any]:
    """Raise ConfigError unless the value is a section with known keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value}: is a section; give one of its keys, as in {key}.{next(iter(known))}=...")
    check_known([str(name) for name in value], known, f"{key}.")
    return value


def nearest(name: str, known: Collection[str]) -> str:
    """`did you mean X? known: X, Y, Z`, for messages."""
    found = get_close_matches(name, list(known), 1) or [other for other in known if name and other.startswith(name)]
    hint = f"did you mean {found[0]}? " if found else ""
    return f"{hint}known: {', '.join(sorted(known)) or 'none'}"


def _tokens_or_auto(key: str, value: object) -> int | None:
    if value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value}: give a whole number of tokens, at least 1, or auto")
    if value > MOST_TOKENS:
        raise ConfigError(f"{key}={value}: give at most {MOST_TOKENS}, or auto")
    return value
