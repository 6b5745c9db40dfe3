"""A profile of another engine, from recordings of it: what its iterations took, by their requests and tokens.

    iteration with prompts = base (tokens)   + pairs of tokens in the attention of prompts + context that decodes read
    decodes alone          = base (requests) + context that decodes read

A base is linear between knots, of decodes between the captured sizes to which decodes are padded. The other two are a price
each. All are fitted by least squares of relative errors, none below 0. They include what the engine's host adds to iterations
that follow one another, so the profile has no host time beside them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch import BatchShape, ConfigError
from cbatch.replay.decisions import Decision
from cbatch.sim import PROFILES, ProfileCost, load_profile
from cbatch.sim.interpolation import BilinearGrid, ChunkGrid, PiecewiseLinear, scores
from cbatch.sim.measured import Measured
from cbatch.sim.profile_file import make_profile, profile_text
from cbatch.sim.provenance import FROM
from experiments.profile.kernels import unknown
from experiments.profile.laboratory import fit_prices
from experiments.profile.measure import Iterations
from experiments.profile.tables import model_tables, new_content, put_model
from experiments.settings.presets import load_spec
from experiments.store.decisions_file import read_decisions
from experiments.store.provenance import commit, today, write_text
from experiments.store.run_folder import DECISIONS

KNOTS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 8192, 16384)
CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
"""Decodes for which vLLM captures graphs by default, and to which it pads fewer."""

FEWEST = 8
"""Iterations between two knots."""

LEAST = 80
"""Iterations with prompts, and without."""

OUTLIER, LEAST_OUTLIER = 6.0, 0.03
"""Iterations whose error is this many times the median, and at least so large, are left out: another process, a collection of garbage."""


def profile_recordings(
    report: Callable[[str], None], model: str, recordings: tuple[str, ...], hardware: str = "h200", output: str = ""
) -> Path:
    """Writes the profile; `experiments.profile.__main__` explains the options.

    Raises:
        ConfigError: too few iterations, or an option that cannot be used. ReplayError: a recording that cannot be read.
    """
    spec, card = load_spec(model), load_profile(hardware)
    files = [path for folder in recordings for path in sorted(Path(folder).rglob(DECISIONS))]
    measured = [iteration for path in files for iteration in iterations(path)]
    alone = [(shape, seconds) for shape, seconds in measured if not shape.chunks]
    mixed = [(shape, seconds) for shape, seconds in measured if shape.chunks]
    if min(len(alone), len(mixed)) < LEAST:
        parts = f"{len(alone)} iterations of decodes alone and {len(mixed)} with prompts"
        problem = f"recordings={','.join(recordings)}: {parts} in {len(files)} files {DECISIONS}"
        raise ConfigError(f"{problem}; record at least {LEAST} of each")
    command = f"python -m experiments.profile engine=vllm model={model}; {today()}; commit {commit() or 'unknown'}"
    counts = f"{len(measured)} iterations of vLLM in {len(files)} recordings"
    origin = f"measured by {command}; {card.hardware}; {counts}"
    path = Path(output) if output else PROFILES / f"{card.name}-vllm.json"
    about = path.stem, f"{card.hardware}, vLLM", origin
    content = new_content(*about, card.memory_bytes, card.ceilings, card.origin("ceilings"))
    none = {"seconds": 0.0}
    content["host"] = {FROM: "measured within other times", "sync": none, "async": none}
    put_model(content, spec, origin, tables(alone, mixed), None, 1)
    write_text(path, profile_text(make_profile(content)))
    cost = ProfileCost(load_profile(str(path)), spec)
    for name, kind in (("decodes alone", alone), ("with prompts", mixed)):
        errors = np.abs([cost.predict(shape) / seconds - 1 for shape, seconds in kind])
        within = f"{np.median(errors):.1%} (median), {np.quantile(errors, 0.9):.1%} (P90)"
        report(f"{len(kind)} iterations, {name}: predicted within {within}")
    report(f"written: {path}")
    return path


def iterations(path: Path) -> Iterator[tuple[BatchShape, float]]:
    """Yields the recorded iterations, and the seconds since the end of the one before them, while requests were running."""
    file = read_decisions(path)
    lengths = {request.id: request.num_prompt_tokens for request in file.requests}
    shapes: dict[int, BatchShape] = {}
    ended = 0.0
    for event in file.recorded.events:
        if isinstance(event, Decision):
            computed = {progress.id: progress.computed for progress in event.seen.running}
            parts = [(count, computed.get(id_, 0), lengths[id_]) for id_, count in event.decided.entries]
            contexts = [before + 1 for _, before, prompt in parts if before >= prompt]
            chunks = tuple((count, before) for count, before, prompt in parts if before < prompt)
            if computed:
                shapes[event.iteration] = BatchShape(chunks, len(contexts), sum(contexts))
        else:
            step = event.record
            if step.iteration in shapes:
                yield shapes.pop(step.iteration), step.ended - ended
            ended = step.ended


def tables(alone: Sequence[tuple[BatchShape, float]], mixed: Sequence[tuple[BatchShape, float]]) -> Measured:
    """Returns the tables of a profile. alone, mixed: iterations without prompts and with, and their seconds."""
    decodes, prompts = fit(alone, CAPTURED), fit(mixed)
    shapes = [shape for shape, _ in (*alone, *mixed)]
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
    return model_tables(iterations, unknown, unknown, most)


class Prices(NamedTuple):
    """Seconds of the base against tokens, per pair of tokens, and per token of context."""

    base: PiecewiseLinear
    per_pair: float
    per_context: float


def fit(measured: Sequence[tuple[BatchShape, float]], captured: Sequence[int] = ()) -> Prices:
    """Returns the prices, without outliers of a first fit. captured: sizes to which tokens are padded."""
    shapes, seconds = [shape for shape, _ in measured], np.array([seconds for _, seconds in measured])
    counts = [shape.num_tokens for shape in shapes]
    tokens = np.array([next((size for size in captured if size >= count), count) for count in counts])
    knots = _knots(tokens, captured or KNOTS)
    attention = [[sum(scores(*chunk) for chunk in shape.chunks), shape.decode_context] for shape in shapes]
    rows = np.hstack([np.array([np.interp(tokens, knots, unit) for unit in np.eye(len(knots))]).T, attention])
    rows /= seconds[:, None]
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
