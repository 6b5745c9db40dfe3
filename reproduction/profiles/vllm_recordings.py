"""Makes a profile of another engine from recordings: the times of its iterations, against their requests and tokens.

    iteration with prompts = base (tokens)   + pairs of tokens in the attention of prompts + context that decodes read
    decodes alone          = base (requests) + context that decodes read

A base is linear between knots; those of decodes are captured sizes, to which decodes are padded. The other two terms have one price
each. All are fitted by least squares of relative errors, none below 0. They include the time that the engine's host adds between
consecutive iterations. The profile's only host times are those of launches without a captured graph, and of a request's way to the
scheduler. While the host launches such an iteration, the tokens of the previous iteration wait, so only the time of both together is known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape, ConfigError
from cbatch.cost import scores
from cbatch.replay.decisions import Decision
from cbatch.sim import PROFILES, ProfileCost, load_profile
from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear
from cbatch.sim.measured import CapturedGraphs, Measured
from cbatch.sim.profile_file import make_profile, profile_text
from cbatch.sim.provenance import FROM
from experiments.profile.kernels import unknown
from experiments.profile.laboratory import fit_prices
from experiments.profile.measure import Iterations
from experiments.profile.tables import model_tables, new_content, put_model
from experiments.setup.presets import load_spec
from experiments.store.decisions_file import read_decisions
from experiments.store.provenance import commit, today, write_text
from experiments.store.run_folder import DECISIONS

KNOTS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 8192, 16384)
CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Tokens for which vLLM captures graphs by default, and to which it pads decodes."""

FEWEST = 8
"""Iterations between two knots."""

LEAST = 80
"""Iterations with prompts, and without."""

APART = 0.01
"""Seconds."""

OUTLIER, LEAST_OUTLIER = 6.0, 0.03
"""Iterations whose error is this many times the median, and at least this large, are left out: something else delayed them."""


def profile_recordings(
    report: Callable[[str], None], model: str, recordings: tuple[str, ...], hardware: str = "h200", output: str = ""
) -> Path:
    """Writes the profile; `reproduction.profiles.__main__` explains the options.

    Raises:
        ConfigError: too few iterations, or an option that cannot be used. ReplayError: a recording that cannot be read.
    """
    spec, card = load_spec(model), load_profile(hardware)
    files = [path for folder in recordings for path in sorted(Path(folder).rglob(DECISIONS))]
    measured = [stretch for path in files for stretch in stretches(path)]
    alone = [stretch for stretch in measured if not any(shape.chunks for shape in stretch.shapes)]
    mixed = [stretch for stretch in measured if any(shape.chunks for shape in stretch.shapes)]
    if min(len(alone), len(mixed)) < LEAST:
        parts = f"{len(alone)} iterations of decodes alone and {len(mixed)} with prompts"
        problem = f"recordings={','.join(recordings)}: {parts} in {len(files)} files {DECISIONS}"
        raise ConfigError(f"{problem}; record at least {LEAST} of each")
    command = f"python -m reproduction.profiles model={model}; {today()}; commit {commit() or 'unknown'}"
    counts = f"{sum(len(stretch.shapes) for stretch in measured)} iterations of vLLM in {len(files)} recordings"
    origin = f"measured by {command}; {card.hardware}; {counts}"
    path = Path(output) if output else PROFILES / f"{card.name}-vllm.json"
    about = path.stem, f"{card.hardware}, vLLM", origin
    content = new_content(*about, card.memory_bytes, card.ceilings, card.origin("ceilings"))
    launches = [stretch.launch for stretch in measured if stretch.launch]
    host = {"seconds": 0.0, "eager_seconds": round(float(np.median(launches)), 5) if launches else 0.0}
    late = [*chain(*map(delays, files))]
    host["server_seconds"] = round(float(np.mean(late)), 5) if late else 0.0
    content["host"] = {
        FROM: "measured; all but launches and requests' delays within other times",
        "sync": host,
        "async": host,
    }
    put_model(content, spec, origin, tables(alone, mixed), None, 1)
    write_text(path, profile_text(make_profile(content)))
    cost = ProfileCost(load_profile(str(path)), spec)
    for name, kind in (("decodes alone", alone), ("with prompts", mixed)):
        errors = np.abs([sum(map(cost.predict, stretch.shapes)) / stretch.seconds - 1 for stretch in kind])
        within = f"{np.median(errors):.1%} (median), {np.quantile(errors, 0.9):.1%} (P90)"
        report(f"{len(kind)} iterations, {name}: predicted within {within}")
    report(f"written: {path}")
    return path


class Stretch(NamedTuple):
    """Iterations whose seconds are known only together: launches of all but the first delayed the tokens of those before.

    launch: seconds of the first such launch, if it outlasted decodes; or 0.
    """

    shapes: tuple[BatchShape, ...]
    seconds: float
    launch: float = 0.0


def stretches(path: Path) -> Iterator[Stretch]:
    """Yields the recorded iterations while requests were running, timed from the end of those before."""
    [file] = read_decisions(path)
    lengths = {request.id: request.num_prompt_tokens for request in file.requests}
    decisions = [event for event in file.recorded.events if isinstance(event, Decision)]
    shapes = {decision.iteration: shape_of(decision, lengths) for decision in decisions}
    busy = {decision.iteration for decision in decisions if decision.seen.running}
    steps = [event.record for event in file.recorded.events if not isinstance(event, Decision)]
    together, begin, launch = list[BatchShape](), 0.0, 0.0
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        shape = shapes[step.iteration]
        together.append(shape)
        overlaps = following and following.launched_at < step.ended
        if following and overlaps and (after := shapes[following.iteration]).chunks:
            is_eager = after.num_tokens > CAPTURED[-1] and not shape.chunks
            launch = launch or (step.ended - following.launched_at if is_eager else 0.0)
            continue
        if step.iteration - len(together) + 1 in busy:
            yield Stretch(tuple(together), step.ended - begin, launch)
        together, begin, launch = [], step.ended, 0.0


def delays(path: Path) -> list[float]:
    """Returns how long after the next plan the scheduler received each recorded request that came while an iteration was computed.

    A request that reaches the scheduler D seconds after it came at a random time is received D seconds late on average. Requests that come
    within `APART` of another one are left out: the server receives them in turn.
    """
    [file] = read_decisions(path)
    steps = [event.record for event in file.recorded.events if not isinstance(event, Decision)]
    plans, found, latest = np.array([step.planned_at for step in steps]), list[float](), -np.inf
    for request in file.requests:
        came = request.arrival_time - request.extra.get("waited", np.nan)
        place = int(np.searchsorted(plans, came))
        if came - latest > APART and 0 < place < len(steps) and steps[place - 1].ended > came:
            found.append(request.arrival_time - float(plans[place]))
        latest = came
    return found


def shape_of(decision: Decision, lengths: Mapping[int, int]) -> BatchShape:
    """Returns the shape of a recorded iteration. lengths: tokens of each request's prompt."""
    computed = {progress.id: progress.computed for progress in decision.seen.running}
    parts = [(count, computed.get(id_, 0), lengths[id_]) for id_, count in decision.decided.entries]
    contexts = [before + 1 for _, before, prompt in parts if before >= prompt]
    chunks = tuple((count, before) for count, before, prompt in parts if before < prompt)
    return BatchShape(chunks, len(contexts), sum(contexts))


def tables(alone: Sequence[Stretch], mixed: Sequence[Stretch]) -> Measured:
    """Returns the tables of a profile. alone, mixed: iterations without prompts and with."""
    decodes = fit(alone, CAPTURED)
    prompts = fit([_without_decodes(stretch, decodes) for stretch in mixed])
    shapes = [shape for stretch in (*alone, *mixed) for shape in stretch.shapes]
    most = int(max(*decodes.base.sizes, *(shape.num_decodes for shape in shapes)))
    context = int(max(shape.decode_context / shape.num_decodes for shape in shapes if shape.num_decodes))
    tokens, before = (max(sizes) for sizes in zip(*(chunk for shape in shapes for chunk in shape.chunks), strict=True))

    def pairs(tokens: int, context: int) -> float:
        return prompts.per_pair * scores(tokens, context)

    def decodes_at(per_context: float) -> BilinearGrid:
        return _grid((1, most), (1, context), lambda number, mean: per_context * number * mean)

    iterations = Iterations(
        mixed=prompts.base,
        chunks=ChunkGrid(*_grid((*(size for size in KNOTS if size < tokens), tokens), (0, max(1, before)), pairs)),
        mixed_decodes=decodes_at(prompts.per_context),
        alone=_steps(decodes.base),
        decodes=decodes_at(decodes.per_context),
        power=None,
    )
    graphs = CapturedGraphs(CAPTURED, CAPTURED, (0,) * len(CAPTURED))
    return replace(model_tables(iterations, unknown, unknown, most), captured_graphs=graphs)


def _without_decodes(stretch: Stretch, decodes: "Prices") -> Stretch:
    """Returns the iterations with prompts. decodes: prices of the others."""
    others = [shape for shape in stretch.shapes if not shape.chunks]
    seconds = sum(
        decodes.base.at(_padded(shape, CAPTURED)) + decodes.per_context * shape.decode_context for shape in others
    )
    return Stretch(tuple(shape for shape in stretch.shapes if shape.chunks), stretch.seconds - seconds)


def _padded(shape: BatchShape, captured: Sequence[int]) -> int:
    return next((size for size in captured if size >= shape.num_tokens), shape.num_tokens)


class Prices(NamedTuple):
    """Seconds of the base against tokens, per pair of tokens, and per token of context."""

    base: PiecewiseLinear
    per_pair: float
    per_context: float


def fit(measured: Sequence[Stretch], captured: Sequence[int] = ()) -> Prices:
    """Returns the prices, without outliers of a first fit. captured: sizes to which tokens are padded."""
    seconds = np.array([stretch.seconds for stretch in measured])
    shapes = [shape for stretch in measured for shape in stretch.shapes]
    tokens = np.array([_padded(shape, captured) for shape in shapes])
    knots = _knots(tokens, captured or KNOTS)
    attention = [[sum(scores(*chunk) for chunk in shape.chunks), shape.decode_context] for shape in shapes]
    rows = np.hstack([np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T, attention])
    begins = np.cumsum([0, *(len(stretch.shapes) for stretch in measured[:-1])])
    rows = np.add.reduceat(rows, begins) / seconds[:, None]
    errors = np.abs(rows @ fit_prices(rows) - 1)
    *base, per_pair, per_context = fit_prices(rows[errors <= max(OUTLIER * np.median(errors), LEAST_OUTLIER)]).tolist()
    seconds_at = tuple(max(price, 1e-6) for price in base)
    return Prices(PiecewiseLinear(tuple(map(float, knots)), seconds_at), per_pair, per_context)


def _knots(tokens: NDArray[Any], candidates: Sequence[int]) -> list[int]:
    """Returns sizes with enough iterations between them, up to the first one, and from the last one on."""
    ordered = np.sort(tokens)
    least, most = int(ordered[FEWEST - 1]), int(ordered[-FEWEST])
    knots = [least]
    for size in (*(size for size in candidates if least < size < most), most):
        if np.count_nonzero((tokens > knots[-1]) & (tokens <= size)) >= FEWEST:
            knots.append(size)
    return [*knots[:-1], most] if len(knots) > 1 else [least, max(most, least + 1)]


def _steps(base: PiecewiseLinear) -> PiecewiseLinear:
    """Returns the base at both ends of each range of decodes that one captured size serves."""
    last = int(base.sizes[-1])
    sizes = [size for size in CAPTURED if size <= last]
    ends = {end: size for under, size in pairwise([0, *sizes]) for end in (under + 1, size)} | {last: last}
    seconds = np.interp(list(ends.values()), base.sizes, base.seconds)
    return PiecewiseLinear(tuple(map(float, ends)), tuple(seconds.tolist()))


def _grid(sizes: Sequence[int], contexts: Sequence[int], seconds: Callable[[int, int], float]) -> BilinearGrid:
    return BilinearGrid.through((size, context, seconds(size, context)) for size in sizes for context in contexts)
