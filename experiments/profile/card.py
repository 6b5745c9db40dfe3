"""Measures the speed of a card and its host against a profile of their kind: identical cards differ by several percent, their hosts by a factor of two.

The result is two factors of iteration times, with prompts and for decodes alone, and one of the host's time to launch an iteration
without a captured graph, if this time is steady: beside other work on a host it halves and doubles within seconds. The new file
holds them and a copy of the profile's tables. The factors of iteration times are medians over iterations that the profile also
measured, so that interpolation adds no error.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from cbatch import ConfigError, ModelSpec
from cbatch.sim import PROFILES, Profile, ProfileCost, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_names, profile_text
from experiments.profile.batches import prompts, spread
from experiments.profile.host import eager_seconds
from experiments.profile.laboratory import ROUNDS, Batch, Laboratory
from experiments.profile.machine import build, hardware_name
from experiments.profile.measure import Report
from experiments.settings.hardware import card_name
from experiments.setup.presets import load_spec
from experiments.store.provenance import commit, today, write_text

LIMITS = {"batch": 64, "max_tokens": 4096, "longest": 4224}  # tokens beyond those of the largest graph

TOTALS, DECODES, CONTEXTS = (256, 512, 1024, 2048), (4, 16, 32, 64), (1056, 4128)
"""Tokens of iterations with prompts; numbers and mean contexts of decodes alone."""

BESIDE = 32  # decodes beside the chunks

STEADY = 1.1  # largest ratio of the times of a launch before and after the iterations at which they give a factor


def measure_card(report: Report, hardware: str = "", model: str = "llama-3.1-8b", output: str = "") -> Path:
    """Measures this card, and writes the profile with its factors; `experiments.profile.__main__` explains the options.

    Raises ConfigError: no GPU, no profile of this kind of GPU, or one without this model. CapacityError: no room for the model.
    """
    name, spec = hardware_name("cuda"), load_spec(model)
    profiles = map(load_profile, [hardware] if hardware else profile_names())
    own = (each for each in profiles if hardware or (not each.card.name and each.hardware.partition(",")[0] == name))
    if (profile := next(own, None)) is None:
        remedy = "give hardware=NAME, or measure one: model=NAME"
        raise ConfigError(f"profile card: there is no profile of {name}; {remedy}")
    if not profile.measured_as(spec):
        known = ", ".join(profile.models)
        raise ConfigError(f"profile card: hardware={profile.name} has no tables of model={model}; give model={known}")
    report(f"{profile.name} is of {profile.hardware}; this is {card_name()}; {model} is loaded")
    machine = build("cuda", spec, **LIMITS)
    with closing(machine.server):
        laboratory = machine.laboratory(spec)
        before = eager_seconds(laboratory, max(machine.mixed_sizes))
        seconds, after = times(laboratory, report), eager_seconds(laboratory, max(machine.mixed_sizes))
    launch = (before + after) / 2 if max(before, after) <= STEADY * min(before, after) else 0.0
    if not launch:
        taken = f"{before * 1e3:.1f} ms before the iterations and {after * 1e3:.1f} after them"
        report(f"a launch without a graph took {taken}: other work on the host; the profile's time is kept")
    card, rows = speed(card_name(), seconds, launch, profile, spec)
    print(tabulate(rows, ["iteration", "measured ms", "profile ms", "factor"], floatfmt=("", ".3f", ".3f", ".3f")))
    return write_card(profile, card, f"measured by python -m experiments.profile card model={model}", output)


def times(laboratory: Laboratory, report: Report) -> dict[Batch, float]:
    """Returns the median seconds of each iteration."""
    longest = laboratory.limits.max_request_tokens
    beside = spread(BESIDE, CONTEXTS[0], longest)
    batches = [Batch((), spread(number, context, longest)) for number in DECODES for context in CONTEXTS]
    batches += [batch for size in TOTALS for batch in (Batch(prompts(size)), Batch(((size - BESIDE, 0),), beside))]
    report(f"{len(batches)} iterations, {ROUNDS} times each in turn")
    laboratory.time_in_rounds(batches)
    return laboratory.measured


def speed(
    name: str, seconds: dict[Batch, float], launch: float, profile: Profile, spec: ModelSpec
) -> tuple[Card, Sequence[Sequence[Any]]]:
    """Returns the card's factors, and a row for each iteration and for launches: measured and predicted milliseconds, their ratio.

    launch: the host's `eager_seconds`; 0 (none, or not steady), or a profile without them, gives a factor of 1.
    """
    profile = replace(profile, card=Card())
    cost = ProfileCost(profile, spec, max_batch=LIMITS["batch"])
    ratios, rows = dict[bool, list[float]]({True: [], False: []}), []
    for batch, taken in seconds.items():
        shape = batch.shape()
        predicted = cost.predict(shape)
        ratios[bool(shape.chunks)].append(taken / predicted)
        chunks = "+".join(str(tokens) for tokens, _ in shape.chunks)
        parts = [f"prompts of {chunks}"] * bool(chunks)
        if shape.num_decodes:
            parts.append(f"{shape.num_decodes} decodes at {shape.decode_context // shape.num_decodes}")
        rows.append((", ".join(parts), taken * 1e3, predicted * 1e3, taken / predicted))
    eager = profile.host_time(True, spec).eager_seconds
    launches = launch / eager if launch and eager else 1.0
    if launch:
        rows.append(("launch without a graph", launch * 1e3, eager * 1e3, launches))
    factors = (median(ratios[True]), median(ratios[False]), launches)
    return Card(name, *(round(factor, 4) for factor in factors)), rows


def write_card(profile: Profile, card: Card, how: str, output: str, keys: str = "") -> Path:
    """Writes the profile with these factors alone, and prints how runs use it. keys: further keys of these runs."""
    place = PROFILES / f"{profile.name}-{card.name.split()[-1]}.json"
    path, origin = Path(output) if output else place, f"{how} hardware={profile.name}; {today()}; commit {commit()}"
    write_text(path, profile_text(replace(profile, card=card, origins={**profile.origins, ("card",): origin})))
    print(f"{card.text}\nwritten: {path}; runs use it with hardware={path if output else path.stem}{keys}")
    return path
