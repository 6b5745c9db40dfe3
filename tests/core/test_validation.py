"""Types say what is accepted; what is refused becomes one line with the key, the value and what to give."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from cbatch import ConfigError
from cbatch.errors import WorkloadError
from cbatch.validation import Give, Switch, check, nearest, not_negative, positive, read, whole


@dataclass(frozen=True)
class Part:
    """A section within a section."""

    size: Annotated[int, whole(1)]
    seconds: Annotated[float, not_negative("seconds")] | None = None


@dataclass(frozen=True, kw_only=True)
class Options:
    """A section with a field of every kind."""

    rate: Annotated[float, positive("requests per second")] = 1.0
    count: Annotated[int, whole(1, 9)] | None = None
    on: Switch = False
    order: Literal["file", "random"] = "file"
    ratios: Sequence[Annotated[float, positive("P:D")]] = (1.0,)
    limit: Annotated[Annotated[int, whole(1)] | Literal["auto"], Give("a number or auto")] = "auto"
    part: Part = field(default_factory=lambda: Part(1))

    def __post_init__(self) -> None:
        check(self, "workload.", WorkloadError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 0}, "rate=0: give a finite number above 0 (requests per second)"),
        ({"rate": True}, "rate=True: give a finite number above 0 (requests per second)"),
        ({"rate": float("nan")}, "rate=nan: give a finite number above 0 (requests per second)"),
        ({"rate": 10**400}, f"rate=1{'0' * 59}...: give a finite number above 0 (requests per second)"),
        ({"count": 10}, "count=10: give a whole number from 1 to 9"),
        ({"count": 2.5}, "count=2.5: give a whole number from 1 to 9"),
        ({"count": True}, "count=True: give a whole number from 1 to 9"),
        ({"on": 1}, "on=1: give true or false"),
        ({"order": "sorted"}, "order=sorted: give 'file' or 'random'"),
        ({"ratios": [1, 0]}, "ratios[1]=0: give a finite number above 0 (P:D)"),
        ({"limit": None}, "limit=None: give a number or auto"),
        ({"part": 1}, "part=1: give workload.part={size: ..., seconds: ...}, or some of these keys"),
    ],
)
def test_fields_that_do_not_fit_their_types_are_refused(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Options(**given)
    assert str(caught.value) == f"workload.{message}"


def test_fields_that_fit_stay_as_they_are() -> None:
    options = Options(rate=2, count=None, on="on", ratios=[1, 2.5], part={"size": 3})  # type: ignore[arg-type]
    assert (options.rate, type(options.rate), options.on, options.ratios) == (2, int, True, [1, 2.5])
    assert options.part == Part(3)
    assert type(Options(count=3e0).count) is int, "1e3 is a float in YAML"  # type: ignore[arg-type]


@dataclass(frozen=True)
class File:
    """What a file holds."""

    part: Part
    more: Part | None = None
    others: dict[str, Part] = field(default_factory=dict)
    seconds: float | None = 1.0
    counts: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "Input should be a dictionary"),
        ({}, "part: is missing; give part=..."),
        ({"part": 3}, "part=3: give part={size: ..., seconds: ...}"),
        ({"part": {"size": 1}, "seconds": True}, "seconds=True: give a number"),
        ({"part": {"size": 1}, "seconds": "2"}, "seconds='2': give a number"),
        ({"part": {"size": 1}, "counts": [1, True]}, "counts[1]=True: give a whole number"),
        ({"part": {"size": 1}, "counts": [2.5]}, "counts[0]=2.5: give a whole number"),
        ({"part": {}}, "part.size: is missing; give part.size=..."),
        ({"part": {"size": 0}}, "part.size=0: give a whole number, at least 1"),
        ({"part": {"sise": 1}}, "part.sise: is not supported; did you mean size? otherwise leave it out"),
        ({"part": {"size": 1}, "others": {"x": {"size": -1}}}, "others.x.size=-1: give a whole number, at least 1"),
        ({"part": {"size": 1}, "others": {"x": {"sise": 1}}}, "others.x.sise: is not supported; did you mean size? "),
        ({"part": {"size": 1}, "more": {"sec": 1, "size": 1}}, "more.sec: is not supported; did you mean seconds? "),
        ({"part": {"size": 1}, 1: 2}, "[1]=1: Keys should be strings"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(File, data)
    assert str(caught.value).startswith(message)
    fits = {"part": {"size": 1, "seconds": 0}, "more": None, "others": {"x": {"size": 2}}}
    assert read(File, fits) == File(Part(1, 0.0), None, {"x": Part(2)})


def test_a_mapping_is_read_as_a_class_is() -> None:
    """pydantic gives the schema of a mapping a key `strict`; a whole number as a key is text in JSON."""
    with pytest.raises(ConfigError, match=r"^a\.seconds=True: give a number$"):
        read(dict[str, File], {"a": {"part": {"size": 1}, "seconds": True}})
    assert read(dict[int, float], {"2": 1}) == {2: 1.0}


@pytest.mark.parametrize(
    ("name", "known", "says"),
    [
        ("sarathi_srve", ["sarathi", "sarathi_serve"], "did you mean sarathi_serve?"),  # a slip
        ("chunk_size", ["batch", "chunk"], "did you mean chunk?"),  # a known word of it
        ("llama3", ["llama-13b", "llama-3.1-8b"], "did you mean llama-3.1-8b?"),  # it begins with what was given
        ("nope", ["none", "fixed"], "known: fixed, none"),  # none is no guess
        ("=", ["llama-13b"], "known: llama-13b"),  # punctuation begins no name
    ],
)
def test_the_nearest_name_is_proposed(name: str, known: list[str], says: str) -> None:
    assert nearest(name, known).startswith(says)
