"""The error of simulation: the same requests and policies, served on the GPU and simulated from its profile.

Commands are in the README beside this file.

Real runs are kept in a file, to which later ones are added (`cases=` chooses). Besides the figures of each run, every
iteration of the real ones is predicted from its shape, which separates errors of the cost model from errors in the order of
events.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from cbatch import ConfigError
from cbatch.sim import PROFILES, Profile, load_profile
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import make_profile, profile_text
from cbatch.sim.provenance import IN_GRAPHS
from cbatch.validation import Switch, whole
from experiments.store.provenance import today, write_benchmark, write_text
from reproduction import RESULTS, VALIDATION
from reproduction.validation import runs as kept_runs
from reproduction.validation.cases import CASES, chosen_cases
from reproduction.validation.compare import (
    CLOSED,
    TARGETS,
    by_card,
    card_of,
    compare,
    gpus_of,
    pair,
    simulate,
    speed_of,
    tables_of,
)
from reproduction.validation.ranking import job_cases, ratio_errors
from reproduction.validation.report import show
from reproduction.validation.runs import ServedRun, figures
from reproduction.validation.stored import pool, stored_runs

Kept = tuple[dict[str, Any], list[ServedRun]]
"""What is known of a card, and its runs."""


def main(
    path: tuple[str, ...] = (),
    measured: tuple[str, ...] = (),
    cases: str = "held out",
    policies: str = "",
    held: Annotated[int, whole(1, unit="number of requests")] = 400,
    name: str = "fidelity",
    hardware: str = "h200",
    jobs: tuple[str, ...] = (),
    stamp: Switch = False,
    folder: str = RESULTS,
) -> None:
    """Measures if there is a trace, simulates, compares, writes NAME.json.

    Args:
        path: a trace file; real runs are measured, and added to those in `measured`. Of written runs, all their traces.
        measured: files of kept runs, each of a card, separated by commas; with `path` at most one. Or written comparisons
            (.json), also of `capacity`: their errors are printed as one; with `path`, one is simulated again and written instead.
        cases, policies: beginnings of names to measure, separated by ";"; earlier measurements of others are kept.
        held: requests of each case. hardware: profile to simulate with, by name or file. stamp: on writes the errors of these runs, or of these comparisons, into it.
        jobs: files that `jobs` wrote, whose errors of ratios the asynchronous loop on one GPU states too.

    Raises:
        ConfigError: neither a trace nor measured runs, or no GPU.
    """
    if not path and not measured:
        serve, keep = "path=azure_llm_2023_conv.csv.gz", "measured=reproduction/results/h200/fidelity.npz"
        raise ConfigError(f"fidelity: give a trace to serve on a GPU, {serve}, or kept runs, {keep}")
    stored = bool(measured) and measured[0].endswith(".json")
    if len(path) > 1 and not stored:
        raise ConfigError(f"path={','.join(path)}: one trace is served at a time; give one")
    if path and len(measured) > 1:
        raise ConfigError(f"measured={','.join(measured)}: new runs go to one file; give one, or leave out path=")
    profile = load_profile(hardware)
    chosen = [replace(case, num_requests=held) for case in chosen_cases(cases, policies)]
    if stored:
        comparisons = [Path(file) for file in measured]
        if path:
            content = json.loads(comparisons[0].read_text(encoding="utf-8"))
            again = stored_runs(comparisons[0], path, tables_of(profile, gpus_of(content["cases"])))
            comparisons = [_write_compared(content["measured"], again, profile, name, folder)]
        else:
            for loop, result in pool(comparisons, profile.name).items():
                print(f"\n{loop}:")
                show(result)
    else:
        files = [Path(file) for file in measured] or [Path(folder) / profile.name / f"{name}.npz"]
        kept = [kept_runs.load(file) if file.is_file() or not path else ({}, []) for file in files]
        if path:
            from reproduction.validation.serve import serve_cases  # loads torch

            for about, served in serve_cases(chosen, path[0], tuple(kept[0][1]), hardware=hardware):
                kept_runs.save(files[0], about, served)
                kept = [(about, served)]
            print(f"written: {files[0]}")
        comparisons = [_compare_kept(kept, profile, name, folder)]
    if stamp:
        stamped, stated = PROFILES / f"{hardware}.json", statement(comparisons, profile.name, jobs)
        stamped = stamped if stamped.is_file() else Path(hardware)  # as `load_profile` finds it
        written_profile = make_profile(json.loads(stamped.read_text()) | stated)
        write_text(stamped, profile_text(written_profile))
        print(*(f"{stamped}, {loop}: {known.text}" for loop, known in written_profile.compared.items()), sep="\n")


def _compare_kept(kept: Sequence[Kept], profile: Profile, name: str, folder: str) -> Path:
    """Simulates and compares what was kept of each card; prints and writes it; returns the written file."""
    origins, order = [about for about, _ in kept], [case.name for case in CASES]
    cards = [sorted(runs, key=lambda run: order.index(run.settings["case"])) for _, runs in kept]
    return _write_compared(origins, [run for runs in by_card(cards) for run in runs], profile, name, folder)


def _write_compared(
    origins: list[dict[str, Any]], runs: Sequence[ServedRun], profile: Profile, name: str, folder: str
) -> Path:
    """Simulates and compares runs, whose cases name their cards; prints and writes the comparison, also at the speed of the cards and of each run."""
    found = compare([pair(run, profile) for run in runs], profile)
    speeds = {"at_card_speed": at_card_speed(runs, profile), "at_own_speed": at_own_speed(runs, profile)}
    result = {"measured": origins, **found, **{name: errors(chosen, profile) for name, chosen in speeds.items()}}
    show(result)
    written = write_benchmark(name, origins[0]["hardware"], result, folder, VALIDATION)
    print(f"written: {written}")
    return written


def statement(comparisons: Sequence[Path], profile: str, jobs: Sequence[str] = ()) -> dict[str, Any]:
    """Returns a profile's `compared`, from written comparisons, which also name the commits of the runtime and the traces. jobs: see `main`."""
    command = f"{VALIDATION} fidelity measured={','.join(map(str, comparisons))} hardware={profile}"
    command += f" jobs={','.join(jobs)}" * bool(jobs)
    sessions = [json.loads(Path(file).read_text(encoding="utf-8")) for file in jobs]
    if any((of["profile"], of["tables"]) != (profile, tables_of(load_profile(profile))) for of in sessions):
        raise ConfigError(f"jobs={','.join(jobs)}: simulated with other tables than those of {profile}; run jobs again")
    compared = {}
    for loop, result in pool(comparisons, profile).items():
        runs = [run for policies in result["cases"].values() for run in policies.values()]
        files = [result, *(map(job_cases, sessions) if loop.removesuffix(IN_GRAPHS) == "async" else ())]
        batches, loads = [run["batch"] for run in runs], [run["load"] for run in runs if run["load"] is not None]
        compared[loop] = {
            "models": sorted({run["model"] for run in runs}),
            "gpus": gpus_of(result["cases"]),
            "largest_error": {name: round(error, 4) for name, error in result["largest_error"].items()},
            "runs": len(runs),
            "cards": len({origin.get("card", number) for number, origin in enumerate(result["measured"])}),
            "date": today(),
            "see": command,
            "largest_error_of_ratios": ratio_errors(files)["largest"].round(4).to_dict(),
            "batches": batches,
            "loads": loads,
            "shares_of_bound": [round(share, 2) for run in runs if (share := run.get("share_of_bound")) is not None],
            "in_graphs": loop.endswith(IN_GRAPHS),
        }
    return {"compared": compared}


def at_card_speed(runs: Sequence[ServedRun], profile: Profile) -> list[tuple[ServedRun, Card]]:
    """Returns the runs whose requests arrive over time, and the speed of their card, estimated from its queued runs of the same model."""
    cards: dict[tuple[str, str], list[ServedRun]] = defaultdict(list)
    for run in runs:
        cards[card_of(run.settings["case"])[1], run.settings["model"]].append(run)
    found = []
    for of_card in cards.values():
        queued = [run for run in of_card if _times_known(run) and run.settings.get("load") is None]
        speed = speed_of(queued, profile)
        found += [(run, speed) for run in of_card if queued and run not in queued]
    return found


def at_own_speed(runs: Sequence[ServedRun], profile: Profile) -> list[tuple[ServedRun, Card]]:
    """Returns the runs and the speed of each one's own iterations: what is left of their errors lies in the order of events."""
    return [(run, speed_of([run], profile)) for run in runs if _times_known(run)]


def _times_known(run: ServedRun) -> bool:
    return "step.started" in run.columns or bool(run.settings.get("iterations"))


def errors(runs: Sequence[tuple[ServedRun, Card]], profile: Profile) -> dict[str, dict[str, float]]:
    """Returns the errors of runs simulated at these speeds, by figure; `missed` exceed the target."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for run, speed in runs:
        found = figures(simulate(run, replace(profile, card=speed)))
        for name in TARGETS.keys() - CLOSED.keys():
            sizes[name].append(abs(found[name] / run.figures[name] - 1))
    return {
        name: {
            "median": float(np.median(sizes[name])),
            "largest": max(sizes[name]),
            "runs": len(sizes[name]),
            "missed": sum(size > target for size in sizes[name]),
        }
        for name, target in TARGETS.items()
        if sizes[name]
    }
