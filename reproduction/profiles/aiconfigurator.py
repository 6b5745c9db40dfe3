"""Kernel timings of A100, H100 and H200 (github.com/ai-dynamo/aiconfigurator): matrix products, attention and NCCL.

A folder contains the tables of one system: *_gemm_bf16, *_context_attention, *_generation_attention and nccl-*, in
milliseconds per call on one GPU. They are not tied to a model; any model is composed from them, by interpolation:

* A product with n outputs and k inputs that was not measured takes the time per multiplication of its neighbours in (n,
  k), interpolated in log space. On the A100, above 128 tokens, the time per wave is interpolated instead: a wave
  computes one tile of 128 x 256 on every multiprocessor. With each n left out in turn, waves predict it with a median
  error of 1.3% to 8.5%, multiplications with 4.0% to 12.6% (192 to 4,096 tokens; k >= 1,024). Newer GPUs show no waves
  (2.7% to 6.0%).
* Decodes with more key-value heads than measured cost as much as decodes of more sequences, as heads are independent.
* Decodes were repeated on one KV cache (collect_attn.py), so that a small one came from the GPU's L2 cache; in an engine the weights of all
  layers pass between two uses. Such batches take the time between that of the smallest batch and of the first that exceeds that cache, if it is longer.
* Context attention was measured without earlier context. A chunk with context takes its own time plus its scores with
  earlier tokens at the rate of one prompt as long as both; this is marked as derived.

Small operations were not measured and are estimated too. Host time is unknown and taken as 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim import Profile
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import Measured, MeasuredModel
from cbatch.sim.roofline import Ceilings
from reproduction.profiles.columns import add_up, curve, only_file, read_columns, shares, split

LAYOUT = ".../aiconfigurator/SYSTEM"
MS, HALF = 1e-3, 2  # bytes of the 16-bit types that were measured
SYSTEMS = {  # bytes of memory, of L2 cache; multiprocessors over which products run in waves, 0: no waves
    "a100_sxm": ("NVIDIA A100-SXM4-80GB", 80e9, 40e6, 108),
    "h100_sxm": ("NVIDIA H100 80GB HBM3", 80e9, 50e6, 0),
    "h200_sxm": ("NVIDIA H200", 141e9, 50e6, 0),
}
TILE = (128, 256)  # tokens x outputs
BEYOND_CACHE = 200e6
"""Bytes of weights above which a product reads them from memory and not from the GPU's cache."""

CONTEXT = (
    "derived: measured without context before a chunk, to which its scores are added at the rate of a whole prompt"
)


def recognises(folder: Path) -> bool:
    return any(folder.glob("*_gemm_bf16.csv*"))


def convert(folder: Path, specs: Sequence[ModelSpec]) -> Profile:
    """Returns the profile of one system with tables for these models, at each degree that divides them."""
    if folder.name not in SYSTEMS:
        raise ProfileError(f"{folder}: system {folder.name} is unknown; known: {', '.join(SYSTEMS)}")
    hardware, memory, cache, multiprocessors = SYSTEMS[folder.name]
    products, attention = Products(folder, multiprocessors), Attention(folder, cache)
    models = {spec.name: _tables(products, attention, spec) for spec in specs}
    chunks = [
        ("models", name, "tensor_parallel", str(degree), "chunks")
        for name, tables in models.items()
        for degree, measured in tables.items()
        if measured.chunks
    ]
    return Profile(
        name=f"aiconfigurator-{folder.name}",
        hardware=hardware,
        source=f"measured by others: aiconfigurator's published kernel timings, {folder.parent.name}/{folder.name}",
        memory_bytes=memory,
        ceilings=products.ceilings(),
        links=_links(only_file(folder, "nccl-*.csv*")),
        models={
            spec.name: MeasuredModel(num_layers=1, shape=spec.shape, tensor_parallel=models[spec.name])
            for spec in specs
        },
        origins=dict.fromkeys(chunks, CONTEXT),
    )


def _tables(products: "Products", attention: "Attention", spec: ModelSpec) -> dict[int, Measured]:
    """Returns the tables of one layer by degree."""
    return {
        degree: Measured(
            linear=add_up(products.path, [products.seconds(*shape) for shape in share.linear_shapes.values()]),
            head=products.seconds(share.hidden_size, share.vocab_size),
            **attention.tables(share),
        )
        for degree, share in shares(spec).items()
    }


class Products:
    """The matrix products of one system."""

    def __init__(self, folder: Path, multiprocessors: int) -> None:
        self.path, self._multiprocessors = only_file(folder, "*_gemm_bf16.csv*"), multiprocessors
        columns = ("n", "k", "m", "latency")
        rows = read_columns(self.path, columns, above_zero=columns)
        # seconds by tokens, for each (n outputs, k inputs)
        self._products: dict[tuple[float, float], dict[float, float]] = {}
        for outputs, inputs, tokens, ms in rows[[*columns]].itertuples(index=False):
            self._products.setdefault((outputs, inputs), {})[tokens] = ms * MS
        self._sizes = sorted({size for shape in self._products for size in shape})

    def ceilings(self) -> Ceilings:
        """Returns the best that any product reached: arithmetic at many tokens, reading weights at one."""
        flops, bandwidth = 0.0, 0.0
        large = min(BEYOND_CACHE, HALF * max(outputs * inputs for outputs, inputs in self._products))
        for (outputs, inputs), seconds in self._products.items():
            flops = max(flops, *(2 * tokens * outputs * inputs / time for tokens, time in seconds.items()))
            if HALF * outputs * inputs >= large:
                bandwidth = max(bandwidth, HALF * outputs * inputs / seconds[min(seconds)])
        return Ceilings(bandwidth, flops, tile=128)

    def seconds(self, inputs: int, outputs: int) -> PiecewiseLinear:
        """Returns the seconds of a matrix product against tokens."""
        pairs = product(_neighbours(self._sizes, outputs), _neighbours(self._sizes, inputs))
        corners = [
            (n, k, weight_n * weight_k)
            for (n, weight_n), (k, weight_k) in pairs
            if (n, k) in self._products and weight_n * weight_k > 0
        ]
        counts = sorted(set.intersection(*(set(self._products[n, k]) for n, k, _ in corners))) if corners else ()
        if not counts:
            raise ProfileError(f"{self.path}: no product near {inputs} x {outputs} was measured; give a smaller model")
        weights = sum(weight for _, _, weight in corners)
        points = []
        for count in counts:
            mean = sum(
                weight / weights * log(self._products[n, k][count] / (k * self._units(count, n)))
                for n, k, weight in corners
            )
            points.append((count, exp(mean) * inputs * self._units(count, outputs)))
        return PiecewiseLinear.through(points)

    def _units(self, tokens: float, outputs: float) -> float:
        """Returns the number that a product's time is proportional to: waves of tiles, or outputs."""
        if not self._multiprocessors or tokens <= TILE[0]:
            return outputs
        tiles = -(-tokens // TILE[0]) * -(-outputs // TILE[1])
        return -(-tiles // self._multiprocessors)


class Attention:
    """The attention kernels of one system."""

    def __init__(self, folder: Path, cache: float) -> None:
        self._cache = cache
        heads = ["num_heads", "num_key_value_heads", "head_dim"]
        self._chunk_path, self._decode_path = (
            only_file(folder, f"*_{name}_attention.csv*") for name in ("context", "generation")
        )
        chunks, decodes = ["batch_size", "isl", *heads], ["batch_size", *heads]
        self._chunks = read_columns(self._chunk_path, (*chunks, "latency"), above_zero=chunks)
        self._decodes = read_columns(self._decode_path, (*decodes, "step", "latency"), above_zero=decodes)

    def tables(self, share: ModelSpec) -> dict[str, Any]:
        """Returns chunks against (tokens, context before them), and decodes against (number, context), if both are there."""
        chunks = _of_heads(self._chunks[self._chunks["batch_size"] == 1], share)
        decodes = _of_heads(self._decodes, share)
        if chunks.empty or decodes.empty:
            return {}
        return {"chunks": self._chunk_grid(chunks, share), "decodes": decode_grid(decodes, share, self._cache)}

    def _chunk_grid(self, rows: pd.DataFrame, share: ModelSpec) -> BilinearGrid:
        by_heads: dict[float, dict[float, float]] = {  # query heads: prompt: seconds
            heads: dict(zip(of_heads["isl"], of_heads["latency"] * MS, strict=True))
            for (heads,), of_heads in split(rows, "num_heads")
        }
        near = _neighbours(sorted(by_heads), share.num_heads)
        prompts = sorted(set.intersection(*(set(by_heads[heads]) for heads, _ in near)))
        if not prompts:
            raise ProfileError(f"{self._chunk_path}: holds no prompts that all heads share; fetch the file again")
        whole = PiecewiseLinear.through(
            (prompt, sum(weight * by_heads[heads][prompt] for heads, weight in near)) for prompt in prompts
        )
        return BilinearGrid.through(
            (tokens, context, _with_context(whole, tokens, context)) for tokens in prompts for context in (0, *prompts)
        )


def _of_heads(rows: pd.DataFrame, share: ModelSpec) -> pd.DataFrame:
    """Returns the rows of heads of this size, with as many query heads for each key-value head."""
    ratio = rows["num_heads"] * share.num_kv_heads == rows["num_key_value_heads"] * share.num_heads
    return rows[ratio & (rows["head_dim"] == share.head_dim)]


def decode_grid(rows: pd.DataFrame, share: ModelSpec, cache: float) -> BilinearGrid:
    """cache: bytes of the L2 cache, from which no KV cache is read."""
    kv_heads = min(rows["num_key_value_heads"].unique(), key=lambda number: abs(log(number / share.num_kv_heads)))
    measured = rows[rows["num_key_value_heads"] == kv_heads]
    points = list[tuple[float, float, float]]()
    for (step,), of_step in split(measured, "step"):
        times = of_step.groupby("batch_size")["latency"].mean() * MS
        beyond = times[times.index * 2 * HALF * kv_heads * share.head_dim * (step + 1) > cache]
        ends = pd.concat([times.head(1), beyond.head(1)])
        times = times.clip(lower=np.interp(times.index, ends.index, ends))
        sizes = times.index * kv_heads / share.num_kv_heads
        points += zip(sizes.tolist(), [step + 1] * len(sizes), times.tolist(), strict=True)
    return BilinearGrid.through(points)


def _with_context(whole: PiecewiseLinear, tokens: float, context: float) -> float:
    together = tokens + context
    return whole.at(tokens) + tokens * context * whole.at(together) / (together * (together + 1) / 2)


def _neighbours(sizes: Sequence[float], size: int) -> list[tuple[float, float]]:
    """The measured sizes on either side and their weights, in log space; the outermost one beyond the range."""
    right = bisect_right(sizes, size)
    if right == 0 or right == len(sizes) or sizes[right - 1] == size:
        return [(sizes[max(right - 1, 0)], 1.0)]
    low, high = sizes[right - 1], sizes[right]
    share = log(size / low) / log(high / low)
    return [(low, 1 - share), (high, share)]


def _links(path: Path) -> Links:
    """Returns all-reduces of 16-bit values within a node; sizes in the file count elements."""
    columns = ("num_gpus", "message_size", "latency")
    rows = read_columns(path, columns, labels=("op_name", "nccl_dtype"), above_zero=columns)
    rows = rows[(rows["op_name"] == "all_reduce") & (rows["nccl_dtype"] == "half")]
    return Links(
        {
            gpus: curve(path, "all-reduces", HALF * times["message_size"], times["latency"] * MS)
            for (gpus,), times in split(rows, "num_gpus")
        }
    )
