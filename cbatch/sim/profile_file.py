"""Reads hardware profiles from JSON files.

    {"name", "hardware", "source", "error": texts,  "memory_bytes": number,
     "compared":         {"async": {"models": [], "gpus", "batches": [], "brief", "error"}, "sync": the same}: the real
                         runs in each loop that "error" or their own error holds for, their smallest and largest batch,
                         and the error in a few words                                                  (all optional)
     "ceilings":         {"bandwidth_bytes_per_second", "flops_per_second", "tile"},
     "attention":        rates of any model's attention, see `AttentionRates`                          (optional)
     "small_operations": see `SmallOperations`                                                         (optional)
     "host":  {"sync": {"seconds", "seconds_per_request", "eager_seconds" (optional)}, "async": the same}  (optional)
     "links": {"all_reduce": {GPUs: {"bytes": [], "seconds": []}}, "within_node", "between_nodes", "to_device",
               "to_host": {"bytes", "seconds"}},                                                          (optional)
     "models": {NAME: {"num_layers": number, "host": as above, optional, "tensor_parallel": {DEGREE: {
         "linear": {"tokens": [], one list of seconds per product}, "other", "embedding", "exchange": {"tokens", "seconds"},
         "head": {"requests", "seconds"}, "chunks", "decodes", "mixed_decodes": {"sizes", "contexts", "seconds": [[]]},
         "decode_only": {"linear", "other", "head"},                                                       (optional)
         "captured_rows": {"requests": [], "tokens": [], "seconds": [[]]},                                 (optional)
         "captured_graphs": {"requests": [], "tokens": [], "fewest": []},                                  (optional)
         "power": {"tokens", "gain", "loss", "reserve_seconds",                                            (optional)
                   "requests", "decode_loss", "rise_seconds", "idle_rise_seconds"}}}}}}

A model's tables cover all its layers on one GPU; null in a grid means not measured. The key "from", anywhere, is the
origin of the numbers beside and below it: see `cbatch.sim.provenance`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import AttentionRates, TableAttention
from cbatch.sim.checked_json import Node, read_json
from cbatch.sim.importers import read_folder
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.power import PowerLimit
from cbatch.sim.profile import CapturedGraphs, CapturedRows, DecodeOnly, HostTime, Measured, Profile, SmallOperations
from cbatch.sim.provenance import Compared, read_entries
from cbatch.sim.roofline import Ceilings
from cbatch.validation import nearest

PROFILES = Path(__file__).parent / "profiles"
OPTIONAL = ("attention", "small_operations", "host", "links", "compared")
T = TypeVar("T")
LINKS = ("within_node", "between_nodes", "to_device", "to_host")


class ModelTables:
    """Measured tables by model name and tensor-parallel degree; implements `Tables`."""

    def __init__(self, measured: Mapping[tuple[str, int], Measured]) -> None:
        self._measured = measured

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        """See `Tables`. A degree that was not measured is inferred from one GPU's tables."""
        if found := self._measured.get((spec.name, tensor_parallel)):
            return found
        alone = self._measured.get((spec.name, 1))
        return share_out(alone, spec, tensor_parallel) if alone else Measured()


def share_out(alone: Measured, spec: ModelSpec, num_gpus: int) -> Measured:
    """Estimates the tables of one of the GPUs that share every layer, from those of one that has them alone.

    Products take a GPU's share of the time, attention that of its key-value heads, small operations all of it. On two H200s
    that was 5% off (mean over iterations of two models), rates of kernels 9%.
    """
    part, heads = 1 / num_gpus, Topology(num_gpus, gpus_per_node=num_gpus).share(spec).num_kv_heads / spec.num_kv_heads
    attention = alone.attention.scaled(heads) if isinstance(alone.attention, TableAttention) else None
    decodes = alone.decode_only
    if decodes is not None:
        decodes = replace(decodes, linear=decodes.linear.scaled(part), head=decodes.head.scaled(part))
    return Measured(
        linear=alone.linear and alone.linear.scaled(part),
        attention=attention,
        other=alone.other,
        embedding=alone.embedding,
        head=alone.head and alone.head.scaled(part),
        decode_only=decodes,
        captured_graphs=alone.captured_graphs,
        power=alone.power,
        inferred=tuple(name for name in ("linear", "attention", "other", "head") if getattr(alone, name)),
    )


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """Load a profile by name, from a file, or from a folder of published tables.

    Raises:
        ProfileError: no such profile, or a missing, negative or non-finite value; the message names the file and key.
    """
    path = PROFILES / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
        if path.is_dir():
            return read_folder(path)
        if not path.is_file():
            known = nearest(name_or_path, profile_names())
            raise ProfileError(f"hardware={name_or_path}: no such profile; {known}, or the path of a file or folder")
    return _profile(read_json(path))


def profile_text(data: Mapping[str, Any]) -> str:
    """The text of a profile's file: indented, but each list of numbers on one line."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _profile(file: Node) -> Profile:
    file.only("name", "hardware", "source", "error", "memory_bytes", "ceilings", "models", *OPTIONAL)
    models, (sync_host, async_host) = file.child("models"), file.optional("host", _host) or (HostTime(), HostTime())
    return Profile(
        name=file.text("name"),
        hardware=file.text("hardware"),
        source=file.text("source"),
        error=file.text("error"),
        memory_bytes=file.number("memory_bytes"),
        ceilings=_ceilings(file.child("ceilings")),
        tables=ModelTables(dict(_models(models))),
        attention=file.optional("attention", _attention_rates),
        small=file.optional(
            "small_operations", lambda node: _numbers(node, SmallOperations, zero=["seconds_per_layer"])
        ),
        sync_host=sync_host,
        async_host=async_host,
        links=file.optional("links", _links) or Links(),
        hosts={name: times for name in models if (times := models.child(name).optional("host", _host))},
        entries=read_entries(file.data),
        compared=file.optional("compared", _compared) or {},
    )


def _numbers(node: Node, kind: Callable[..., T], zero: Collection[str] = (), optional: Collection[str] = ()) -> T:
    """Builds a dataclass of numbers. zero: fields that may be 0. optional: fields that may be missing."""
    names = list(signature(kind).parameters)
    node.only(*names)
    given = [name for name in names if name in node or name not in optional]
    return kind(**{name: node.number(name, zero=name in zero) for name in given})


def _ceilings(node: Node) -> Ceilings:
    ceilings = _numbers(node, Ceilings)
    return replace(ceilings, tile=int(ceilings.tile))


def _attention_rates(node: Node) -> AttentionRates:
    optional = ("base_seconds", "mixed_seconds", "seconds_per_context_token")
    return _numbers(node, AttentionRates, zero=optional, optional=optional)


def _host(node: Node) -> tuple[HostTime, HostTime]:
    """The host times of the synchronous and of the asynchronous loop."""
    node.only("sync", "async")
    fields, optional = ("seconds", "seconds_per_request", "eager_seconds"), ("eager_seconds",)
    sync, overlapped = (
        _numbers(node.child(loop), HostTime, zero=fields, optional=optional) for loop in ("sync", "async")
    )
    return sync, overlapped


def _links(node: Node) -> Links:
    node.only("all_reduce", *LINKS)
    links = {name: _curve(node.child(name), "bytes") for name in LINKS if name in node}
    return Links(all_reduce=node.optional("all_reduce", _all_reduce) or {}, **links)


def _all_reduce(node: Node) -> dict[int, PiecewiseLinear]:
    return {_num_gpus(node, key): _curve(node.child(key), "bytes") for key in node}


def _compared(node: Node) -> dict[str, Compared]:
    node.only("async", "sync")
    return {loop: _real_runs(node.child(loop)) for loop in node}


def _real_runs(node: Node) -> Compared:
    node.only("models", "gpus", "batches", "brief", "error")
    texts = {key: node.text(key) for key in ("brief", "error") if key in node}
    batches = sorted(map(int, node.numbers("batches"))) if "batches" in node else []
    return Compared(node.texts("models"), int(node.number("gpus")), tuple(batches[:1] + batches[-1:]), **texts)


def _models(node: Node) -> Iterator[tuple[tuple[str, int], Measured]]:
    for name in node:
        model = node.child(name).only("num_layers", "tensor_parallel", "host")
        num_layers, degrees = model.number("num_layers"), model.child("tensor_parallel")
        for degree in degrees:
            yield (name, _num_gpus(degrees, degree)), _measured(degrees.child(degree), 1 / num_layers)


def _measured(node: Node, layer: float) -> Measured:
    """layer: one layer's share of the seconds in the file."""
    tables = "linear other embedding exchange head chunks decodes mixed_decodes decode_only captured_rows captured_graphs power"
    node.only(*tables.split())
    return Measured(
        linear=node.optional("linear", lambda table: _linear(table).scaled(layer)),
        attention=_attention(node, layer),
        other=node.optional("other", lambda table: _by_tokens(table).scaled(layer)),
        embedding=node.optional("embedding", _by_tokens),
        exchange=node.optional("exchange", lambda table: _by_tokens(table).scaled(layer)),
        head=node.optional("head", _by_requests),
        decode_only=node.optional("decode_only", lambda table: _decode_only(table, layer)),
        captured_rows=node.optional(
            "captured_rows", lambda table: CapturedRows(_grid(table, 1.0, "requests", "tokens"))
        ),
        captured_graphs=node.optional("captured_graphs", _graphs),
        power=node.optional("power", _power),
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
    linear, other = _linear(node.child("linear")), _by_tokens(node.child("other"))
    return DecodeOnly(linear.scaled(layer), other.scaled(layer), _by_requests(node.child("head")))


def _graphs(node: Node) -> CapturedGraphs:
    node.only("requests", "tokens", "fewest")
    requests, tokens = ([int(size) for size in node.ascending(key)] for key in ("requests", "tokens"))
    fewest = [int(size) for size in node.numbers("fewest", zero=True)]
    if len(fewest) != len(tokens):
        node.fail("fewest", f"has {len(fewest)} values for {len(tokens)} tokens")
    return CapturedGraphs(tuple(requests), tuple(zip(tokens, fewest, strict=True)))


def _power(node: Node) -> PowerLimit:
    node.only(*PowerLimit.__slots__, "tokens", "requests")
    return PowerLimit(
        _curve(node, "tokens", "gain", zero=True),
        _curve(node, "tokens", "loss", zero=True),
        node.number("reserve_seconds", zero=True),
        _curve(node, "requests", "decode_loss", zero=True),
        _curve(node, "requests", "rise_seconds"),
        node.number("idle_rise_seconds"),
    )


def _linear(node: Node) -> PiecewiseLinear:
    products = [key for key in node if key != "tokens"]
    if not products:
        node.fail("", "has no list of seconds")
    return PiecewiseLinear.sum([_curve(node, "tokens", product) for product in products])


def _curve(node: Node, sizes_key: str, seconds_key: str = "seconds", *, zero: bool = False) -> PiecewiseLinear:
    sizes, seconds = node.ascending(sizes_key), node.numbers(seconds_key, zero=zero)
    if len(seconds) != len(sizes):
        node.fail(seconds_key, f"has {len(seconds)} values for {len(sizes)} {sizes_key}")
    return PiecewiseLinear(sizes, seconds)


_by_tokens, _by_requests = (partial(_curve, sizes_key=key, zero=True) for key in ("tokens", "requests"))


def _grid(node: Node, factor: float, sizes_key: str = "sizes", columns_key: str = "contexts") -> BilinearGrid:
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
    return BilinearGrid.through(points)


def _num_gpus(node: Node, key: str) -> int:
    if not key.isdecimal() or int(key) < 1:
        node.fail(key, "must be a number of GPUs")
    return int(key)
