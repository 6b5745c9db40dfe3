"""Fits the speed of a server to its clients' records, with the delay before every first token, by simulating the same requests.

Records are requests.csv of a run, or what `vllm bench serve --save-result --save-detailed` writes. The first half of the requests is
fitted, the second half judged. The delay is the median of recorded minus simulated TTFT. Times of 0, and those between the tokens of
an output of one token, have no relative error and are left out.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import minimize
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.results.metrics import statistics
from cbatch.sim import Profile, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import profile_text
from experiments.profile.card import write_card
from experiments.profile.measure import Report
from experiments.serve import about_run, origin_of_run, serve
from experiments.settings.compose import compose_run
from experiments.settings.settings import Settings
from experiments.setup.assemble import assemble
from experiments.store.provenance import write_text
from experiments.store.run_folder import read_summary
from experiments.store.tables import read_requests

TTFT, TPOT, END_TO_END = "ttft_seconds", "tpot_seconds", "end_to_end_seconds"

TRACE = {"arrival": "arrived_at", "prompt_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"}
"""Columns of a trace by those of records."""

SIMPLEX = [(1.0, 1.0), (1.06, 1.0), (1.0, 1.06)]
"""Factors of prompts and of decodes with which the search begins."""

PRECISION, MOST_SIMULATIONS = {"xatol": 0.003, "fatol": 0.01}, 40
"""The search ends at this precision of the factors and of the error, whose last digits are chance, or after this many simulations."""


def fit_card(report: Report, server: Sequence[str], records: str, output: str = "") -> Path:
    """Fits a server's speed, and writes the profile with it; `reproduction.profiles.__main__` explains the options.

    server: keys of `experiments.run` that describe it.
    Raises ConfigError: records that cannot be read, come from a run with other keys, are only partly served by simulation, or
    are not predicted better after fitting. CbatchError: as `experiments.run`.
    """
    path = Path(records)
    recorded = read_records(path)
    half = len(recorded) // 2
    for key, part in ((key, part) for key in (TTFT, TPOT) for part in (slice(half), slice(half, None))):
        if not _above_0(recorded[key][part]).any():
            numbers = f"requests {recorded.index[part][0] + 1} to {recorded.index[part][-1] + 1}"
            problem = f"{numbers} have no {key.removesuffix('_seconds').upper()} above 0"
            raise ConfigError(f"records={path}: {problem}; record more requests, with outputs of several tokens")
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        recorded[list(TRACE)].rename(columns=TRACE).to_csv(trace, index=False)
        settings = compose_run("backend=sim", "workload=trace", f"workload.path={trace}", *server)
        _check_server(path, settings)
        profile = load_profile(settings.hardware)
        profile = replace(profile, card=Card(f"the server of {path.stem}", launches=profile.card.launches))
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
            errors = (table[key] / recorded[key].where(_above_0(recorded[key])) - 1 for key in (TTFT, TPOT))
            return sum(float(of[part].abs().mean()) for of in errors)

        def fit(factors: Sequence[float]) -> float:
            return error(predicted(factors)[-1], slice(half))

        options = {"initial_simplex": SIMPLEX, "maxfev": MOST_SIMULATIONS, **PRECISION}
        card, delay, fitted = predicted(minimize(fit, SIMPLEX[0], method="Nelder-Mead", options=options).x)
    print(f"requests {half + 1} to {len(recorded)}, not fitted: recorded seconds, and the error of simulation")
    print(_table(*(table[half:] for table in (recorded, as_it_is, fitted))))
    if not error(fitted, slice(half, None)) < error(as_it_is, slice(half, None)):  # NaN is no improvement
        as_well = f"{profile.name} predicts the half that was not fitted as well without factors"
        raise ConfigError(f"records={path}: {as_well}; use it, or correct the keys of the server; nothing is written")
    keys = f" backend.server_seconds={delay:.4g}" if delay else ""
    return write_card(profile, card, f"derived from {path.name}: python -m reproduction.profiles", output, keys)


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
    result = serve(replace(settings, hardware=str(path)), log=lambda line: None, bar=False)
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


def _above_0(seconds: "pd.Series[float]") -> "pd.Series[bool]":
    return seconds.between(0, inf, inclusive="neither")


def _table(recorded: pd.DataFrame, *others: pd.DataFrame) -> str:
    """Returns a row per figure: recorded, and the error of each simulation."""
    rows = []
    for key in (TTFT, TPOT, END_TO_END):
        judged = _above_0(recorded[key])
        real, *found = (statistics(table[key][judged].to_numpy()) for table in (recorded, *others))
        for name in ("mean", "p50", "p90", "p99"):
            errors = [f"{other[name] / real[name] - 1:+.1%}" for other in found]
            rows.append([f"{key.removesuffix('_seconds')} {name}", f"{real[name]:.4g}", *errors])
    return tabulate(rows, ["", "recorded", "as it is", "fitted"], disable_numparse=True)
