"""Converts measured iterations to the tables of a profile, and puts them into it.

Only the measured model, the host times and the links are replaced in an existing profile.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from cbatch import ModelSpec
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import CapturedGraphs, DecodeOnly, HostTimes, Measured, MeasuredModel
from cbatch.sim.profile import Profile
from cbatch.sim.provenance import Place
from experiments.profile.kernels import ShareOf
from experiments.profile.measure import Iterations

DIGITS = 5
"""Significant digits of the numbers in a file."""

UNCOMPARED = "not compared with real runs since it was measured"

ORIGINS = {
    "embedding": "measured within other",
    "exchange": "measured within linear and other",
    "captured_rows": "derived from iterations measured with graphs for each of these batches: their difference, 0 where it is "
    "negative",
}
"""Of tables that were not measured as the others were."""


def model_tables(
    iterations: Iterations,
    alone: ShareOf,
    mixed: ShareOf,
    max_batch: int,
    rows: BilinearGrid | None = None,
    graphs: CapturedGraphs | None = None,
) -> Measured:
    """Returns the tables of one degree of tensor parallelism of a model.

    The captured head of an iteration with prompts has a row per request of the largest batch, that of decodes alone a row
    per decode.

    alone, mixed: shares of iterations without prompts and with. max_batch: largest batch for which graphs were captured.
    rows, graphs: the captured ones; None without graphs.
    """
    base, decodes = iterations.mixed, iterations.alone
    head = mixed(base.sizes[0]).head * base.seconds[0]
    heads = tuple(alone(size).head * seconds for size, seconds in zip(*decodes, strict=True))
    linear, other = _divide(base, mixed, [head] * len(base.sizes))
    tables = Measured(
        linear=linear,
        other=other,
        head=PiecewiseLinear((1.0, float(max_batch)), (head, head)),
        embedding=PiecewiseLinear((1.0, base.sizes[-1]), (0.0, 0.0)),
        decode_only=DecodeOnly(*_divide(decodes, alone, heads), PiecewiseLinear(decodes.sizes, heads)),
        chunks=iterations.chunks,
        decodes=iterations.decodes,
        mixed_decodes=iterations.mixed_decodes,
        power=iterations.power,
        captured_rows=rows,
        captured_graphs=graphs,
    )
    return _round(tables)


def put_links(profile: Profile, origin: str, links: Links) -> Profile:
    """Puts copies and links into a profile, beside all-reduces between other numbers of GPUs."""
    measured = {name: curve for name in ("within_node", "to_device", "to_host") if (curve := getattr(links, name))}
    places: list[Place] = [("links", name) for name in measured]
    places += [("links", "all_reduce", str(count)) for count in links.all_reduce]
    links = replace(profile.links, **measured, all_reduce={**profile.links.all_reduce, **links.all_reduce})
    return replace(profile, links=links, origins={**profile.origins, **dict.fromkeys(places, origin)})


def put_model(
    profile: Profile, spec: ModelSpec, origin: str, tables: Measured, host: HostTimes | None, tensor_parallel: int
) -> Profile:
    """Puts the tables of one degree into a profile, beside the model's other degrees.

    The host time, and the error that the profile states, are those of single GPUs.
    """
    here = ("models", spec.name)
    place = (*here, "tensor_parallel", str(tensor_parallel))
    model = profile.models.get(spec.name) or MeasuredModel(num_layers=spec.num_layers, tensor_parallel={})
    origins = {known: text for known, text in profile.origins.items() if known[:4] != place}
    if tensor_parallel > 1:
        assert tables.embedding is not None
        tables = replace(tables, exchange=tables.embedding)
        origins = {here: origin, **origins, place: origin}
    else:
        others = [(*here, "tensor_parallel", str(degree)) for degree in model.tensor_parallel if degree > 1]
        origins = {**dict.fromkeys(others, profile.origin(*here)), **origins, here: origin}
        model = replace(model, host=host)
    model = replace(model, tensor_parallel={**model.tensor_parallel, tensor_parallel: tables})
    origins |= {(*place, name): text for name, text in ORIGINS.items() if getattr(tables, name)}
    profile = replace(profile, models={**profile.models, spec.name: model}, origins=origins)
    return profile if tensor_parallel > 1 else _with_host(profile)


def _with_host(profile: Profile) -> Profile:
    """Takes the host times of the first model that has them for models that have none; drops what was compared before."""
    first, host = next((name, model.host) for name, model in profile.models.items() if model.host)
    origins = {**profile.origins, ("host",): f"fallback: of {first}, for models without their own"}
    return replace(profile, host=host, origins=origins, error=UNCOMPARED, compared={})


def captured_graphs(decodes: Sequence[int], *machines: Sequence[tuple[int, int]]) -> CapturedGraphs | None:
    """Returns the captured graphs; None without any.

    decodes: requests of the graphs for decodes alone.
    machines: the ranges of each machine's graphs for prompts (see `Machine`). Those of the largest batch come last, and
        stand.
    """
    fewest: dict[int, int] = {}
    for ranges in machines:
        below = [0, *(largest for _, largest in ranges)]
        fewest |= {last: first * (first > under + 1) for (first, last), under in zip(ranges, below, strict=False)}
    tokens = tuple(sorted(fewest))
    return CapturedGraphs(tuple(decodes), tokens, tuple(fewest[size] for size in tokens)) if fewest else None


def captured_rows(bases: Mapping[int, PiecewiseLinear]) -> BilinearGrid | None:
    """Returns the cost of captured rows (see `Measured`); None for fewer than two batches.

    A smaller batch has more captured sizes, so part of what it saves is padding.

    bases: of mixed iterations, by the largest batch for which graphs were captured; all but the last only at captured sizes.
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
    """Divides a base without the head between the layers' matrix products and the rest."""
    rest = [seconds - head for seconds, head in zip(base.seconds, heads, strict=True)]
    shares = [share_of(size) for size in base.sizes]
    linear = [
        seconds * share.linear / (share.linear + share.other) for seconds, share in zip(rest, shares, strict=True)
    ]
    other = [seconds - products for seconds, products in zip(rest, linear, strict=True)]
    return PiecewiseLinear(base.sizes, tuple(linear)), PiecewiseLinear(base.sizes, tuple(other))


def _round(tables: Measured) -> Measured:
    """Rounds the seconds and shares of tables to `DIGITS` significant digits; sizes are whole numbers."""
    file = TypeAdapter(Measured)
    text = file.dump_json(tables, exclude_defaults=True)
    return file.validate_python(json.loads(text, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}")))
