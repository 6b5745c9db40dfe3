"""Converts measured iterations to the tables of a profile's file.

Only the measured model, the host times and the links are replaced in an existing file.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.power import PowerLimit
from cbatch.sim.profile_file import profile_text
from experiments.profile.kernels import Shares
from experiments.profile.measure import Iterations
from experiments.store.provenance import write_text

DIGITS = 5
"""Significant digits of the numbers in a file."""

UNCOMPARED = "not compared with real runs since it was measured"

ShareOf = Callable[[float], Shares]
"""Returns the shares of an iteration's kernels by its tokens."""


def model_tables(
    found: Iterations, alone: ShareOf, mixed: ShareOf, max_batch: int, graphs: Mapping[str, dict[str, Any] | None]
) -> dict[str, Any]:
    """Returns the tables of one degree of tensor parallelism of a model.

    alone, mixed: shares of iterations without prompts and with. max_batch: largest batch for which graphs were captured.
    graphs: the tables of captured rows and graphs by key; None without graphs.
    """
    tables = {
        **_mixed_parts(found.mixed, mixed, max_batch),
        "embedding": {"from": "measured within other", "tokens": [1, int(found.mixed.sizes[-1])], "seconds": [0, 0]},
        "decode_only": _decode_parts(found.alone, alone),
        "chunks": _grid(found.chunks),
        "decodes": _grid(found.decodes),
        "mixed_decodes": _grid(found.mixed_decodes),
    }
    if found.power is not None:
        tables["power"] = _power(found.power)
    return tables | {key: table for key, table in graphs.items() if table is not None}


def put_links(data: dict[str, Any], origin: str, found: Mapping[str, Any]) -> None:
    """Puts copies and links into a profile's content, beside all-reduces between other numbers of GPUs."""
    links = data.setdefault("links", {})
    for name, times in found.items():
        if name == "all_reduce":
            links[name] = links.get(name, {}) | {count: {"from": origin, **curve} for count, curve in times.items()}
        else:
            links[name] = {"from": origin, **times}


def put_model(
    data: dict[str, Any],
    spec: ModelSpec,
    origin: str,
    tables: dict[str, Any],
    host: dict[str, dict[str, float]],
    tensor_parallel: int,
) -> None:
    """Puts the tables of one degree into a profile's content, beside the model's other degrees.

    The host time, and the error that the profile states, are those of single GPUs.
    """
    models = data.setdefault("models", {})
    model = models.setdefault(spec.name, {"from": origin, "num_layers": spec.num_layers, "tensor_parallel": {}})
    if tensor_parallel > 1:
        nothing = {"tokens": tables["embedding"]["tokens"], "seconds": [0, 0]}
        within = {"from": "measured within linear and other", **nothing}
        tables = {"from": origin, **tables, "exchange": within}
    else:
        for other in model["tensor_parallel"].values():
            other.setdefault("from", model.get("from", data["source"]))
        model |= {"from": origin, "host": host}
        first = next(name for name, known in models.items() if "host" in known)
        data["host"] = {"from": f"fallback: of {first}, for models without their own", **models[first]["host"]}
        data["error"] = UNCOMPARED
        data.pop("compared", None)
    model["tensor_parallel"][str(tensor_parallel)] = tables


def graphs_table(decodes: Sequence[int], *machines: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """Returns the captured graphs (see `cbatch.sim.profile.CapturedGraphs`); None without any.

    decodes: requests of the graphs for decodes alone.
    machines: the ranges of each machine's graphs for prompts (see `Machine`), those of the largest batch last, which stand.
    """
    fewest: dict[int, int] = {}
    for ranges in machines:
        below = [0, *(largest for _, largest in ranges)]
        fewest |= {last: first * (first > under + 1) for (first, last), under in zip(ranges, below, strict=False)}
    if not fewest:
        return None
    return {"requests": list(decodes), "tokens": sorted(fewest), "fewest": [fewest[size] for size in sorted(fewest)]}


def rows_table(bases: Mapping[int, PiecewiseLinear]) -> dict[str, Any] | None:
    """Returns the cost of captured rows (see `cbatch.sim.profile.CapturedRows`); None for fewer than two batches.

    A smaller batch has more captured sizes, so part of what it saves is padding.

    bases: of mixed iterations, by the largest batch for which graphs were captured; all but the last only at captured sizes.
    """
    if len(bases) < 2:
        return None
    smallest = bases[min(bases)]
    sizes = [int(size) for size in smallest.sizes]
    seconds = [[max(bases[batch].at(size) - smallest.at(size), 0.0) for size in sizes] for batch in sorted(bases)]
    origin = "derived from iterations measured with graphs for each of these batches: their difference, 0 where it is negative"
    return {"from": origin, "requests": sorted(bases), "tokens": sizes, "seconds": [round_all(row) for row in seconds]}


def _decode_parts(base: PiecewiseLinear, share_of: ShareOf) -> dict[str, Any]:
    """Divides the base of iterations without prompts; their head has a row per decode."""
    heads = [share_of(size).head * seconds for size, seconds in zip(base.sizes, base.seconds, strict=True)]
    sizes = [int(size) for size in base.sizes]
    return {**_divided(base, share_of, heads), "head": {"requests": sizes, "seconds": round_all(heads)}}


def _mixed_parts(base: PiecewiseLinear, share_of: ShareOf, max_batch: int) -> dict[str, Any]:
    """Divides the base of iterations with prompts; a captured head has a row per request of the largest batch."""
    head = share_of(base.sizes[0]).head * base.seconds[0]
    divided = _divided(base, share_of, [head] * len(base.sizes))
    return {**divided, "head": {"requests": [1, max_batch], "seconds": round_all([head, head])}}


def _divided(base: PiecewiseLinear, share_of: ShareOf, heads: Sequence[float]) -> dict[str, Any]:
    """Divides a base without the head between the layers' matrix products and the rest."""
    linear, other = [], []
    for size, seconds, head in zip(base.sizes, base.seconds, heads, strict=True):
        share = share_of(size)
        linear.append((seconds - head) * share.linear / (share.linear + share.other))
        other.append(seconds - head - linear[-1])
    sizes = [int(size) for size in base.sizes]
    return {
        "linear": {"tokens": sizes, "seconds": round_all(linear)},
        "other": {"tokens": sizes, "seconds": round_all(other)},
    }


def _power(power: PowerLimit) -> dict[str, Any]:
    reserve, idle = round_all([power.reserve_seconds, power.idle_rise_seconds])
    return {
        "tokens": [int(size) for size in power.gain.sizes],
        "gain": round_all(power.gain.seconds),
        "loss": round_all(power.loss.seconds),
        "reserve_seconds": reserve,
        "requests": [int(number) for number in power.decode_loss.sizes],
        "decode_loss": round_all(power.decode_loss.seconds),
        "rise_seconds": round_all(power.rise_seconds.seconds),
        "idle_rise_seconds": idle,
    }


def _grid(grid: BilinearGrid) -> dict[str, Any]:
    contexts = sorted({context for row in grid.columns for context in row})
    columns = zip(grid.columns, map(round_all, grid.seconds), strict=True)
    rows = [dict(zip(known, seconds, strict=True)) for known, seconds in columns]
    return {
        "sizes": [int(size) for size in grid.sizes],
        "contexts": [int(context) for context in contexts],
        "seconds": [[row.get(context) for context in contexts] for row in rows],
    }


def round_all(values: Iterable[float]) -> list[float]:
    """Rounds to `DIGITS` significant digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]


def read_existing(path: Path) -> dict[str, Any]:
    """Returns the content of the file; empty if there is none. Raises ProfileError if it is not a profile."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ProfileError(f"{path}: cannot read the profile: {error}; move it away to measure a new one") from error


def write_profile(path: Path, data: Mapping[str, Any]) -> None:
    """Writes the file atomically."""
    write_text(path, profile_text(data))
