"""Converts measured iterations to the tables of a profile, and puts the tables into a profile's content.

In an existing profile only the measured model, the host times and the links are replaced.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from cbatch import ModelSpec
from cbatch.model import DTYPE_BYTES
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import CapturedGraphs, DecodeOnly, DraftedOnly, HostTimes, Measured
from cbatch.sim.provenance import FROM, NOT_COMPARED
from cbatch.sim.roofline import Ceilings
from experiments.profile.kernels import ShareOf
from experiments.profile.measure import Iterations

DIGITS = 5  # significant digits of the numbers in a file

ORIGINS = {
    "embedding": "measured within other",
    "exchange": "measured within linear and other",
    "captured_rows": "derived from iterations measured with graphs for each of these batches: their difference, 0 where it is "
    "negative",
}
"""Origins of the tables that were not measured directly."""


def model_tables(iterations: Iterations, alone: ShareOf, mixed: ShareOf, max_batch: int) -> Measured:
    """Returns a model's tables for one degree of tensor parallelism, without the tables of captured graphs.

    The captured head has one row per request of the largest batch in iterations with prompts, and one row per decode in others.

    alone, mixed: shares of iterations without and with prompts. max_batch: largest batch for which graphs were captured.
    """
    base, decodes = iterations.mixed, iterations.alone
    head = mixed(base.sizes[0]).head * base.seconds[0]
    heads = tuple(alone(size).head * seconds for size, seconds in zip(*decodes, strict=True))
    linear, other = _divide(base, mixed, [head] * len(base.sizes))
    return Measured(
        linear=linear,
        other=other,
        head=PiecewiseLinear((1.0, float(max_batch)), (head, head)),
        embedding=PiecewiseLinear((1.0, base.sizes[-1]), (0.0, 0.0)),
        decode_only=DecodeOnly(*_divide(decodes, alone, heads), PiecewiseLinear(decodes.sizes, heads)),
        chunks=iterations.chunks,
        decodes=iterations.decodes,
        mixed_decodes=iterations.mixed_decodes,
        shared_reads=iterations.shared_reads,
        power=iterations.power,
    )


def drafted_only(base: PiecewiseLinear, share_of: ShareOf, alone: BilinearGrid, drafted: BilinearGrid) -> DraftedOnly:
    """alone, drafted: of `drafted_attention`."""
    heads = tuple(share_of(size).head * seconds for size, seconds in zip(*base, strict=True))
    return DraftedOnly(*_divide(base, share_of, heads), PiecewiseLinear(base.sizes, heads), drafted, alone)


def new_content(
    name: str, hardware: str, origin: str, memory_bytes: float, ceilings: Ceilings, ceilings_from: str
) -> dict[str, Any]:
    """Returns the content of a new profile, without models. origin: origin of all numbers except the ceilings."""
    about = {"name": name, "hardware": hardware, "source": origin}
    return {**about, "memory_bytes": memory_bytes, "ceilings": {FROM: ceilings_from, **asdict(ceilings)}}


def put_links(content: dict[str, Any], origin: str, links: Links) -> None:
    """Puts links into a profile's content, and keeps all-reduces among other numbers of GPUs."""
    known, measured = content.setdefault("links", {}), TypeAdapter(Links).dump_python(links, exclude_defaults=True)
    reduces = {str(count): {FROM: origin, **curve} for count, curve in measured.pop("all_reduce", {}).items()}
    known |= {name: {FROM: origin, **curve} for name, curve in measured.items()}
    known["all_reduce"] = {**known.get("all_reduce", {}), **reduces}


def raise_ceiling(content: dict[str, Any], linear: PiecewiseLinear | None, spec: ModelSpec) -> None:
    """Raises the rate of arithmetic in a profile's content to the rate of the fastest measured products."""
    flops = 2 * spec.num_layers * spec.layer_weights
    rates = [tokens * flops / seconds for tokens, seconds in zip(*linear, strict=True)] if linear else []
    by_dtype, key = content["ceilings"], "flops_per_second"
    if DTYPE_BYTES[spec.dtype] > 2:
        by_dtype, key = by_dtype.setdefault("flops_per_second_by_dtype", {}), spec.dtype
    by_dtype[key] = max([by_dtype.get(key, 0.0), *rates])


def put_model(
    content: dict[str, Any], spec: ModelSpec, origin: str, tables: Measured, host: HostTimes | None, degree: int
) -> None:
    """Puts the tables of one degree of tensor parallelism into a profile's content, and keeps the model's other degrees.

    host: host time measured with the tables, also used for models without host time; None: keep the stored host time.
    """
    measured = _content(tables)
    models = content.setdefault("models", {})
    model = models.setdefault(spec.name, {FROM: origin, "tensor_parallel": {}})
    model |= {"num_layers": spec.num_layers, "shape": spec.shape}
    degrees = model["tensor_parallel"]
    if degree > 1:
        measured |= {FROM: origin, "exchange": measured["embedding"]}
    else:
        for other in degrees.values():
            other.setdefault(FROM, model.get(FROM, content["source"]))
        model[FROM] = origin
    indirect = {name: {FROM: text, **measured[name]} for name, text in ORIGINS.items() if name in measured}
    degrees[str(degree)] = measured | indirect
    if host:
        model["host"] = {loop: asdict(time) for loop, time in host.items()}
        first = next(name for name in models if "host" in models[name])
        fallback = f"fallback: of {first}, for models without their own"
        content |= {"host": {FROM: fallback, **models[first]["host"]}, "error": NOT_COMPARED, "compared": {}}


def put_drafted(content: dict[str, Any], spec: ModelSpec, origin: str, tables: DraftedOnly) -> None:
    """Puts the tables of decodes with drafts into the content of a profile that has the model."""
    content["models"][spec.name]["tensor_parallel"]["1"]["drafted_only"] = {FROM: origin, **_content(tables)}


def _content(tables: Measured | DraftedOnly) -> dict[str, Any]:
    text = TypeAdapter(type(tables)).dump_json(tables, exclude_defaults=True)  # whole numbers are written as such
    content: dict[str, Any] = json.loads(text, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))
    return content


def captured_graphs(decodes: Sequence[int], *machines: Sequence[int]) -> CapturedGraphs | None:
    """Returns the captured graphs, or None if there are none.

    decodes: requests of the graphs for decode-only iterations.
    machines: tokens of each machine's graphs for prompts.
    """
    tokens = sorted({size for sizes in machines for size in sizes})
    return CapturedGraphs(tuple(decodes), tuple(tokens), (0,) * len(tokens)) if tokens else None


def captured_rows(bases: Mapping[int, PiecewiseLinear]) -> BilinearGrid | None:
    """Returns the cost of captured rows (see `Measured`); None for fewer than two batches.

    A smaller batch has more captured sizes, so part of its saving is due to less padding.

    bases: bases of mixed iterations, by the largest batch with a captured graph; all but the last only at captured sizes.
    """
    if len(bases) < 2:
        return None
    smallest = bases[min(bases)]
    return BilinearGrid.through(
        (batch, size, max(bases[batch].at(size) - smallest.at(size), 0.0)) for batch in bases for size in smallest.sizes
    )


def _divide(
    base: PiecewiseLinear, share_of: ShareOf, heads: Sequence[float]
) -> tuple[PiecewiseLinear, PiecewiseLinear]:
    """Divides a base, excluding the head, into the layers' matrix products and the rest."""
    rest = [seconds - head for seconds, head in zip(base.seconds, heads, strict=True)]
    shares = [share_of(size) for size in base.sizes]
    parts = zip(rest, shares, strict=True)
    linear = [seconds * share.linear / (share.linear + share.other) for seconds, share in parts]
    other = [seconds - products for seconds, products in zip(rest, linear, strict=True)]
    return PiecewiseLinear(base.sizes, tuple(linear)), PiecewiseLinear(base.sizes, tuple(other))
