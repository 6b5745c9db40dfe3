"""The root keys of a run, checked: each error names the key, the value and what to give instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cbatch import ConfigError
from cbatch.metrics import Objectives
from experiments.progress import Setting

GROUPS = ("policy", "chunking", "workload", "model", "runtime", "backend", "experiment")
"""Keys whose value is one of the files in a folder of conf/."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What counts: see `cbatch.summary.summarize`."""

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


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The root keys of a resolved configuration.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    fields = Settings.__dataclass_fields__
    check_known(config, [*fields, *GROUPS])
    progress = config["progress"]
    return Settings(
        chunk=_tokens_or_auto("chunk", config["chunk"]),
        batch=whole("batch", config["batch"], 1),
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


def _read_metrics(config: Mapping[str, Any]) -> Metrics:
    check_known(config, Metrics.__dataclass_fields__, "metrics.")
    limits = config["objectives"]
    check_known(limits, Objectives.__dataclass_fields__, "metrics.objectives.")
    for name, value in limits.items():
        if value is not None and (isinstance(value, (bool, str)) or not value > 0):
            raise ConfigError(f"metrics.objectives.{name}={value}: give seconds above 0, or null for none")
    return Metrics(
        warmup_requests=whole("metrics.warmup_requests", config["warmup_requests"], 0),
        drain_requests=whole("metrics.drain_requests", config["drain_requests"], 0),
        objectives=Objectives(**limits),
    )


def whole(key: str, value: object, minimum: int) -> int:
    """Raise ConfigError unless the value is a whole number, at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{key}={value}: give a whole number, at least {minimum}")
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
    return value
