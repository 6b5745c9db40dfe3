"""Hardware profiles: what was measured of one GPU, as a small JSON file.

A profile comes with the package (`cbatch/sim/profiles/NAME.json`) or from a path. Loading checks every number, so that a
damaged file fails here and not as a strange result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec

_FOLDER = Path(__file__).parent / "profiles"

MEMORY_SHARE = 0.9
"""Share of the GPU's memory that weights and KV cache may take together; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class LinearTable:
    """Measured seconds of one model's matrix products, all layers together, against tokens in the iteration.

    tokens: ascending; seconds: of QKV, O, gate-up and down projections summed, and `by_name` each.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    by_name: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Attention:
    """A paged-attention kernel, one layer: seconds = base + max(bytes / bandwidth + FLOPs / rate, longest sequence).

    seconds_per_context_token bounds a single decode: without splitting the KV cache of one sequence over the chip, it is
    read by one block at a time.
    """

    base_seconds: float
    bandwidth_bytes_per_second: float
    seconds_per_context_token: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class SmallOperations:
    """Norms, rotary embedding, KV write, activation and gaps of one layer: a constant plus bytes moved."""

    seconds_per_layer: float
    bytes_per_hidden_element: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One GPU as measured.

    name, hardware, source: what it is and where the numbers come from.
    error: how far simulated times were from real runs, or that this is not known yet; it goes with every result.
    memory_bytes: of the device. bandwidth_bytes_per_second, flops_per_second: the ceilings reached.
    tile: tokens by which its matrix products step.
    host_seconds: host time for each iteration (plan, pack, launch, absorb).
    linear: measured tables by model name; other models are estimated from the ceilings, and marked so.
    """

    name: str
    hardware: str
    source: str
    error: str
    memory_bytes: float
    bandwidth_bytes_per_second: float
    flops_per_second: float
    tile: int
    host_seconds: float
    attention: Attention
    small_operations: SmallOperations
    linear: Mapping[str, LinearTable]

    def covers(self, spec: ModelSpec) -> bool:
        """Whether the model's matrix products were measured rather than estimated."""
        return spec.name in self.linear

    def kv_tokens(self, spec: ModelSpec) -> int:
        """Tokens of KV cache that fit beside the model's weights.

        Raises:
            ConfigError: the weights alone do not fit.
        """
        free = self.memory_bytes * MEMORY_SHARE - spec.weight_bytes
        if free < spec.kv_bytes_per_token:
            raise ConfigError(f"model={spec.name} needs {spec.weight_bytes / 1e9:.0f} GB for its weights, hardware={self.name} "
                              f"has {self.memory_bytes / 1e9:.0f} GB; choose a smaller model")  # fmt: skip
        return int(free // spec.kv_bytes_per_token)


def profile_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """Load a profile by name or from a file.

    Raises:
        ProfileError: no such profile; a missing, negative or non-finite value. The message names the file and key.
    """
    path = _FOLDER / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
        if not path.is_file():
            near = get_close_matches(name_or_path, profile_names(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ProfileError(f"hardware={name_or_path}: no such profile; {hint}known: {', '.join(profile_names())}, "
                               "or the path of a profile file")  # fmt: skip
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: cannot read the profile: {error}") from error
    return _Reader(path).profile(data)


class _Reader:
    """Turns parsed JSON into a `Profile`, checking every value."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def profile(self, data: Any) -> Profile:
        attention, small = self._get(data, "attention", dict), self._get(data, "small_operations", dict)
        tables = self._get(data, "linear_seconds", dict)
        return Profile(
            name=self._text(data, "name"),
            hardware=self._text(data, "hardware"),
            source=self._text(data, "source"),
            error=self._text(data, "error"),
            memory_bytes=self._number(data, "memory_bytes"),
            bandwidth_bytes_per_second=self._number(data, "bandwidth_bytes_per_second"),
            flops_per_second=self._number(data, "flops_per_second"),
            host_seconds=self._number(data, "host_seconds"),
            tile=int(self._number(data, "tile")),
            attention=Attention(**{key: self._number(attention, key, "attention.") for key in Attention.__slots__}),
            small_operations=SmallOperations(
                **{key: self._number(small, key, "small_operations.") for key in SmallOperations.__slots__}
            ),
            linear={model: self._table(model, table) for model, table in tables.items()},
        )

    def _table(self, model: str, table: Any) -> LinearTable:
        where = f"linear_seconds.{model}."
        columns = {key: self._column(table, key, where) for key in table}
        tokens = columns.pop("tokens", ())
        if not tokens or any(b <= a for a, b in pairwise(tokens)):
            self._fail(f"{where}tokens", "must be ascending and not empty")
        for key, column in columns.items():
            if len(column) != len(tokens):
                self._fail(where + key, f"has {len(column)} values for {len(tokens)} token counts")
        total = tuple(sum(values) for values in zip(*columns.values(), strict=True))
        return LinearTable(tuple(int(count) for count in tokens), total, columns)

    def _column(self, table: Any, key: str, where: str) -> tuple[float, ...]:
        values = self._get(table, key, list, where)
        return tuple(self._check(value, f"{where}{key}[{index}]") for index, value in enumerate(values))

    def _text(self, data: Any, key: str) -> str:
        return str(self._get(data, key, str))

    def _number(self, data: Any, key: str, where: str = "") -> float:
        return self._check(self._get(data, key, (int, float), where), where + key)

    def _check(self, value: Any, where: str) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            self._fail(where, f"must be a number above 0, is {value!r}")
        return float(value)

    def _get(self, data: Any, key: str, kind: type | tuple[type, ...], where: str = "") -> Any:
        if not isinstance(data, dict) or key not in data:
            self._fail(where + key, "is missing")
        if not isinstance(data[key], kind):
            self._fail(where + key, f"has the wrong type: {data[key]!r:.40}")
        return data[key]

    def _fail(self, key: str, why: str) -> None:
        raise ProfileError(f"{self.path}: {key} {why}; measure the profile again or mend the file")
