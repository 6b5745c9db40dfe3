"""Reads a JSON file and checks every value, so that a damaged file fails when it is loaded, not as a strange result."""

import json
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cbatch.errors import ProfileError

T = TypeVar("T")
REMARK = "from"

LARGEST = 1e30
"""Numbers are 0 or between the inverse of this and this: products and quotients of two of them stay finite."""


def read_json(path: Path) -> "Node":
    """Raises ProfileError if the file cannot be read or does not contain an object."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: cannot read the profile: {error}") from error
    return Node(path, "", data)


class Node:
    """An object of a JSON file. Values are checked when read; errors name file and key. "from" keys are remarks."""

    def __init__(self, path: Path, where: str, data: Any) -> None:
        self.path, self.where = path, where
        if not isinstance(data, dict):
            self.fail("", f"must be an object, is {data!r:.40}")
        self.data: dict[str, Any] = data

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.data if key != REMARK)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def only(self, *known: str) -> "Node":
        """Refuse other keys; returns the node itself."""
        for key in self:
            if key not in known:
                near = get_close_matches(key, known, 1)
                self.fail(key, f"is unknown{f', did you mean {near[0]}?' if near else ''}")
        return self

    def child(self, key: str) -> "Node":
        return Node(self.path, f"{self.where}{key}.", self.get(key))

    def optional(self, key: str, build: Callable[["Node"], T]) -> T | None:
        """Builds an object from a child; None if it is missing."""
        return build(self.child(key)) if key in self.data else None

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self.fail(key, f"must be a text, is {value!r:.40}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self.fail(key, f"must be a list of texts, is {values!r:.40}")
        return tuple(values)

    def number(self, key: str, *, zero: bool = False) -> float:
        return self.check(self.get(key), key, zero=zero)

    def numbers(self, key: str, *, zero: bool = False) -> tuple[float, ...]:
        values = self.get(key)
        if not isinstance(values, list) or not values:
            self.fail(key, f"must be a list of numbers, is {values!r:.40}")
        return tuple(self.check(value, f"{key}[{index}]", zero=zero) for index, value in enumerate(values))

    def ascending(self, key: str, *, zero: bool = False) -> tuple[float, ...]:
        sizes = self.numbers(key, zero=zero)
        if any(later <= size for size, later in pairwise(sizes)):
            self.fail(key, "must be ascending")
        return sizes

    def check(self, value: Any, key: str, *, zero: bool = False) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, f"must be a number, is {value!r:.40}")
        if not 0 <= value <= LARGEST or (value == 0 and not zero):
            self.fail(key, f"must be a number {'of at least' if zero else 'above'} 0, is {value!r:.40}")
        if 0 < value < 1 / LARGEST:
            self.fail(key, f"is {value!r}, too small for any unit; check the units")
        return float(value)

    def get(self, key: str) -> Any:
        if key not in self.data:
            self.fail(key, "is missing")
        return self.data[key]

    def fail(self, key: str, why: str) -> NoReturn:
        where = f"{self.where}{key}".rstrip(".") or "the file"
        raise ProfileError(f"{self.path}: {where} {why}; measure the profile again or correct the file")
