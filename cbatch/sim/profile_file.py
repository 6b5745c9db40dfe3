"""Profiles as JSON files.

    {"name", "hardware", "source", "error": texts,  "memory_bytes": number,
     "ceilings":         {"bandwidth_bytes_per_second", "flops_per_second", "tile"},
     "attention":        rates of any model's attention, see `AttentionRates`                          (optional)
     "small_operations": see `SmallOperations`                                                         (optional)
     "host":  {"sync": {"seconds", "seconds_per_request"}, "async": the same}                          (optional)
     "links": {"all_reduce": {GPUs: {"bytes": [], "seconds": []}}, "within_node", "between_nodes", "to_device",
               "to_host": {"bytes", "seconds"}},                                                          (optional)
     "models": {NAME: {"num_layers": number, "tensor_parallel": {DEGREE: {
         "linear": {"tokens": [], one list of seconds for each product}, "other", "embedding": {"tokens", "seconds"},
         "head": {"requests", "seconds"}, "chunks", "decodes", "mixed_decodes": {"sizes", "contexts", "seconds": [[]]},
         "decode_only": {"linear", "other", "head"},                                                       (optional)
         "captured_rows": {"requests": [], "tokens": [], "seconds": [[]]},                                 (optional)
         "power": {"tokens", "gain", "loss", "reserve_seconds",                                            (optional)
                   "requests", "decode_loss", "rise_seconds", "idle_rise_seconds"}}}}}}

A model's tables are of one GPU and of all its layers together; null in a grid is a place not measured. "from", anywhere,
is a remark on where the numbers beside it come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.sim.attention import AttentionRates, TableAttention
from cbatch.sim.checked_json import Node, read_json
from cbatch.sim.importers import read_folder
from cbatch.sim.interpolation import Curve, Grid, added, grid
from cbatch.sim.links import Links
from cbatch.sim.power import PowerLimit
from cbatch.sim.profile import CapturedRows, DecodeOnly, HostTime, Measured, Profile, SmallOperations
from cbatch.sim.roofline import Ceilings

PROFILES = Path(__file__).parent / "profiles"


class ModelTables:
    """Measured tables by model name and tensor-parallel degree; implements `Tables`."""

    def __init__(self, measured: Mapping[tuple[str, int], Measured]) -> None:
        self._measured = measured

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        return self._measured.get((spec.name, tensor_parallel), Measured())


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """Load a profile by name, from a file, or from a folder of published tables.

    Raises:
        ProfileError: no such profile; a missing, negative or non-finite value. The message names the file and key.
    """
    path = PROFILES / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
        if path.is_dir():
            return read_folder(path)
        if not path.is_file():
            near = get_close_matches(name_or_path, profile_names(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ProfileError(
                f"hardware={name_or_path}: no such profile; {hint}known: {', '.join(profile_names())}, "
                "or the path of a profile file or of a folder of published tables"
            )
    return _profile(read_json(path))


def profile_text(data: Mapping[str, Any]) -> str:
    """A profile as it is written to a file: indented, but each list of numbers on one line."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _profile(file: Node) -> Profile:
    file.only(
        "name",
        "hardware",
        "source",
        "error",
        "memory_bytes",
        "ceilings",
        "attention",
        "small_operations",
        "host",
        "links",
        "models",
    )
    ceilings = file.child("ceilings").only(*(field.name for field in fields(Ceilings)))
    return Profile(
        name=file.text("name"),
        hardware=file.text("hardware"),
        source=file.text("source"),
        error=file.text("error"),
        memory_bytes=file.number("memory_bytes"),
        ceilings=Ceilings(
            bandwidth_bytes_per_second=ceilings.number("bandwidth_bytes_per_second"),
            flops_per_second=ceilings.number("flops_per_second"),
            tile=int(ceilings.number("tile")),
        ),
        tables=ModelTables(dict(_models(file.child("models")))),
        attention=_attention_rates(file.child("attention")) if "attention" in file else None,
        small=_small(file.child("small_operations")) if "small_operations" in file else None,
        sync_host=_host(file, "sync"),
        async_host=_host(file, "async"),
        links=_links(file.child("links")) if "links" in file else Links(),
    )


def _attention_rates(node: Node) -> AttentionRates:
    names = [field.name for field in fields(AttentionRates)]
    optional = ("base_seconds", "mixed_seconds", "seconds_per_context_token")
    node.only(*names)
    return AttentionRates(
        **{name: node.number(name, zero=name in optional) for name in names if name in node or name not in optional}
    )


def _small(node: Node) -> SmallOperations:
    node.only("seconds_per_layer", "bytes_per_hidden_element")
    return SmallOperations(node.number("seconds_per_layer", zero=True), node.number("bytes_per_hidden_element"))


def _host(file: Node, loop: str) -> HostTime:
    if "host" not in file:
        return HostTime()
    time = file.child("host").only("sync", "async").child(loop).only("seconds", "seconds_per_request")
    return HostTime(time.number("seconds", zero=True), time.number("seconds_per_request", zero=True))


def _links(node: Node) -> Links:
    single = ("within_node", "between_nodes", "to_device", "to_host")
    node.only("all_reduce", *single)
    reduces = node.child("all_reduce") if "all_reduce" in node else None
    return Links(
        all_reduce={_num_gpus(reduces, key): _curve(reduces.child(key), "bytes") for key in reduces} if reduces else {},
        **{name: _curve(node.child(name), "bytes") for name in single if name in node},
    )


def _models(node: Node) -> Iterator[tuple[tuple[str, int], Measured]]:
    for name in node:
        model = node.child(name).only("num_layers", "tensor_parallel")
        num_layers, degrees = model.number("num_layers"), model.child("tensor_parallel")
        for degree in degrees:
            yield (name, _num_gpus(degrees, degree)), _measured(degrees.child(degree), 1 / num_layers)


def _measured(node: Node, layer: float) -> Measured:
    """layer: one layer's share of the seconds in the file."""
    node.only(
        "linear",
        "other",
        "embedding",
        "head",
        "chunks",
        "decodes",
        "mixed_decodes",
        "decode_only",
        "captured_rows",
        "power",
    )
    return Measured(
        linear=_linear(node.child("linear")).scaled(layer) if "linear" in node else None,
        attention=_attention(node, layer),
        other=_curve(node.child("other"), "tokens", zero=True).scaled(layer) if "other" in node else None,
        embedding=_curve(node.child("embedding"), "tokens", zero=True) if "embedding" in node else None,
        head=_curve(node.child("head"), "requests", zero=True) if "head" in node else None,
        decode_only=_decode_only(node.child("decode_only"), layer) if "decode_only" in node else None,
        captured_rows=_captured_rows(node.child("captured_rows")) if "captured_rows" in node else None,
        power=_power(node.child("power")) if "power" in node else None,
    )


def _attention(node: Node, layer: float) -> TableAttention | None:
    grids = {key: _grid(node.child(key), layer) for key in ("chunks", "decodes", "mixed_decodes") if key in node}
    if not grids:
        return None
    if not {"chunks", "decodes"} <= grids.keys():
        node.fail("chunks", "and decodes belong together")
    return TableAttention(grids["chunks"], grids["decodes"], grids.get("mixed_decodes"))


def _decode_only(node: Node, layer: float) -> DecodeOnly:
    node.only("linear", "other", "head")
    return DecodeOnly(
        linear=_linear(node.child("linear")).scaled(layer),
        other=_curve(node.child("other"), "tokens", zero=True).scaled(layer),
        head=_curve(node.child("head"), "requests", zero=True),
    )


def _captured_rows(node: Node) -> CapturedRows:
    return CapturedRows(_grid(node, 1.0, "requests", "tokens"))


def _power(node: Node) -> PowerLimit:
    node.only(
        "tokens", "gain", "loss", "reserve_seconds", "requests", "decode_loss", "rise_seconds", "idle_rise_seconds"
    )
    return PowerLimit(
        _curve(node, "tokens", "gain", zero=True),
        _curve(node, "tokens", "loss", zero=True),
        node.number("reserve_seconds", zero=True),
        _curve(node, "requests", "decode_loss", zero=True),
        _curve(node, "requests", "rise_seconds"),
        node.number("idle_rise_seconds"),
    )


def _linear(node: Node) -> Curve:
    products = [key for key in node if key != "tokens"]
    if not products:
        node.fail("", "has no list of seconds")
    return added([_curve(node, "tokens", product) for product in products])


def _curve(node: Node, sizes_key: str, seconds_key: str = "seconds", *, zero: bool = False) -> Curve:
    sizes, seconds = node.ascending(sizes_key), node.numbers(seconds_key, zero=zero)
    if len(seconds) != len(sizes):
        node.fail(seconds_key, f"has {len(seconds)} values for {len(sizes)} {sizes_key}")
    return Curve(sizes, seconds)


def _grid(node: Node, factor: float, sizes_key: str = "sizes", columns_key: str = "contexts") -> Grid:
    node.only(sizes_key, columns_key, "seconds")
    sizes, columns, rows = node.ascending(sizes_key), node.ascending(columns_key, zero=True), node.get("seconds")
    if not isinstance(rows, list) or len(rows) != len(sizes):
        node.fail("seconds", f"must have a row for each of {len(sizes)} {sizes_key}")
    points = []
    for size, row in zip(sizes, rows, strict=True):
        if not isinstance(row, list) or len(row) != len(columns) or not any(value is not None for value in row):
            node.fail("seconds", f"must have a value or null for each of {len(columns)} {columns_key} in every row")
        points += [
            (size, column, factor * node.check(value, "seconds", zero=True))
            for column, value in zip(columns, row, strict=True)
            if value is not None
        ]
    return grid(points)


def _num_gpus(node: Node, key: str) -> int:
    if not key.isdecimal() or int(key) < 1:
        node.fail(key, "must be a number of GPUs")
    return int(key)
