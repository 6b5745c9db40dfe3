"""The origin of each entry in a hardware profile, and the runs for which the profile's error was established.

An entry is an object of numbers in a profile's file. The entry's origin is its "from", the "from" of an enclosing object, or
the file's "source". The first word of an origin states its kind:

    measured  followed by command, date, card and commit
    derived   followed by the source and the method
    assumed   followed by the reason
    fallback  measured or estimated for something else

A simulated result counts as measured only if every entry that it uses was measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from cbatch.sim.schema import NotNegative
from cbatch.validation import whole

MEASURED, FALLBACK = "measured", "fallback"
KINDS = (MEASURED, "derived", "assumed", FALLBACK)
UNSTATED = "not stated"
NOT_COMPARED = "not compared with real runs"

STATISTICS = ("mean", "P50", "P90", "P99", "gain")
"""Ends of the names of figures; each result states the largest error of each."""

FROM = "from"
Place = tuple[str, ...]  # the keys that lead to an object in a file

Loop = Literal["sync", "async"]
IN_GRAPHS = ", in graphs"

Conditions = Annotated[str, Field(pattern=rf"^a?sync(, [1-9]\d* GPUs)?({IN_GRAPHS})?$")]
"""A loop, the number of GPUs unless it is one, and `IN_GRAPHS` for those runs of the same whose every iteration fitted a captured graph."""

_ENDS = AfterValidator(lambda values: (min(values), max(values)) if values else ())


@dataclass(frozen=True, slots=True)
class Compared:
    """Real runs in one loop, and the largest relative error of their simulation in each figure, such as "TTFT P99".

    largest_error_of_ratios: of the figures of two policies that one card served with equal arrivals; empty: no such pair.
    batches, loads: the smallest and largest limit of requests per iteration, and rate over the requests per second that sarathi_serve
        served when all came at once (the capacity); empty: not stated.
    shares_of_bound: the smallest and largest rate over B3, the bound of any policy, which is higher; `workload.load` is such a share.
    in_graphs: whether every iteration with prompts of the simulated runs fitted a captured graph; other launches take times that differ by host.
    runs, cards: their numbers. see: the command or page with all errors.
    """

    models: tuple[str, ...]
    gpus: Annotated[int, whole(1, unit="number of GPUs")]
    largest_error: Annotated[Mapping[str, NotNegative], Field(min_length=1)]
    runs: Annotated[int, whole(1, unit="number of runs")]
    cards: Annotated[int, whole(1, unit="number of cards")]
    date: str
    see: str
    largest_error_of_ratios: Mapping[str, NotNegative] = field(default_factory=dict)
    batches: Annotated[tuple[int, ...], _ENDS] = ()
    loads: Annotated[tuple[float, ...], _ENDS] = ()
    shares_of_bound: Annotated[tuple[float, ...], _ENDS] = ()
    in_graphs: bool = False

    @property
    def text(self) -> str:
        """Returns "largest error: mean 8%, P50 28%, P90 14%, P99 24%; batch 48, load 70-90% of capacity", and with `in_graphs` "all iterations in graphs"."""
        sizes = {end: [size for name, size in self.largest_error.items() if name.endswith(end)] for end in STATISTICS}
        errors = ", ".join(f"{end} {max(found):.0%}" for end, found in sizes.items() if found)
        conditions = [f"batch {_span(self.batches)}"] if self.batches else []
        if self.loads:
            conditions.append(f"load {_span([round(100 * load) for load in self.loads])}% of capacity")
        conditions += ["all iterations in graphs"] * self.in_graphs
        return "; ".join(filter(None, (f"largest error: {errors}", ", ".join(conditions))))


def _span(ends: Iterable[int]) -> str:
    return "-".join(map(str, dict.fromkeys(ends)))


def kind_of(origin: str) -> str:
    """Returns the kind of an origin, or "not stated"."""
    first = origin.split(maxsplit=1)[0].rstrip(":;,") if origin.strip() else ""
    return first if first in KINDS else UNSTATED


def take_origins(node: Any, place: Place = ()) -> dict[Place, str]:
    """Removes every "from" in a file's content. Returns the removed texts by the place of their object."""
    if not isinstance(node, dict):
        return {}
    origins = {place: str(node.pop(FROM))} if FROM in node else {}
    for key, value in node.items():
        origins |= take_origins(value, (*place, key))
    return origins


def put_origins(node: Any, origins: Mapping[Place, str], place: Place = ()) -> Any:
    """Returns a file's content with every "from" at the beginning of its object."""
    if not isinstance(node, dict):
        return node
    stated = {FROM: origins[place]} if place in origins else {}
    return stated | {key: put_origins(value, origins, (*place, key)) for key, value in node.items()}


def not_measured(origins: Mapping[str, str]) -> list[str]:
    """Returns the entries that were not measured, as "entry (kind)"; parts of a table such as decode_only count as one entry."""
    kinds = {(name.split(".")[0], kind_of(origin)) for name, origin in origins.items()}
    order = [*KINDS, UNSTATED]
    others = sorted((kind for kind in kinds if kind[1] != MEASURED), key=lambda kind: (order.index(kind[1]), kind[0]))
    return [f"{name} ({kind})" for name, kind in others]
