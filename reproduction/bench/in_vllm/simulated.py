"""What simulation with a profile of vLLM (`experiments.profile engine=vllm`) says of the runs that vLLM's client has measured."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tabulate import tabulate

from cbatch import ConfigError
from cbatch.sim import PROFILES
from cbatch.validation import Switch
from experiments.settings.assemble import assemble
from experiments.settings.compose import compose_run
from experiments.store.provenance import today, write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.validation.fidelity import stamp_error
from reproduction.validation.runs import figures

MEASURED = tuple(f"reproduction/results/h200/vllm-serving{name}.json" for name in ("", "-high", "-long"))
FIGURES = {
    "TTFT mean": "mean_ttft_ms",
    "TTFT P99": "p99_ttft_ms",
    "TPOT mean": "mean_tpot_ms",
    "TPOT P99": "p99_tpot_ms",
    "throughput": "total_token_throughput",
}
"""Of a simulated run, and as the client calls them."""


def main(
    measured: tuple[str, ...] = MEASURED,
    hardware: str = "h200-vllm",
    stamp: Switch = False,
    name: str = "vllm-simulated",
    folder: str = RESULTS,
) -> None:
    """Simulates each run of the client in these files of benchmark vllm_serving, compares, writes NAME.json.

    stamp: on writes the errors into the profile. Requests arrive when they were sent: what vLLM's API server takes is in the
        client's figures alone.
    """
    runs: dict[str, dict[str, Any]] = {}
    for file in map(Path, measured):
        kept = json.loads(file.read_text())
        for share, rows in kept.get("requests", {}).items():
            for side, shares in kept["figures"].items():
                if share in shares:
                    found = _simulate(kept, side, rows, hardware)
                    runs[f"{file.stem} {share}: {side}"] = _compare(shares[share], found)
    if not runs:
        raise ConfigError(f"measured={','.join(measured)}: no runs; give files of benchmark vllm_serving")
    sizes = {figure: [abs(run[figure]["error"]) for run in runs.values()] for figure in FIGURES}
    errors = {figure: {"median": float(np.median(size)), "largest": max(size)} for figure, size in sizes.items()}
    print(tabulate([[run, *map(_cell, found.values())] for run, found in runs.items()], ["run", *FIGURES]))
    for figure, sides in errors.items():
        print(f"{figure}: median error {sides['median']:.1%}, at most {sides['largest']:.1%}")
    if stamp:
        stamp_error(PROFILES / f"{hardware}.json", _in_words(errors, len(runs), kept))
    stamped = {"profile": hardware, "measured": list(measured), "errors": errors, "runs": runs}
    print(f"written: {write_benchmark(name, kept['hardware'], stamped, folder, BENCH)}")


def _in_words(errors: dict[str, dict[str, float]], number: int, kept: dict[str, Any]) -> dict[str, Any]:
    """Returns what the profile says of its error, and what that was established against."""
    names = ", ".join(f"{name} {each['median']:.1%} (at most {each['largest']:.1%})" for name, each in errors.items())
    line = f"against {number} runs of vllm serve {kept['version']} as `vllm bench serve` reports them, median error: {names}; {today()}. "
    line += "TTFT is too short by what the API server takes, which is not simulated"
    most = [errors[name]["largest"] for name in ("TTFT mean", "TTFT P99", "TPOT P99")]
    brief = "largest error: mean TTFT {:.0%}, TTFT P99 {:.0%}, TPOT P99 {:.0%}".format(*most)
    return {"error": line, "compared": {"async": {"models": [kept["model"]], "gpus": 1, "brief": brief}}}


def _simulate(kept: dict[str, Any], side: str, rows: Sequence[str], hardware: str) -> dict[str, float]:
    rule = f"policy=vllm_v1 chunk={kept['budget']}" if side == "vllm" else side
    slo = ",".join(f"{key.removeprefix('slo_')}:{seconds}" for key, seconds in kept["slo"].items())
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "sent.csv"
        columns = "arrived_at,num_prefill_tokens,num_decode_tokens"
        trace.write_text("\n".join([columns, *(row.replace(" ", ",") for row in rows)]) + "\n")
        given = dict(word.split("=", 1) for word in shlex.split(rule))
        given |= {"backend": "sim", "runtime": "async", "model": kept["model"], "hardware": hardware}
        given |= {"batch": kept["batch"], "max_tokens": kept["budget"]}
        given |= {"workload": "trace", "workload.path": str(trace), "workload.slo": f"{{{slo}}}"}
        run = assemble(compose_run(*(f"{key}={value}" for key, value in given.items())))
        return figures(run.engine.run())


def _compare(measured: dict[str, float], simulated: dict[str, float]) -> dict[str, dict[str, float]]:
    """In seconds, and in prompt and output tokens per second."""
    found = {}
    for figure, key in FIGURES.items():
        value = measured[key] * (1e-3 if key.endswith("_ms") else 1)
        found[figure] = {"measured": value, "simulated": simulated[figure], "error": simulated[figure] / value - 1}
    return found


def _cell(found: dict[str, float]) -> str:
    scale = 1e3 if found["measured"] < 100 else 1
    return f"{found['measured'] * scale:.1f} / {found['simulated'] * scale:.1f} ({found['error']:+.1%})"
