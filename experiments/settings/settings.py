"""The root keys of a run, checked: each error names the key, the value and what to give instead."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WrapValidator

from cbatch import ConfigError
from cbatch.results.metrics import Objectives
from cbatch.stall import Patience
from cbatch.validation import Give, Switch, check_known, positive, read, whole
from experiments.progress import Setting

GROUPS = ("policy", "chunking", "predictor", "workload", "model", "runtime", "backend", "experiment")
"""Keys whose value is the name of a file in a folder of conf/."""

_SECTIONS = ("policy", "workload", "model", "runtime", "backend")
"""The groups that every run needs."""

MOST_REQUESTS_AT_ONCE = 1_000_000
"""Far above what any device holds; the engine's tables have a row per request."""

MOST_TOKENS = 2**31 - 1
"""Limit of a chunk, an iteration and the KV cache, whose blocks are numbered in 32 bits."""

_OR_AUTO = WrapValidator(lambda value, accept: None if value == "auto" else accept(value))

Tokens = Annotated[
    int | None, whole(1, MOST_TOKENS), _OR_AUTO, Give(f"a whole number of tokens from 1 to {MOST_TOKENS}, or auto")
]
"""None stands for auto."""

Requests = Annotated[
    int | None,
    whole(1, MOST_REQUESTS_AT_ONCE),
    _OR_AUTO,
    Give(f"a whole number from 1 to {MOST_REQUESTS_AT_ONCE}, or auto"),
]
"""None stands for auto."""

OnOffAuto = Annotated[
    Setting,
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
    Give("on, off or auto"),
]
Text = Annotated[str, BeforeValidator(str)]
Count = Annotated[int, whole(0)]
Weight = Annotated[float, positive("clients without a weight have 1")]


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Which requests count, the objectives, and weights of clients: see `cbatch.results.summary.summarize`."""

    warmup_requests: Count
    drain_requests: Count
    objectives: Objectives
    client_weights: dict[str, Weight] | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The root keys apart from groups; conf/config.yaml explains them."""

    chunk: Tokens
    batch: Annotated[int, whole(1, MOST_REQUESTS_AT_ONCE)]
    max_running: Requests
    seed: Count
    hardware: Text
    kv_tokens: Tokens
    block_size: Tokens
    max_tokens: Tokens
    patience: Patience
    metrics: Metrics
    objective: Text | None
    output: Text | None
    sweep: Text
    other_code: Annotated[Literal["rerun", "keep"], Give("rerun or keep")]
    progress: OnOffAuto
    stream: OnOffAuto = "auto"
    timeline: Switch
    decisions: Switch
    bounds: Switch = False
    traces: Text


PLANS_BY = ("policy", "chunking", "predictor", "chunk", "seed", "metrics")
"""The keys that describe a policy: its sections in conf/policy take them up."""

ROOT_KEYS = (*Settings.__dataclass_fields__, *GROUPS)
"""All keys of a configuration outside its sections."""


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Reads the root keys of a resolved configuration.

    Raises:
        ConfigError: an unknown or missing key, or a value out of range.
    """
    check_known(config, ROOT_KEYS)
    for key in _SECTIONS:
        if key not in config:
            raise ConfigError(f"{key}: is missing; give {key}=NAME")
    return read(Settings, {key: value for key, value in config.items() if key not in GROUPS})
