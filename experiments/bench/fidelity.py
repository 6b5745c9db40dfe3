"""The error of simulation: the same requests and policies, served on the GPU and simulated from its profile.

    python -m experiments.bench fidelity path=TRACE                           # serve (needs a GPU), simulate, compare
    python -m experiments.bench fidelity measured=results/h200/fidelity.npz   # simulate and compare only
    python -m experiments.bench fidelity path=TRACE cases=held name=held_out  # runs that had no part in the profile

Real runs are kept in a file, to which later ones are added (`cases=` chooses). Besides the figures of each run, every
iteration of the real ones is predicted from its shape, which tells errors of the cost model from errors in the order of
events.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from cbatch import ConfigError
from cbatch.sim.profile_file import PROFILES, load_profile
from cbatch.validation import whole
from experiments.fidelity import runs as kept_runs
from experiments.fidelity.cases import CASES, chosen_cases
from experiments.fidelity.compare import brief_error, compare, error_line, pair, show
from experiments.profile.tables import write_profile
from experiments.store.benchmark_file import write

Requests = Annotated[int, whole(1, unit="number of requests")]


def main(
    path: str = "",
    measured: str = "",
    cases: str = "",
    policies: str = "",
    pd: Requests = 144,
    trace: Requests = 512,
    poisson: Requests = 256,
    held: Requests = 400,
    name: str = "fidelity",
    hardware: str = "h200",
    stamp: str = "off",
    folder: str = "results",
) -> None:
    """Measures if there is a trace, simulates, compares, writes NAME.json and a plot.

    Args:
        path: a trace file; real runs are measured, and added to those in `measured`.
        cases, policies: beginnings of names to measure, separated by ";"; earlier measurements of others are kept.
        pd, trace, poisson, held: requests of each case.
        name: of the files that are written.
        hardware: profile to simulate with. stamp: "on" writes the errors into it.

    Raises:
        ConfigError: neither a trace nor measured runs, or no GPU.
    """
    if not path and not measured:
        serve, keep = "path=azure_llm_2023_conv.csv.gz", "measured=results/h200/fidelity.npz"
        raise ConfigError(f"fidelity: give a trace to serve on a GPU, {serve}, or kept runs, {keep}")
    profile, chosen = load_profile(hardware), chosen_cases(cases, policies)
    kept = Path(measured) if measured else Path(folder) / hardware / f"{name}.npz"
    about, runs = kept_runs.load(kept) if kept.is_file() or not path else ({}, [])
    if path:
        from experiments.fidelity.serve import serve_cases  # loads torch

        numbers = {"pd": pd, "trace": trace, "poisson": poisson, "held": held}
        for about, served in serve_cases(chosen, path, numbers, tuple(runs)):
            kept_runs.save(kept, about, runs := served)
        print(f"written: {kept}")
    runs.sort(key=lambda run: [case.name for case in CASES].index(run.settings["case"]))
    result = compare([pair(run, profile) for run in runs], profile)
    show(result)
    written = write(name, about["hardware"], {"measured": about, **result}, Path(folder))
    print(f"written: {written}")
    from experiments.plots import fidelity as plot  # loads matplotlib
    from experiments.plots.style import save

    print(*save(plot.draw(written.parent, written.name), written.parent, name), sep="\n")
    if stamp == "on":
        models = sorted({run.settings["model"] for run in runs})
        compared = {"models": models, "loops": ["async"], "gpus": 1, "brief": brief_error(result)}
        _stamp(PROFILES / f"{hardware}.json", error_line(result), compared)


def _stamp(path: Path, error: str, compared: dict[str, Any]) -> None:
    """Writes the error of its simulations into the profile, and the runs that it was established against."""
    data = json.loads(path.read_text())
    write_profile(path, {**data, "error": error, "compared": compared})
    print(f"{path}: {error}")
