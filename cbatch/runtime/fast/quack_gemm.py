"""Products with more rows than our own kernel supports, computed by quack's kernels for Hopper.

cuBLAS chooses tiles by its own heuristics. This module chooses the tile whose programs best fill whole waves of the multiprocessors.
A gated product applies SiLU(gate) * up on chip. Otherwise the gates and ups of 1,024 tokens of Llama-3.1-8B, 57 MB, would be
written and read again.
"""

from importlib import import_module
from itertools import product
from typing import NamedTuple, cast

import torch

from cbatch.model import ModelSpec


class Tile(NamedTuple):
    """Rows and outputs of a tile; outputs count both gates and ups.

    turns: two tiles of a multiprocessor alternate ("ping-pong"). paired: slower than cuBLAS unless two tiles of rows share weights.
    """

    rows: int
    outputs: int
    turns: bool = False
    paired: bool = False


_GATED = (
    Tile(128, 256),
    Tile(128, 224, paired=True),
    Tile(128, 192, turns=True),
    Tile(128, 160, turns=True),
    Tile(128, 128, turns=True),
)
_PLAIN = (Tile(256, 192), Tile(128, 240, paired=True))

_WORTH = 0.93
"""Least utilization of the multiprocessors for which a tile is used. On one H200, with 256 to 2,048 rows of three models, such
tiles ranged from 12% faster than cuBLAS to 3% slower; most were faster."""

MOST_ROWS = 2048
"""With more rows every tile fills the multiprocessors, so utilization does not predict the speed. On an H100 the products of 45,248
and 65,472 rows took 1.2 and 1.5 times as long as with cuBLAS; products of 23,104 and 32,320 rows took equally long."""


def quack_product(x: torch.Tensor, weight: torch.Tensor, num_processors: int, *, gated: bool) -> torch.Tensor | None:
    """Returns x weight^T, or if gated SiLU(x gates^T) * (x ups^T); None if no tile promises to beat cuBLAS.

    Args:
        x: [rows, inputs], 16-bit floats.
        weight: [outputs, inputs]; if gated, the gates and then the ups.
    """
    tile = choose_tile(len(x), len(weight), num_processors, gated=gated)
    return None if tile is None else _multiply(x, weight, tile, gated=gated)


def _multiply(x: torch.Tensor, weight: torch.Tensor, tile: Tile, *, gated: bool) -> torch.Tensor:
    cluster = (2, 1) if _in_pairs(len(x), tile) else (1, 2)  # tiles in a cluster share loads of weights, or of rows
    if gated:
        library = import_module("quack.gemm_interface")
        config = library.GemmConfig(
            tile_m=tile.rows,
            tile_n=tile.outputs,
            pingpong=tile.turns,
            cluster_m=cluster[0],
            cluster_n=cluster[1],
            device_capacity=9,
            is_dynamic_persistent=False,
        )
        settings = {"activation": "swiglu", "store_preact": False, "tuned": False, "concat_layout": ("B",)}
        return cast(torch.Tensor, library.gemm_gated(x, weight.T, config=config, **settings)[1])
    out = x.new_empty((len(x), len(weight)))
    import_module("quack.gemm").gemm(x, weight, out, None, None, tile.rows, tile.outputs, *cluster, pingpong=tile.turns)
    return out


def choose_tile(rows: int, outputs: int, num_processors: int, *, gated: bool) -> Tile | None:
    """Returns the tile with the highest utilization of the multiprocessors, the larger tile on a tie; None means cuBLAS."""
    if rows > MOST_ROWS:
        return None
    share, tile = max(
        ((_share(rows, outputs, num_processors, tile), tile) for tile in _tiles(rows, gated=gated)),
        key=lambda pair: (round(pair[0], 3), pair[1].rows * pair[1].outputs),
    )
    return tile if share >= _WORTH else None


def why_not_quack(spec: ModelSpec, device: torch.device) -> str:
    """Returns why quack cannot compute the model's products on a GPU; empty if it can.

    Compiles all of quack's kernels, which takes some seconds the first time on a machine; no iteration has to wait for it later.
    """
    if spec.dtype not in ("bfloat16", "float16"):
        return "it multiplies 16-bit floats"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it needs compute capability 9.0"
    zeros = torch.zeros((1024, 64), dtype=getattr(torch, spec.dtype), device=device)
    try:
        for gated, rows in product((True, False), (256, 384)):  # an even and an odd number of tiles
            for tile in _tiles(rows, gated=gated):
                _multiply(zeros[:rows], zeros, tile, gated=gated)
    except ImportError:
        return "quack-kernels, which flash-attn-4 brings, is not installed"
    except Exception as error:  # quack's compiler may raise any exception
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def _tiles(rows: int, *, gated: bool) -> list[Tile]:
    return [tile for tile in (_GATED if gated else _PLAIN) if _in_pairs(rows, tile) or not tile.paired]


def _in_pairs(rows: int, tile: Tile) -> bool:
    return tile.rows == 128 and -(-rows // tile.rows) % 2 == 0


def _share(rows: int, outputs: int, num_processors: int, tile: Tile) -> float:
    num_tiles = -(-rows // tile.rows) * -(-outputs // tile.outputs)
    waves = -(-num_tiles // num_processors)
    return rows * outputs / (waves * num_processors * tile.rows * tile.outputs)
