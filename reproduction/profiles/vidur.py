"""Vidur's operator and collective timings (Agrawal et al., MLSys 2024; github.com/microsoft/vidur, data/profiling).

A folder compute/DEVICE: MODEL/mlp.csv (all but attention, one layer, one GPU of each tensor-parallel degree) and
attention_*.csv; beside compute/, network/DEVICE_dgx/{all_reduce,send_recv}.csv. Times are milliseconds; medians are
taken. Models are identified by shape. Vidur does not measure the output head, which is estimated. Host time is left
out, as Vidur's own simulations leave it out by default.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim import Profile
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import Measured, MeasuredModel
from cbatch.sim.roofline import Ceilings
from reproduction.profiles.columns import curve, grid, read_columns, shares, split

LAYOUT = ".../vidur/compute/DEVICE"
MS = 1e-3

LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
OTHER = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add", "add")
PARTS = {"linear": LINEAR, "other": OTHER, "embedding": ("emb",)}
SHAPE = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd")
HEADS = ("n_q_head", "n_kv_head", "num_tensor_parallel_workers")
DEVICES = {  # bytes of memory; the rates that the tables themselves reach (their README): bytes/s, FLOP/s
    "a100": ("NVIDIA A100 80 GB", 80e9, 1.79e12, 268e12),
    "h100": ("NVIDIA H100 80 GB", 80e9, 3.02e12, 894e12),
}


def recognises(folder: Path) -> bool:
    return folder.parent.name == "compute" and any(folder.glob("*/*/mlp.csv*"))


def convert(folder: Path, specs: Sequence[ModelSpec]) -> Profile:
    """Returns the profile of one device for these models, with each degree of which something was measured."""
    if folder.name not in DEVICES:
        raise ProfileError(f"{folder}: device {folder.name} is unknown; known: {', '.join(DEVICES)}")
    hardware, memory, bandwidth, flops = DEVICES[folder.name]
    network = folder.parent.parent / "network" / f"{folder.name}_dgx"
    return Profile(
        name=f"vidur-{folder.name}",
        hardware=hardware,
        source=f"measured by others: Vidur's published operator timings, {folder.parent.name}/{folder.name}",
        memory_bytes=memory,
        ceilings=Ceilings(bandwidth, flops, tile=128),
        links=read_links(network) if network.is_dir() else Links(),
        models={
            spec.name: MeasuredModel(num_layers=1, shape=spec.shape, tensor_parallel=tables)
            for spec in specs
            if (tables := _tables(folder, spec))
        },
    )


def _tables(folder: Path, spec: ModelSpec) -> dict[int, Measured]:
    """Returns the tables of one layer by degree."""
    path = _find_model(folder, spec)
    layers = _read_layers(path) if path else {}
    tables = {degree: {**layers.get(degree, {}), **_attention(folder, share)} for degree, share in shares(spec).items()}
    return {degree: Measured(**measured) for degree, measured in tables.items() if measured}


def _find_model(folder: Path, spec: ModelSpec) -> Path | None:
    """Returns the file of a model of this shape; None if there is none."""
    shape = (spec.num_heads, spec.num_kv_heads, spec.hidden_size, spec.intermediate_size, str(spec.gated))
    for path in sorted(folder.glob("*/*/mlp.csv*")):
        first = read_columns(path, SHAPE, ("use_gated_mlp",), above_zero=SHAPE).iloc[0]
        if (*first[[*SHAPE]], first["use_gated_mlp"]) == shape:
            return path
    return None


def _read_layers(path: Path) -> dict[int, dict[str, Any]]:
    """Returns the tables of all but attention, by name and degree."""
    columns = {name: f"time_stats.{name}.median" for name in ("emb", *LINEAR, *OTHER)}
    degrees = "num_tensor_parallel_workers"
    rows = read_columns(path, ["num_tokens", degrees, *columns.values()], above_zero=("num_tokens", degrees))
    return {
        degree: {
            part: curve(
                path, part, of_degree["num_tokens"], reduce(add, (of_degree[columns[name]] for name in operators)) * MS
            )
            for part, operators in PARTS.items()
        }
        for (degree,), of_degree in split(rows, degrees)
    }


def _attention(folder: Path, share: ModelSpec) -> dict[str, Any]:
    """Returns chunks and decodes measured for this number of query and key-value heads on a GPU, if there are any."""
    for path in sorted(folder.glob("attention_*.csv*")):
        heads, kv_heads, parts = read_columns(path, HEADS, above_zero=HEADS).iloc[0]
        if (heads / parts, kv_heads / parts) == (share.num_heads, share.num_kv_heads) and share.head_dim == 128:
            return _read_attention(path)
    return {}


def _read_attention(path: Path) -> dict[str, Any]:
    before, after, prefill, decode = (
        f"time_stats.attn_{name}.median" for name in ("input_reshape", "output_reshape", "prefill", "decode")
    )
    batch, tokens, context = "batch_size", "prefill_chunk_size", "kv_cache_size"
    columns = (batch, tokens, context, prefill, decode, before, after)
    rows = read_columns(path, columns, optional=(prefill, decode), above_zero=(batch,))
    chunks, decodes = rows[rows[tokens] > 0], rows[rows[tokens] == 0]
    of_chunks = (chunks[prefill] + chunks[before] + chunks[after]) * MS
    of_decodes = (decodes[decode] + decodes[before] + decodes[after]) * MS
    return {
        "chunks": grid(path, "prefills", chunks[tokens], chunks[context], of_chunks),
        "decodes": grid(path, "decodes", decodes[batch], decodes[context] + 1, of_decodes),
    }


def read_links(folder: Path) -> Links:
    """Reads collectives of one kind of node; all-reduces are those within a node.

    Raises ProfileError without the folder.
    """
    if not folder.is_dir():
        raise ProfileError(f"links={folder}: no such folder; give .../vidur/network/DEVICE_dgx")
    reduces, sends = _collective(folder, "all_reduce"), _collective(folder, "send_recv")
    return Links(
        all_reduce={workers: times for (workers, per_node), times in reduces.items() if workers == per_node},
        within_node=sends.get((2, 2)),
        between_nodes=sends.get((2, 1)),
    )


def _collective(folder: Path, name: str) -> dict[tuple[int, int], PiecewiseLinear]:
    """Returns seconds against bytes, by (GPUs that take part, how many of them on each node)."""
    median, groups = f"time_stats.{name}.median", ["num_workers", "devices_per_node"]
    tables = {}
    for path in sorted(folder.glob(f"{name}.csv*")):
        rows = read_columns(path, (*groups, "size", median), above_zero=("size", *groups))
        for (workers, per_node), times in split(rows, *groups):
            tables[workers, per_node] = curve(path, name, times["size"], times[median] * MS)
    return tables
