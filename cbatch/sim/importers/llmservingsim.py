"""Layer timings of LLMServingSim (github.com/casys-kaist/LLMServingSim, profiler/perf): vLLM's kernels, layer by layer.

A folder MODEL_tpDEGREE: dense.csv (operators of one layer against tokens), per_sequence.csv (output head and sampler
against sequences) and attention.csv (one layer, a chunk and decodes in one call). Times are microseconds. Links and
host time were not measured.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.sim.attention import TableAttention
from cbatch.sim.importers.table import only_file, read_table, some, summed
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.profile import Measured, Profile
from cbatch.sim.provenance import Compared
from cbatch.sim.roofline import Ceilings

LAYOUT = ".../llmservingsim/DEVICE/MODEL_tpDEGREE"
US = 1e-6

LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
OTHER = ("layernorm", "layernorm", "rotary_emb", "act_fn")
DEVICES = {  # bytes of memory; from the data sheet: bytes/s, dense 16-bit FLOP/s
    "RTXPRO6000": ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96e9, 1.597e12, 504e12)
}


def recognises(folder: Path) -> bool:
    return all(any(folder.glob(f"{name}.csv*")) for name in ("dense", "attention", "per_sequence"))


def read(folder: Path) -> Profile:
    device = folder.parent.name
    if device not in DEVICES:
        raise ProfileError(f"hardware={folder}: device {device} is unknown; known: {', '.join(DEVICES)}")
    hardware, memory, bandwidth, flops = DEVICES[device]
    return Profile(
        name=f"llmservingsim-{device.lower()}",
        hardware=hardware,
        source=f"measured by others: LLMServingSim's published layer timings, {folder.parent.name}/{folder.name}",
        error="one served run of 300 requests on an RTX PRO 6000: total time 4.7% short, mean time per output token "
        "4.1%, mean time to first token 11% (python -m reproduction.papers served); host time is not in the tables",
        memory_bytes=memory,
        ceilings=Ceilings(bandwidth, flops, tile=128),
        tables=LayerTables(folder),
        compared=dict.fromkeys(("sync", "async"), Compared(("llama-3.1-8b",), 1)),
    )


class LayerTables:
    """The tables of one model at one tensor-parallel degree; implements `Tables`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        if self.folder.name.lower() != f"{spec.name}_tp{tensor_parallel}".lower():
            return Measured()
        dense = _Layers(only_file(self.folder, "dense.csv*"), "tokens")
        ends = _Layers(only_file(self.folder, "per_sequence.csv*"), "sequences")
        return Measured(
            linear=dense.sum(LINEAR),
            attention=_attention(only_file(self.folder, "attention.csv*")),
            other=dense.sum(OTHER),
            embedding=dense.sum(("embedding", "final_layernorm")),
            head=ends.sum(("lm_head", "sampler")),
        )


class _Layers:
    """Seconds of each layer against a size, from one file."""

    def __init__(self, path: Path, size: str) -> None:
        self.path = path
        self._points: dict[str, list[tuple[float, float]]] = {}
        for (layer,), (number, us) in read_table(path, (size, "time_us"), labels=("layer",), above_zero=(size,)):
            self._points.setdefault(layer, []).append((number, us * US))

    def sum(self, layers: Sequence[str]) -> PiecewiseLinear:
        """Seconds of consecutive layers. Raises ProfileError for a layer that was not measured."""
        points = (some(self.path, self._points.get(layer, ()), layer) for layer in layers)
        return summed(self.path, [PiecewiseLinear.through(found) for found in points])


def _attention(path: Path) -> TableAttention:
    """Chunks alone, decodes alone, and what decodes add to the call of a chunk: the median over all chunks.

    In a mixed call this kernel reads the decodes' context at a lower rate than alone, so that the two do not simply
    add.
    """
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    rows = [(*sizes, us * US) for _, (*sizes, us) in read_table(path, columns)]
    chunks = {(chunk, before): seconds for chunk, before, number, _, seconds in rows if chunk and not number}
    added_by: dict[tuple[float, float], list[float]] = {}
    for chunk, before, number, context, seconds in rows:
        if number and (chunk, before) in chunks:
            added_by.setdefault((number, context), []).append(max(seconds - chunks[chunk, before], 0.0))
    decodes = ((number, context, seconds) for chunk, _, number, context, seconds in rows if number and not chunk)
    alone = ((*pair, seconds) for pair, seconds in chunks.items())
    added = [(*pair, median(seconds)) for pair, seconds in added_by.items()]
    return TableAttention(
        chunks=BilinearGrid.through(some(path, alone, "chunks alone")),
        decodes=BilinearGrid.through(some(path, decodes, "decodes alone")),
        mixed_decodes=BilinearGrid.through(added) if added else None,
    )
