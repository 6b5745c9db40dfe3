"""Where the numbers of a hardware profile come from, entry by entry, and for which runs its error was established.

An entry is an object of numbers in a profile's file. Its origin is its "from", or that of the object around it, or the
file's "source". The first word says of which kind it is:

    measured  the command, date, card and commit follow
    derived   from what, and how
    assumed   why
    fallback  measured or estimated for something else

A simulated result counts as measured only where every entry that it uses was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MEASURED, FALLBACK = "measured", "fallback"
KINDS = (MEASURED, "derived", "assumed", FALLBACK)
UNSTATED = "not stated"
NOT_COMPARED = "not compared with real runs"


@dataclass(frozen=True, slots=True)
class Compared:
    """The real runs in one loop that an error was established against: their models and GPUs.

    batches: the smallest and the largest of their limits of requests in an iteration; empty: not stated.
    error: empty: the profile's. brief: in a few words, for a line that is printed with each result; empty: none was given.
    """

    models: tuple[str, ...]
    gpus: int
    batches: tuple[int, ...] = ()
    brief: str = ""
    error: str = ""


def kind_of(origin: str) -> str:
    """The kind of an origin, or "not stated"."""
    first = origin.split(maxsplit=1)[0].rstrip(":;,") if origin.strip() else ""
    return first if first in KINDS else UNSTATED


def read_entries(data: Mapping[str, Any]) -> dict[str, str]:
    """The origin of each entry of a profile's file; its keys joined by "."."""
    tables = {key: value for key, value in data.items() if key != "compared"}
    return {"memory_bytes": str(data["source"]), **dict(_entries(tables, str(data["source"]), ""))}


def _entries(data: Mapping[str, Any], origin: str, where: str) -> Iterator[tuple[str, str]]:
    origin = str(data.get("from", origin))
    inner = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key, value in inner.items():
        yield from _entries(value, origin, f"{where}.{key}" if where else key)
    if where and not inner and "num_layers" not in data:
        yield where, origin


def not_measured(origins: Mapping[str, str]) -> list[str]:
    """The entries of other kinds, as "entry (kind)"; parts of a table such as decode_only are one entry."""
    kinds = {(name.split(".")[0], kind_of(origin)) for name, origin in origins.items()}
    order = [*KINDS, UNSTATED]
    others = sorted((kind for kind in kinds if kind[1] != MEASURED), key=lambda kind: (order.index(kind[1]), kind[0]))
    return [f"{name} ({kind})" for name, kind in others]
