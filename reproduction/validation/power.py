"""Joules per token of this GPU: measured, predicted from its power in other runs, and simulated.

    python -m reproduction.validation power
    python -m reproduction.validation power model=qwen3-8b fitted=off name=qwen     # the profile's power, judged on this card
    python -m reproduction.validation power measured=qwen.json,llama.json hardware=h200   # judged again, without a GPU

The power is fitted to queued requests of equal lengths, and to a pause. The judged runs have other lengths and arrive by a Poisson process.
NAME.npz keeps the seconds, bytes and operations of all iterations.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from tabulate import tabulate

from cbatch import ConfigError, Engine, RunRecord, Server
from cbatch.results.gathered import Gathered
from cbatch.results.utilisation import ModelWork, device_seconds, limit_power, measured_energy, work_of
from cbatch.sim import load_profile
from cbatch.sim.profile import Watts
from cbatch.validation import Switch
from experiments.settings.compose import compose_run
from experiments.setup.assemble import Run, assemble
from experiments.store.provenance import write_benchmark
from reproduction import RESULTS, VALIDATION
from reproduction.validation.compare import tables_of

COMMON = "batch=128 max_tokens=8192"
LONGEST = "workload.length=2176"
FITTED = {
    "8 decodes": "policy=orca workload.num_requests=8 workload.length=2176 workload.pd_ratio=0.0625",
    "32 decodes": "policy=orca workload.num_requests=32 workload.length=1536 workload.pd_ratio=0.125",
    "128 decodes": "policy=orca workload.num_requests=128 workload.length=1024 workload.pd_ratio=0.15",
    "prompts": "policy=orca workload.num_requests=192 workload.length=1088 workload.pd_ratio=16",
    "chunks of 256": "policy=sarathi_serve chunk=256 workload.num_requests=192 workload.length=1024 workload.pd_ratio=6",
}
JUDGED = {
    f"{rate} requests/s": f"policy=sarathi_serve chunk=512 workload=open_loop workload.arrivals.rate={rate} workload.num_requests={20 * rate}"
    for rate in (2, 8, 24)
}
WARM_UP = "policy=sarathi_serve chunk=256 workload.num_requests=16 workload.length=48 workload.pd_ratio=3"
LIMIT = 700.0
"""Watts: the data sheets of the H100 and H200 SXM."""
PAUSE = 6.0
"""Seconds of the pause; the first of them is left out."""


class Done(NamedTuple):
    """What a run computed. iterations: seconds, bytes and operations, [iterations, 3]. seconds, tokens: of the run, and generated."""

    iterations: NDArray[np.float64]
    seconds: float
    tokens: int
    joules: float = float("nan")

    def predict(self, watts: Watts) -> float:
        """Returns the joules."""
        seconds, moved, flops = self.iterations.T
        taken = watts.busy * seconds + watts.joules_per_byte * moved + watts.joules_per_flop * flops
        pauses = max(self.seconds - float(seconds.sum()), 0.0)
        limited, _ = limit_power(taken, seconds, watts.limit * seconds, np.zeros(len(seconds), np.int64))
        return float(limited.sum()) + watts.idle * pauses


Meter = Callable[[Run], Any]
Kept = tuple[str, float, dict[str, Done], Watts | None]


def main(
    hardware: str = "",
    model: str = "llama-3.1-8b",
    fitted: Switch = True,
    measured: tuple[str, ...] = (),
    name: str = "power",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes NAME.json.

    hardware: profile to simulate with; by default this card's. fitted: off takes the profile's power in place of a fit.
    measured: files NAME.json of earlier runs, beside NAME.npz, which are judged again without a GPU, by the power of `hardware`.
    """
    known = load_profile(profile := hardware or _profile_of_card()).watts
    if known is None and (measured or not fitted):
        raise ConfigError(f"hardware={profile}: states no power; give the profile of an H100 or H200")
    card, kept = load_profile(profile).hardware, [run for file in measured for run in _read(Path(file))]
    if not measured:
        cases = {**(FITTED if fitted else {}), **JUDGED}
        done, idle = measure("backend=cuda", Run.meter, cases, f"model={model} {COMMON}")
        watts = fit([done[run] for run in FITTED], idle) if fitted else known
        kept = [(model, idle, done, watts)]
    runs = {}
    for model_, idle, done, watts in kept:
        simulated = {run: simulate(JUDGED[run], profile, f"model={model_} {COMMON}") for run in done if run in JUDGED}
        used = watts or known
        assert used is not None
        figures, table = judge(done, used, simulated, known)
        heads = ["run", "W", "J per token", "fit, at measured speed", "simulated", "simulated speed", "profile's power"]
        print(tabulate(table, [model_, *heads[1:]], floatfmt=".4g"))
        print(f"idle {idle:.1f} W, {used}")
        runs[model_] = {"idle": idle, "watts": watts and astuple(watts), "figures": figures}
    about = {"profile": profile, "tables": tables_of(load_profile(profile)), "settings": COMMON}
    written = write_benchmark(name, card, {**about, "runs": runs}, folder, VALIDATION)
    if not measured:
        iterations: dict[str, Any] = {case: run.iterations for case, run in kept[0][2].items()}
        np.savez_compressed(written.with_suffix(".npz"), **iterations)
    print(f"written: {written}")


def _profile_of_card() -> str:
    import torch

    return "h100" if "H100" in torch.cuda.get_device_name() else "h200"


def _read(file: Path) -> Iterator[Kept]:
    """Yields model, idle watts, runs, and the power that was fitted; None: the profile's."""
    iterations = np.load(file.with_suffix(".npz"))
    for model, run in json.loads(file.read_text(encoding="utf-8"))["runs"].items():
        done = {
            case: Done(
                iterations[case],
                of["seconds"],
                of["watts"] * of["seconds"] / of["joules_per_token"],
                of["watts"] * of["seconds"],
            )
            for case, of in run["figures"].items()
        }
        yield model, run["idle"], done, run["watts"] and Watts(*run["watts"])


def judge(
    done: Mapping[str, Done], watts: Watts, simulated: Mapping[str, Done], known: Watts | None
) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Returns the figures and a row of text for each run. known: the profile's power, fitted to other cards; None: it has none."""
    figures, table = dict[str, Any](), []
    for name, run in done.items():
        measured = run.joules / run.tokens
        errors = {"fit": run.predict(watts) / run.joules - 1}
        if name in simulated:
            twin = simulated[name]
            errors["simulated"] = twin.predict(watts) / twin.tokens / measured - 1
            errors["seconds"] = twin.seconds / run.seconds - 1
            if known is not None:
                errors["profile"] = twin.predict(known) / twin.tokens / measured - 1
        power = run.joules / run.seconds
        figures[name] = {"watts": power, "joules_per_token": measured, "seconds": run.seconds, "errors": errors}
        texts = (f"{errors[key]:+.1%}" if key in errors else "" for key in ("fit", "simulated", "seconds", "profile"))
        table.append((name, power, measured, *texts))
    return figures, table


def fit(runs: list[Done], idle: float) -> Watts:
    """Returns the power whose joules are nearest to the measured ones, by least squares of relative errors."""
    scale = np.array([300.0, 6e-11, 2e-12])

    def watts_of(values: NDArray[np.float64]) -> Watts:
        busy, per_byte, per_flop = (values * scale).tolist()
        return Watts(idle, busy, per_byte, per_flop, LIMIT)

    def errors(values: NDArray[np.float64]) -> list[float]:
        return [run.predict(watts_of(values)) / run.joules - 1 for run in runs]

    return watts_of(least_squares(errors, np.ones(3), bounds=(0, np.inf)).x)


def measure(backend: str, meter: Meter, cases: Mapping[str, str], common: str) -> tuple[dict[str, Done], float]:
    """Serves the cases on one server; returns them, and the watts of a pause."""
    run, done = assemble(compose_run(backend, *common.split(), LONGEST), print), dict[str, Done]()
    with closing(run.server):
        _begin(run, WARM_UP, backend, common).run()  # compiles what is compiled on first use
        for name, case in cases.items():
            run.engine = _begin(run, case, backend, common)  # whose clock the meter reads
            with meter(run) as found:
                record = run.engine.run()
            done[name] = taken = _done(record, work_of(run.settings.model), _readings(found))
            print(f"  {name}: {taken.joules / taken.tokens:.4g} J per token, {taken.seconds:.1f} s", flush=True)
        with meter(run) as found:
            time.sleep(PAUSE)
    readings = _readings(found)
    times, *gpus = readings[readings[:, 0] > readings[0, 0] + 1].T
    return done, float(sum(np.ptp(joules) for joules in gpus) / np.ptp(times))


def simulate(case: str, hardware: str, common: str) -> Done:
    """Returns the same requests in simulation."""
    common += f" hardware={hardware}"
    run = assemble(compose_run("backend=sim", *common.split(), LONGEST), print)
    return _done(_begin(run, case, "backend=sim", common).run(), work_of(run.settings.model))


def _readings(meter: Any) -> NDArray[np.float64]:
    if meter.problem:
        raise ConfigError(f"power: {meter.problem}")
    return np.array(meter.readings)


def _begin(run: Run, case: str, backend: str, common: str) -> Engine:
    chosen = compose_run(backend, *common.split(), *case.split())
    assert isinstance(run.server, Server)
    return run.server.engine(chosen.policy(), chosen.workload.requests(chosen.backend.vocabulary(chosen.model)))


def _done(record: RunRecord, work: ModelWork, readings: NDArray[np.float64] | None = None) -> Done:
    gathered = Gathered()
    gathered.add(record)
    steps, window = gathered.steps, gathered.window()
    seconds = device_seconds(steps, np.zeros(len(steps["ended"]), np.int64))
    joules = float("nan") if readings is None else measured_energy(readings, window)
    iterations = np.stack([seconds, work.bytes(steps), work.flops(steps)], axis=1)
    return Done(iterations, window.seconds, sum(request.num_output_tokens for request in record.requests), joules)
