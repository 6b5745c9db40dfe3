"""Kernel timings of A100, H100 and H200 (github.com/ai-dynamo/aiconfigurator): matrix products, attention and NCCL.

A folder contains the tables of one system: *_gemm_bf16, *_context_attention, *_generation_attention and nccl-*, in
milliseconds per call on one GPU. They are not tied to a model; any model is composed from them, by interpolation:

* A product with n outputs and k inputs that was not measured takes the time per multiplication of its neighbours in (n,
  k), interpolated in log space. On the A100, above 128 tokens, the time per wave is interpolated instead: a wave
  computes one tile of 128 x 256 on every multiprocessor. With each n left out in turn, waves predict it with a median
  error of 1.3% to 8.5%, multiplications with 4.0% to 12.6% (192 to 4,096 tokens; k >= 1,024). Newer GPUs show no waves
  (2.7% to 6.0%).
* Decodes with more key-value heads than measured cost as much as decodes of more sequences, as heads are independent.
* Context attention was measured without earlier context. A chunk with context takes its own time plus its scores with
  earlier tokens at the rate of one prompt as long as both; this is marked as estimated.

Small operations were not measured and are estimated too. Host time is unknown and taken as 0.
"""

from bisect import bisect_right
from functools import cached_property
from itertools import product
from math import exp, log
from pathlib import Path

from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import TableAttention
from cbatch.sim.importers.table import only_file, read_table, some, summed
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.profile import Measured, Profile
from cbatch.sim.provenance import NOT_COMPARED
from cbatch.sim.roofline import Ceilings

LAYOUT = ".../aiconfigurator/SYSTEM"
MS, HALF = 1e-3, 2  # bytes of the 16-bit types that were measured
SYSTEMS = {  # bytes of memory; multiprocessors over which products run in waves, 0: no waves
    "a100_sxm": ("NVIDIA A100-SXM4-80GB", 80e9, 108),
    "h100_sxm": ("NVIDIA H100 80GB HBM3", 80e9, 0),
    "h200_sxm": ("NVIDIA H200", 141e9, 0),
}
TILE = (128, 256)  # tokens x outputs
BEYOND_CACHE = 200e6
"""Bytes of weights above which a product reads them from memory and not from the GPU's cache."""


def recognises(folder: Path) -> bool:
    return any(folder.glob("*_gemm_bf16.csv*"))


def read(folder: Path) -> Profile:
    if folder.name not in SYSTEMS:
        raise ProfileError(f"hardware={folder}: system {folder.name} is unknown; known: {', '.join(SYSTEMS)}")
    hardware, memory, multiprocessors = SYSTEMS[folder.name]
    tables = KernelTables(folder, multiprocessors)
    return Profile(
        name=f"aiconfigurator-{folder.name}",
        hardware=hardware,
        source=f"measured by others: aiconfigurator's published kernel timings, {folder.parent.name}/{folder.name}",
        error=NOT_COMPARED,
        memory_bytes=memory,
        ceilings=tables.ceilings(),
        tables=tables,
        links=_links(only_file(folder, "nccl-*.csv*")),
    )


class KernelTables:
    """The kernel tables of one system; implements `Tables`."""

    def __init__(self, folder: Path, multiprocessors: int) -> None:
        self.folder = folder
        self.multiprocessors = multiprocessors

    def measured(self, spec: ModelSpec, tensor_parallel: int) -> Measured:
        share = Topology(tensor_parallel).share(spec)
        chunks, decodes = self._chunks(share), self._decodes(share)
        return Measured(
            linear=summed(self.folder, [self.product(*shape) for shape in share.linear_shapes.values()]),
            attention=TableAttention(chunks, decodes) if chunks and decodes else None,
            head=self.product(share.hidden_size, share.vocab_size),
            inferred=("context of chunks",) if chunks and decodes else (),
        )

    def ceilings(self) -> Ceilings:
        """The best that any product reached: arithmetic at many tokens, reading weights at one."""
        flops, bandwidth = 0.0, 0.0
        large = min(BEYOND_CACHE, HALF * max(outputs * inputs for outputs, inputs in self._products))
        for (outputs, inputs), seconds in self._products.items():
            flops = max(flops, *(2 * tokens * outputs * inputs / time for tokens, time in seconds.items()))
            if HALF * outputs * inputs >= large:
                bandwidth = max(bandwidth, HALF * outputs * inputs / seconds[min(seconds)])
        return Ceilings(bandwidth, flops, tile=128)

    def product(self, inputs: int, outputs: int) -> PiecewiseLinear:
        """Seconds of a matrix product against tokens."""
        pairs = product(_neighbours(self._sizes, outputs), _neighbours(self._sizes, inputs))
        corners = [
            (n, k, weight_n * weight_k)
            for (n, weight_n), (k, weight_k) in pairs
            if (n, k) in self._products and weight_n * weight_k > 0
        ]
        if not corners:
            problem = f"no product near {inputs} x {outputs} was measured"
            raise ProfileError(f"{self.folder}: {problem}; choose a smaller model")
        weights = sum(weight for _, _, weight in corners)
        counts = sorted(set.intersection(*(set(self._products[n, k]) for n, k, _ in corners)))
        points = []
        for count in some(self.folder, counts, f"products near {inputs} x {outputs}, with the same tokens in all,"):
            each = sum(
                weight / weights * log(self._products[n, k][count] / (k * self._units(count, n)))
                for n, k, weight in corners
            )
            points.append((count, exp(each) * inputs * self._units(count, outputs)))
        return PiecewiseLinear.through(points)

    def _units(self, tokens: int, outputs: int) -> int:
        """Number that a product's time is proportional to: waves of tiles, or outputs."""
        if not self.multiprocessors or tokens <= TILE[0]:
            return outputs
        tiles = -(-tokens // TILE[0]) * -(-outputs // TILE[1])
        return -(-tiles // self.multiprocessors)

    @cached_property
    def _products(self) -> dict[tuple[int, int], dict[int, float]]:
        """Seconds by tokens, for each (n outputs, k inputs)."""
        found: dict[tuple[int, int], dict[int, float]] = {}
        path, columns = only_file(self.folder, "*_gemm_bf16.csv*"), ("m", "n", "k", "latency")
        for _, (m, n, k, ms) in read_table(path, columns, above_zero=columns):
            found.setdefault((int(n), int(k)), {})[int(m)] = ms * MS
        return found

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted({n for n, _ in self._products} | {k for _, k in self._products})

    def _chunks(self, share: ModelSpec) -> BilinearGrid | None:
        """Seconds of one chunk against (tokens, context before them)."""
        by_heads: dict[int, dict[int, float]] = {}  # for this ratio of heads: query heads: prompt: seconds
        columns = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "latency")
        path = only_file(self.folder, "*_context_attention.csv*")
        for _, (batch, prompt, heads, kv_heads, dim, ms) in read_table(path, columns, above_zero=columns[:4]):
            if batch == 1 and dim == share.head_dim and heads * share.num_kv_heads == kv_heads * share.num_heads:
                by_heads.setdefault(int(heads), {})[int(prompt)] = ms * MS
        if not by_heads:
            return None
        near = _neighbours(sorted(by_heads), share.num_heads)
        prompts = some(path, sorted(set.intersection(*(set(by_heads[heads]) for heads, _ in near))), "the same prompts")
        whole = PiecewiseLinear.through(
            (prompt, sum(weight * by_heads[heads][prompt] for heads, weight in near)) for prompt in prompts
        )
        return BilinearGrid.through(
            (tokens, context, _with_context(whole, tokens, context)) for tokens in prompts for context in (0, *prompts)
        )

    def _decodes(self, share: ModelSpec) -> BilinearGrid | None:
        """Seconds of decodes against (number, context)."""
        by_kv_heads: dict[int, list[tuple[float, float, float]]] = {}
        columns = ("batch_size", "step", "num_heads", "num_key_value_heads", "head_dim", "latency")
        path = only_file(self.folder, "*_generation_attention.csv*")
        above_zero = (columns[0], *columns[2:4])
        for _, (batch, before, heads, kv_heads, dim, ms) in read_table(path, columns, above_zero=above_zero):
            if dim == share.head_dim and heads * share.num_kv_heads == kv_heads * share.num_heads:
                by_kv_heads.setdefault(int(kv_heads), []).append((batch, before + 1, ms * MS))
        if not by_kv_heads:
            return None
        measured = min(by_kv_heads, key=lambda kv_heads: abs(log(kv_heads / share.num_kv_heads)))
        sequences = measured / share.num_kv_heads
        return BilinearGrid.through(
            (batch * sequences, context, seconds) for batch, context, seconds in by_kv_heads[measured]
        )


def _with_context(whole: PiecewiseLinear, tokens: int, context: int) -> float:
    together = tokens + context
    return whole.at(tokens) + tokens * context * whole.at(together) / (together * (together + 1) / 2)


def _neighbours(sizes: list[int], size: int) -> list[tuple[int, float]]:
    """The measured sizes on either side and their weights, in log space; the outermost one beyond the range."""
    right = bisect_right(sizes, size)
    if right == 0 or right == len(sizes) or sizes[right - 1] == size:
        return [(sizes[max(right - 1, 0)], 1.0)]
    low, high = sizes[right - 1], sizes[right]
    share = log(size / low) / log(high / low)
    return [(low, 1 - share), (high, share)]


def _links(path: Path) -> Links:
    """All-reduces of 16-bit values within a node; sizes in the file count elements."""
    reduces: dict[int, list[tuple[float, float]]] = {}
    columns = ("num_gpus", "message_size", "latency")
    table = read_table(path, columns, labels=("op_name", "nccl_dtype"), above_zero=columns)
    for labels, (gpus, elements, ms) in table:
        if labels == ("all_reduce", "half"):
            reduces.setdefault(int(gpus), []).append((HALF * elements, ms * MS))
    return Links(all_reduce={gpus: PiecewiseLinear.through(points) for gpus, points in reduces.items()})
