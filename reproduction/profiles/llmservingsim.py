"""Layer timings of LLMServingSim (github.com/casys-kaist/LLMServingSim, profiler/perf): vLLM's kernels, layer by layer.

A folder MODEL_tpDEGREE: dense.csv (operators of one layer against tokens), per_sequence.csv (output head and sampler
against sequences) and attention.csv (one layer, a chunk and decodes in one call). Times are microseconds. Links and
host time were not measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim import Profile
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.measured import Measured, MeasuredModel
from cbatch.sim.provenance import Compared, Loop
from cbatch.sim.roofline import Ceilings
from reproduction.profiles.columns import add_up, curve, grid, only_file, read_columns, shares

LAYOUT = ".../llmservingsim/DEVICE/MODEL_tpDEGREE"
US = 1e-6

SERVED = "RTXPRO6000", "llama-3.1-8b_tp1"
ERROR = Compared(
    ("llama-3.1-8b",),
    gpus=1,
    largest_error={"TTFT mean": 0.1, "TPOT mean": 0.041, "end to end mean": 0.057},
    runs=1,
    cards=1,
    date="2026-11-26",
    see="python -m reproduction.validation rivals",
)
"""Error of that device's tables of that model, which lack the engine's own time: of one served run of 300 requests."""

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OTHER = ("layernorm", "layernorm", "rotary_emb", "act_fn")
DEVICES = {  # bytes of memory; from the data sheet: bytes/s, dense 16-bit FLOP/s
    "RTXPRO6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96e9, 1.597e12, 504e12),
    "RTX4090": ("NVIDIA GeForce RTX 4090", 24e9, 1.008e12, 165e12),
}


def recognises(folder: Path) -> bool:
    return all(any(folder.glob(f"{name}.csv*")) for name in ("dense", "attention", "per_sequence"))


def convert(folder: Path, specs: Sequence[ModelSpec]) -> Profile:
    """Returns the profile of the folder's model and degree, if that is one of these models."""
    device = folder.parent.name
    if device not in DEVICES:
        raise ProfileError(f"{folder}: device {device} is unknown; known: {', '.join(DEVICES)}")
    hardware, memory, bandwidth, flops = DEVICES[device]
    models = {
        spec.name: MeasuredModel(num_layers=1, shape=spec.shape, tensor_parallel={degree: _read_tables(folder)})
        for spec in specs
        for degree in shares(spec)
        if folder.name.lower() == f"{spec.name}_tp{degree}".lower()
    }
    served = (device, folder.name.lower()) == SERVED
    return Profile(
        name=f"llmservingsim-{device.lower()}",
        hardware=hardware,
        source=f"measured by others: LLMServingSim's published layer timings, {folder.parent.name}/{folder.name}",
        compared=dict.fromkeys(get_args(Loop), ERROR) if served else {},
        memory_bytes=memory,
        ceilings=Ceilings(bandwidth, flops, tile=128),
        models=models,
    )


def _read_tables(folder: Path) -> Measured:
    """Returns the tables of one layer."""
    dense, ends = only_file(folder, "dense.csv*"), only_file(folder, "per_sequence.csv*")
    return Measured(
        linear=_sum(dense, "tokens", LINEAR),
        other=_sum(dense, "tokens", OTHER),
        head=_sum(ends, "sequences", ("lm_head", "sampler")),
        embedding=_sum(dense, "tokens", ("embedding", "final_layernorm")),
        **_attention(only_file(folder, "attention.csv*")),
    )


def _sum(path: Path, size: str, layers: Sequence[str]) -> PiecewiseLinear:
    """Returns the seconds of consecutive layers. Raises ProfileError for a layer that was not measured."""
    rows = read_columns(path, (size, "time_us"), ("layer",), above_zero=(size,))
    of_layer = {layer: rows[rows["layer"] == layer] for layer in layers}
    return add_up(
        path, [curve(path, layer, of_layer[layer][size], of_layer[layer]["time_us"] * US) for layer in layers]
    )


def _attention(path: Path) -> dict[str, Any]:
    """Returns chunks alone, decodes alone, and what decodes add to the call of a chunk: the median over all chunks.

    In a mixed call this kernel reads the decodes' context at a lower rate than alone, so that the two do not simply
    add.
    """
    chunk, decode, seconds = ["prefill_chunk", "kv_prefill"], ["n_decode", "kv_decode"], "seconds"
    rows = read_columns(path, (*chunk, *decode, "time_us"))
    rows[seconds] = rows["time_us"] * US
    has_chunk, has_decodes = rows["prefill_chunk"] > 0, rows["n_decode"] > 0
    alone, decodes = rows[has_chunk & ~has_decodes], rows[has_decodes & ~has_chunk]
    mixed = rows[has_decodes & has_chunk].merge(alone[[*chunk, seconds]], on=chunk, suffixes=("", "_alone"))
    mixed["added"] = (mixed[seconds] - mixed[f"{seconds}_alone"]).clip(lower=0.0)
    added = mixed.groupby(decode, as_index=False)["added"].median()
    tables = {
        "chunks": grid(path, "chunks alone", *(alone[name] for name in (*chunk, seconds))),
        "decodes": grid(path, "decodes alone", *(decodes[name] for name in (*decode, seconds))),
    }
    if not added.empty:
        tables["mixed_decodes"] = grid(path, "decodes beside a chunk", *(added[name] for name in (*decode, "added")))
    return tables
