"""Vidur's operator and collective timings (Agrawal et al., MLSys 2024; github.com/microsoft/vidur, data/profiling).

A folder compute/DEVICE: MODEL/mlp.csv (all but attention, one layer, one GPU of each tensor-parallel degree) and
attention_*.csv; beside compute/, network/DEVICE_dgx/{all_reduce,send_recv}.csv. Times are milliseconds; medians are
taken. Models are identified by shape. Vidur does not measure the output head, which is estimated. Host time is left
out, as Vidur's own simulations leave it out by default.
"""

from functools import cached_property
from math import isnan
from pathlib import Path

from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import TableAttention
from cbatch.sim.importers.table import read_table, some
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.profile import Measured, Profile
from cbatch.sim.provenance import NOT_COMPARED
from cbatch.sim.roofline import Ceilings

LAYOUT = ".../vidur/compute/DEVICE"
MS = 1e-3

LINEAR = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
OTHER = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add", "add")
DEVICES = {  # bytes of memory; the rates that the tables themselves reach (their README): bytes/s, FLOP/s
    "a100": ("NVIDIA A100 80 GB", 80e9, 1.79e12, 268e12),
    "h100": ("NVIDIA H100 80 GB", 80e9, 3.02e12, 894e12),
}


def recognises(folder: Path) -> bool:
    return folder.parent.name == "compute" and any(folder.glob("*/*/mlp.csv*"))


def read(folder: Path) -> Profile:
    if folder.name not in DEVICES:
        raise ProfileError(f"hardware={folder}: device {folder.name} is unknown; known: {', '.join(DEVICES)}")
    hardware, memory, bandwidth, flops = DEVICES[folder.name]
    network = folder.parent.parent / "network" / f"{folder.name}_dgx"
    return Profile(
        name=f"vidur-{folder.name}",
        hardware=hardware,
        source=f"measured by others: Vidur's published operator timings, {folder.parent.name}/{folder.name}",
        error=NOT_COMPARED,
        memory_bytes=memory,
        ceilings=Ceilings(bandwidth, flops, tile=128),
        tables=VidurTables(folder),
        links=read_links(network) if network.is_dir() else Links(),
    )


class VidurTables:
    """The compute tables of one device; implements `Tables`. Files are read when a model needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._measured: dict[tuple[ModelSpec, int], Measured] = {}

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        if (spec, tensor_parallel) not in self._measured:
            self._measured[spec, tensor_parallel] = self._read(spec, tensor_parallel)
        return self._measured[spec, tensor_parallel]

    def _read(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        share = Topology(tensor_parallel).share(spec)
        attention = self._attention(share)
        shape = (spec.num_heads, spec.num_kv_heads, spec.hidden_size, spec.intermediate_size, spec.gated)
        if (path := self._models.get(shape)) is None:
            return Measured(attention=attention)
        columns = [f"time_stats.{name}.median" for name in ("emb", *LINEAR, *OTHER)]
        degrees = ("num_tensor_parallel_workers",)
        table = read_table(path, ["num_tokens", *columns], degrees, above_zero=("num_tokens",))
        rows = [numbers for (degree,), numbers in table if degree == str(tensor_parallel)]
        if not rows:
            return Measured(attention=attention)
        last = 2 + len(LINEAR)
        return Measured(
            linear=PiecewiseLinear.through((row[0], sum(row[2:last]) * MS) for row in rows),
            attention=attention,
            other=PiecewiseLinear.through((row[0], sum(row[last:]) * MS) for row in rows),
            embedding=PiecewiseLinear.through((row[0], row[1] * MS) for row in rows),
        )

    @cached_property
    def _models(self) -> dict[tuple[float | bool, ...], Path]:
        """The file of each model shape."""
        columns, found = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd"), {}
        for path in sorted(self.folder.glob("*/*/mlp.csv*")):
            [((gated,), shape)] = read_table(path, columns, ("use_gated_mlp",), above_zero=columns, num_rows=1)
            found[*shape, gated == "True"] = path
        return found

    def _attention(self, share: ModelSpec) -> TableAttention | None:
        """The table measured for this number of query and key-value heads on the GPU, if there is one."""
        columns = ("n_q_head", "n_kv_head", "num_tensor_parallel_workers")
        for path in sorted(self.folder.glob("attention_*.csv*")):
            [(_, (heads, kv_heads, parts))] = read_table(path, columns, above_zero=columns, num_rows=1)
            if (heads / parts, kv_heads / parts) == (share.num_heads, share.num_kv_heads) and share.head_dim == 128:
                return _read_attention(path)
        return None


def _read_attention(path: Path) -> TableAttention:
    prefill, decode = "time_stats.attn_prefill.median", "time_stats.attn_decode.median"
    around = ("time_stats.attn_input_reshape.median", "time_stats.attn_output_reshape.median")
    columns = ("batch_size", "prefill_chunk_size", "kv_cache_size", prefill, decode, *around)
    rows = read_table(path, columns, optional=(prefill, decode), above_zero=("batch_size",))
    chunks, decodes = [], []
    for _, (batch, tokens, context, of_prefill, of_decode, before, after) in rows:
        if tokens:
            chunks.append((tokens, context, (of_prefill + before + after) * MS))
        else:
            decodes.append((batch, context + 1, (of_decode + before + after) * MS))
    if any(isnan(seconds) for points in (chunks, decodes) for _, _, seconds in points):
        raise ProfileError(f"{path}: a row has no measured time; fetch the file again")
    chunks, decodes = some(path, chunks, "prefills"), some(path, decodes, "decodes")
    return TableAttention(BilinearGrid.through(chunks), BilinearGrid.through(decodes))


def read_links(folder: Path) -> Links:
    """Collectives of one kind of node; all-reduces are those within a node. Raises ProfileError without the folder."""
    if not folder.is_dir():
        raise ProfileError(f"links={folder}: no such folder; give .../vidur/network/DEVICE_dgx")
    reduces, sends = _collective(folder, "all_reduce"), _collective(folder, "send_recv")
    return Links(
        all_reduce={workers: found for (workers, per_node), found in reduces.items() if workers == per_node},
        within_node=sends.get((2, 2)),
        between_nodes=sends.get((2, 1)),
    )


def _collective(folder: Path, name: str) -> dict[tuple[int, int], PiecewiseLinear]:
    """Seconds against bytes, by (GPUs that take part, how many of them on each node)."""
    columns = ("num_workers", "devices_per_node", "size", f"time_stats.{name}.median")
    points: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for path in sorted(folder.glob(f"{name}.csv*")):
        for _, (workers, per_node, size, ms) in read_table(path, columns, above_zero=("size",)):
            points.setdefault((int(workers), int(per_node)), []).append((size, ms * MS))
    return {which: PiecewiseLinear.through(found) for which, found in points.items()}
