"""Measures or fits the speed of a card against a profile of its kind: identical cards differ by several percent.

Two factors of iteration times, with prompts and of decodes alone. A file keeps them beside a copy of the profile's tables.

The factors of this card are medians over iterations that were measured for the profile, too, so that interpolation adds nothing to
them. The factors of a server are fitted to its clients' records alone, with a delay, by simulating the same requests. Records are
requests.csv of a run, or what `vllm bench serve --save-result --save-detailed` writes. The first half of the requests is fitted, the
second half judged. The delay is the median of recorded minus simulated TTFT.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from tabulate import tabulate

from cbatch import ConfigError, ModelSpec
from cbatch.results.metrics import statistics
from cbatch.sim import PROFILES, Profile, ProfileCost, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_names, profile_text
from experiments.profile.batches import prompts, spread
from experiments.profile.laboratory import Batch, Laboratory
from experiments.profile.machine import build, hardware_name
from experiments.profile.measure import Report
from experiments.serve import about_run, origin_of_run, serve
from experiments.settings.assemble import assemble
from experiments.settings.compose import compose_run
from experiments.settings.hardware import card_name
from experiments.settings.presets import load_spec
from experiments.settings.settings import Settings
from experiments.store.provenance import commit, today, write_text
from experiments.store.run_folder import read_summary
from experiments.store.tables import read_requests

LIMITS = {"batch": 64, "max_tokens": 2048, "longest": 4224}

TOTALS, DECODES, CONTEXTS = (256, 512, 1024, 2048), (4, 16, 32, 64), (1056, 4128)
"""Tokens of iterations with prompts; numbers and mean contexts of decodes alone."""

BESIDE = 32
"""Decodes beside the chunks."""

ROUNDS = 3
"""Rounds in which every iteration is measured once: a card's clock drifts over seconds."""

TTFT, TPOT, END_TO_END = "ttft_seconds", "tpot_seconds", "end_to_end_seconds"

TRACE = {"arrival": "arrived_at", "prompt_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"}
"""Columns of a trace by those of records."""

SIMPLEX = [(1.0, 1.0), (1.06, 1.0), (1.0, 1.06)]
"""Factors of prompts and of decodes with which the search begins."""

PRECISION, MOST_SIMULATIONS = {"xatol": 0.003, "fatol": 0.01}, 40
"""The search ends at this precision of the factors and of the error, whose last digits are chance, or after this many simulations."""


def measure_card(report: Report, hardware: str = "", model: str = "llama-3.1-8b", output: str = "") -> Path:
    """Measures this card, and writes the profile with its factors; `experiments.profile.__main__` explains the options.

    Raises:
        ConfigError: no GPU, no profile of this kind of GPU, or one without this model. CapacityError: no room for the model.
    """
    name, spec = hardware_name("cuda"), load_spec(model)
    profiles = map(load_profile, [hardware] if hardware else profile_names())
    own = (each for each in profiles if hardware or (not each.card.name and each.hardware.partition(",")[0] == name))
    if (profile := next(own, None)) is None:
        raise ConfigError(
            f"profile card: there is no profile of {name}; give hardware=NAME, or measure one: model=NAME"
        )
    if not profile.measured_as(spec):
        known = ", ".join(profile.models)
        raise ConfigError(f"profile card: hardware={profile.name} has no tables of model={model}; give model={known}")
    report(f"{profile.name} is of {profile.hardware}; this is {card_name()}; {model} is loaded")
    machine = build("cuda", spec, **LIMITS)
    with closing(machine.server):
        seconds = times(machine.laboratory(spec), report)
    card, rows = speed(card_name(), seconds, profile, spec)
    print(tabulate(rows, ["iteration", "measured ms", "profile ms", "factor"], floatfmt=("", ".3f", ".3f", ".3f")))
    return write_card(profile, card, f"measured by python -m experiments.profile card model={model}", output)


def times(laboratory: Laboratory, report: Report) -> dict[Batch, float]:
    """Returns the median seconds of each iteration."""
    longest, found = laboratory.limits.max_request_tokens, list[dict[Batch, float]]()
    beside = spread(BESIDE, CONTEXTS[0], longest)
    batches = [Batch((), spread(number, context, longest)) for number in DECODES for context in CONTEXTS]
    batches += [batch for size in TOTALS for batch in (Batch(prompts(size)), Batch(((size - BESIDE, 0),), beside))]
    held = list(filter(laboratory.holds, batches))
    for number in range(ROUNDS):
        report(f"{len(held)} iterations, round {number + 1} of {ROUNDS}")
        laboratory.measured.clear()
        found.append({batch: laboratory.time(batch) for batch in held})
    return {batch: median(taken[batch] for taken in found) for batch in held}


def speed(
    name: str, seconds: dict[Batch, float], profile: Profile, spec: ModelSpec
) -> tuple[Card, Sequence[Sequence[Any]]]:
    """Returns the card's factors, and a row for each iteration: its batch, measured and predicted milliseconds, their ratio."""
    cost = ProfileCost(replace(profile, card=Card()), spec, max_batch=LIMITS["batch"])
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
    return Card(name, round(median(ratios[True]), 4), round(median(ratios[False]), 4)), rows


def write_card(profile: Profile, card: Card, how: str, output: str, keys: str = "") -> Path:
    """Writes the profile with these factors alone, and prints how runs use it. keys: further keys of these runs."""
    place = PROFILES / f"{profile.name}-{card.name.split()[-1]}.json"
    path, origin = Path(output) if output else place, f"{how} hardware={profile.name}; {today()}; commit {commit()}"
    write_text(path, profile_text(replace(profile, card=card, origins={**profile.origins, ("card",): origin})))
    print(f"{card.text}\nwritten: {path}; runs use it with hardware={path if output else path.stem}{keys}")
    return path


def fit_card(report: Report, server: Sequence[str], records: str, output: str = "") -> Path:
    """Fits a server's speed, and writes the profile with it; `experiments.profile.__main__` explains the options.

    server: keys of `experiments.run` that describe it.
    Raises ConfigError: records that cannot be read, come from a run with other keys, are only partly served by simulation, or
    are not predicted better after fitting. CbatchError: as `experiments.run`.
    """
    path = Path(records)
    recorded = read_records(path)
    half = len(recorded) // 2
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        recorded[list(TRACE)].rename(columns=TRACE).to_csv(trace, index=False)
        settings = compose_run("backend=sim", "workload=trace", f"workload.path={trace}", *server)
        _check_server(path, settings)
        profile = replace(load_profile(settings.hardware), card=Card(f"the server of {path.stem}"))
        began = time.perf_counter()
        as_it_is = simulate(settings, profile, trace.with_suffix(".json"), len(recorded))
        taken = time.perf_counter() - began
        report(f"one simulation takes {taken:.1f} s, up to {MOST_SIMULATIONS} of them {MOST_SIMULATIONS * taken:.0f} s")

        def predicted(factors: Sequence[float]) -> tuple[Card, float, pd.DataFrame]:
            prompts, decodes = (round(float(factor), 4) for factor in factors)
            report(f"simulating with prompts x{prompts:.3f}, decodes x{decodes:.3f}")
            card = replace(profile.card, prompts=prompts, decodes=decodes)
            table = simulate(settings, replace(profile, card=card), trace.with_suffix(".json"), len(recorded))
            delay = max(float((recorded[TTFT] - table[TTFT])[:half].median()), 0.0)
            return card, delay, table.assign(**{key: table[key] + delay for key in (TTFT, END_TO_END)})

        def error(table: pd.DataFrame, part: slice) -> float:
            """Returns the mean relative error of TTFT and TPOT, which hardly changes if a queue serves a few requests in another order."""
            return sum(float((table[key] / recorded[key] - 1)[part].abs().mean()) for key in (TTFT, TPOT))

        def fit(factors: Sequence[float]) -> float:
            return error(predicted(factors)[-1], slice(half))

        options = {"initial_simplex": SIMPLEX, "maxfev": MOST_SIMULATIONS, **PRECISION}
        card, delay, fitted = predicted(minimize(fit, SIMPLEX[0], method="Nelder-Mead", options=options).x)
    print(f"requests {half + 1} to {len(recorded)}, not fitted: recorded seconds, and the error of simulation")
    print(_table(*(table[half:] for table in (recorded, as_it_is, fitted))))
    if error(fitted, slice(half, None)) >= error(as_it_is, slice(half, None)):
        as_well = f"{profile.name} predicts the half that was not fitted as well without factors"
        raise ConfigError(f"records={path}: {as_well}; use it, or correct the keys of the server; nothing is written")
    keys = f" backend.server_seconds={delay:.4g}" if delay else ""
    return write_card(profile, card, f"derived from {path.name}: python -m experiments.profile card", output, keys)


def _check_server(records: Path, settings: Settings) -> None:
    """Raises ConfigError if `records` is the folder of a run with another policy, model or limits than the settings give."""
    if (summary := read_summary(records)) is None:
        return
    described = {**about_run(assemble(settings)), **origin_of_run(settings)}
    recorded, given = _server(summary["about"]), _server(described)
    if other := [key for key in given if given[key] != recorded[key]]:
        ran, keys = (" ".join(f"{key}={server[key]}" for key in other) for server in (recorded, given))
        raise ConfigError(f"records={records}: the run had {ran}, the keys give {keys}; give the keys of the run")


def _server(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that determine a server's order of requests, by the keys of a command line."""
    limits, identity = about["limits"], about["identity"]
    return {
        **{key: about[key] for key in ("policy", "model", "runtime")},
        **{key: identity.get(key) for key in ("prefix_cache", "eviction")},
        "batch": limits["batch"],
        "max_tokens": limits["tokens"],
        "kv_tokens": limits["kv_blocks"] * limits["block_size"],
    }


def simulate(settings: Settings, profile: Profile, path: Path, number: int) -> pd.DataFrame:
    """Returns the simulated requests in order of arrival. path: for the profile's file.

    Raises ConfigError: fewer than `number` are served. CbatchError: as `serve`.
    """
    write_text(path, profile_text(profile))
    result = serve(replace(settings, hardware=str(path)), say=lambda line: None, bar=False)
    table = result.requests.dropna(subset=[TTFT]).sort_values("id", ignore_index=True)
    if len(table) < number:
        problem = f"simulation serves {len(table)} of {number} recorded requests"
        raise ConfigError(f"records: {problem}; give the server's kv_tokens and max_tokens")
    return table


def read_records(path: Path) -> pd.DataFrame:
    """Reads the requests that got their whole output, in order of arrival, by columns of requests.csv. Raises ConfigError."""
    try:
        if path.is_dir():
            table = read_requests(path)
        else:
            content = json.loads(path.read_text())
            keys = zip((*TRACE, TTFT), ("start_times", "input_lens", "output_lens", "ttfts"), strict=True)
            table = pd.DataFrame({name: content[key] for name, key in keys})
            later = np.array([sum(gaps) for gaps in content["itls"]])
            table[TPOT] = later / (table["output_tokens"] - 1).replace(0, np.nan)
            table[END_TO_END] = table[TTFT] + later
            table = table[table["output_tokens"] > 0]
        table = table.dropna(subset=[TTFT]).sort_values("arrival", ignore_index=True, kind="stable")
        table["arrival"] -= table["arrival"].min()
    except (OSError, ValueError, KeyError, TypeError) as error:
        formats = "the folder of a run, or what vllm bench serve --save-result --save-detailed wrote"
        raise ConfigError(f"records={path}: cannot be read: {error!r}; give {formats}") from error
    if len(table) < 2:
        raise ConfigError(f"records={path}: has {len(table)} served requests; give at least two")
    return table


def _table(recorded: pd.DataFrame, *others: pd.DataFrame) -> str:
    """Returns a row per figure: recorded, and the error of each simulation."""
    rows = []
    for key in (TTFT, TPOT, END_TO_END):
        real, *found = (statistics(table[key].to_numpy()) for table in (recorded, *others))
        for name in ("mean", "p50", "p90", "p99"):
            errors = [f"{other[name] / real[name] - 1:+.1%}" for other in found]
            rows.append([f"{key.removesuffix('_seconds')} {name}", f"{real[name]:.4g}", *errors])
    return tabulate(rows, ["", "recorded", "as it is", "fitted"], disable_numparse=True)
