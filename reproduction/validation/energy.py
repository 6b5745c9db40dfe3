"""Joules per token and gaps between tokens of one H100: what ML.ENERGY measured beside a fit to five of its rows, and beside simulation.

    python -m reproduction.validation energy

The rows are of ML.ENERGY's benchmark, version 3 (Apache-2.0; ml-energy/leaderboard 0cd52da, public/data/models/*__lm-arena-chat.json): vLLM 0.11.1,
1,024 chats, or 2,048 from 256 requests on, all queued. Power and tokens per second are measured from the first tokens of a whole batch until the queue is empty, gaps over the whole run, which ends with ever fewer requests
(ml-energy/benchmark, mlenergy/benchmark/llm/benchmark.py; ml-energy/data b37408f, mlenergy_data/records/runs.py). Lengths of outputs are drawn from its histograms. Those of prompts are in a data set that is not read here: simulated are lognormal
ones, whose two numbers were chosen by the gaps of the fitted rows. The power is fitted with prompts of 100 tokens, which changes the joules per
operation (26% more with 25 tokens) but no predicted watt. Bytes and operations per second follow from the measured tokens per second, so that its error is of the power alone.

Simulated is `h100-vllm`, measured with vLLM 0.22.1, as far as its host has no part in it (`engine`). One number more is fitted to the median gaps of the same five rows: the seconds per request of
an iteration that the tables lack.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch.results.utilisation import work_of
from cbatch.sim import Profile, load_profile
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.profile_file import profile_text
from experiments.api import simulate
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_text

PROMPT, OUTPUT = 100, 395
PROMPT_MEAN, PROMPT_SIGMA, LONGEST_PROMPT = 200, 1.25, 7000
LAUNCH = 0.01
"""Most seconds of a launch without a graph: 8 requests have graphs of up to 16 tokens, so that prompts run without, and a P99 of 10.9 ms. On the profile's host it takes 31 ms."""

GRAPHS = 512
"""Tokens of vLLM's largest graph."""

WIDTH = 81.88
"""Tokens of a bin of the histograms, which begin at 2 tokens and end at the limit, 4,096."""

OUTPUTS = {  # of all rows of a model
    "llama-3.1-8b": "2868 1433 1165 1231 1198 1217 1076 815 601 441 285 216 185 108 89 56 43 41 42 28 18 12 21 8 10 15 11 8 4 7 8 4 3 3 2 6 1 1 1 1 0 0 2 0 0 0 0 1 0 27",
    "qwen3-8b": "1826 904 662 582 456 482 477 560 516 480 431 405 344 315 286 253 187 160 121 128 121 86 69 50 38 40 42 34 28 12 12 13 18 8 11 4 7 4 6 8 4 3 2 2 0 1 1 1 0 40",
}


class Row(NamedTuple):
    """max_num_seqs, watts, output tokens per second, and the median, P90 and P99 of the time between tokens in ms."""

    batch: int
    watts: float
    tokens_per_second: float
    gap: float
    p90: float
    p99: float

    @property
    def figures(self) -> tuple[float, ...]:
        """Returns the gaps, and the joules per token."""
        return self.gap, self.p90, self.p99, self.watts / self.tokens_per_second


ROWS = (
    Row(8, 486.4, 1069.6, 7.32, 7.70, 10.87),
    Row(16, 513.3, 1953.6, 7.91, 8.58, 13.29),
    Row(32, 559.7, 3391.1, 8.91, 10.38, 18.42),
    Row(64, 610.3, 5147.2, 11.50, 13.18, 25.68),
    Row(96, 644.0, 6260.1, 14.08, 16.68, 35.40),
    Row(128, 669.2, 7036.5, 16.48, 20.04, 46.43),
    Row(192, 688.3, 8223.3, 20.91, 26.96, 59.02),
    Row(256, 690.5, 9009.6, 26.13, 32.54, 59.66),
    Row(384, 686.5, 9248.0, 37.70, 47.82, 96.15),
    Row(512, 688.3, 9805.6, 47.41, 59.07, 106.79),
)
FITTED = ROWS[:5]
QWEN = (
    Row(8, 427.0, 961.7, 8.20, 8.68, 13.15),
    Row(16, 451.3, 1744.9, 8.90, 9.84, 15.23),
    Row(32, 478.1, 2927.9, 10.57, 11.78, 17.42),
    Row(64, 514.4, 4314.7, 13.95, 16.53, 26.65),
    Row(96, 543.8, 5254.7, 17.80, 20.22, 32.36),
    Row(128, 573.0, 5930.3, 20.70, 23.54, 40.74),
    Row(192, 600.2, 6932.1, 26.35, 30.83, 56.26),
    Row(256, 632.8, 7718.8, 31.36, 36.36, 72.22),
    Row(384, 621.7, 8257.5, 42.68, 50.74, 89.23),
    Row(512, 615.6, 8534.6, 47.16, 63.72, 141.98),
)
"""Rows of Qwen3-8B."""


def rates(row: Row) -> tuple[float, float, float]:
    """Returns 1, and the bytes and operations per second of a row, whose batch is taken to be full."""
    work, tokens = work_of(load_spec("llama-3.1-8b")), row.tokens_per_second
    iterations, prompts, context = tokens / row.batch, tokens * PROMPT / OUTPUT, PROMPT + OUTPUT / 2
    moved = iterations * work.bytes_per_iteration + (tokens * (context + 1) + prompts) * work.bytes_per_token
    scores = tokens * context + prompts * PROMPT / 2
    flops = (tokens + prompts) * work.flops_per_token + tokens * work.flops_per_output + scores * work.flops_per_score
    return 1.0, moved, flops


def fit(rows: tuple[Row, ...]) -> NDArray[np.float64]:
    """Returns the busy watts and the joules per byte and per operation, by least squares."""
    scale = np.array([1.0, 1e12, 1e14])
    found, *_ = np.linalg.lstsq(np.array([rates(row) for row in rows]) / scale, [row.watts for row in rows])
    return np.asarray(found / scale)


def per_request(rows: tuple[Row, ...], gaps: Sequence[float]) -> float:
    """Returns the seconds per request of an iteration that simulated gaps, in ms, lack, by least squares of relative errors."""
    batch, measured, simulated = np.array([(row.batch, row.gap, gap) for row, gap in zip(rows, gaps, strict=True)]).T
    slope, lack = batch / measured, (measured - simulated) / measured
    return float(1e-3 * (slope @ lack) / (slope @ slope))


def lengths(model: str, number: int) -> str:
    """Returns a table of the tokens of prompts and outputs, as `workload.lengths.format=lengths` reads it."""
    drawn, counts = np.random.default_rng(0), np.array(OUTPUTS[model].split(), float)
    outputs = 2 + WIDTH * (drawn.choice(len(counts), number, p=counts / counts.sum()) + drawn.random(number))
    prompts = drawn.lognormal(np.log(PROMPT_MEAN) - PROMPT_SIGMA**2 / 2, PROMPT_SIGMA, number).clip(8, LONGEST_PROMPT)
    rows = zip(prompts.round().astype(int), outputs.round().astype(int), strict=True)
    return "\n".join(["num_prefill_tokens,num_decode_tokens", *(f"{prompt},{output}" for prompt, output in rows)])


def engine(batch: int, seconds: float) -> Profile:
    """Returns `h100-vllm` for a server of at most this many requests, each of which adds seconds to an iteration.

    vLLM captures graphs of up to twice as many tokens. Where the profile's recordings have launches of their host in an iteration (beyond `GRAPHS`), products grow as in `h100`, which has graphs
    there.
    """
    profile, name = load_profile("h100-vllm"), "llama-3.1-8b"
    tables, ours = (each.models[name].tensor_parallel[1] for each in (profile, load_profile("h100")))
    linear, alone, graphs = tables.linear, tables.decode_only, tables.captured_graphs
    assert linear and alone and graphs and ours.linear and ours.other and profile.host
    known = [point for point in zip(*linear, strict=True) if point[0] <= GRAPHS]
    larger = [(size, ours.linear.at(size) + ours.other.at(size)) for size in ours.linear.sizes if size > GRAPHS]
    lack = linear.at(GRAPHS) - ours.linear.at(GRAPHS) - ours.other.at(GRAPHS)
    linear = PiecewiseLinear.through([*known, *((size, time + lack) for size, time in larger)])
    head = PiecewiseLinear((1.0, 512.0), (seconds, 512 * seconds))
    captured = tuple(size for size in graphs.tokens if size <= 2 * batch)
    tables = replace(
        tables,
        linear=linear,
        head=head,
        decode_only=replace(alone, head=head),
        captured_graphs=replace(graphs, tokens=captured, fewest=(0,) * len(captured)),
    )
    host = {loop: replace(time, eager_seconds=LAUNCH) for loop, time in profile.host.items()}
    model = replace(profile.models[name], tensor_parallel={1: tables})
    return replace(profile, models={name: model}, host=host)


def simulated(batch: int, seconds: float = 0.0, model: str = "llama-3.1-8b") -> tuple[float, ...]:
    """Returns `Row.figures`: gaps of all tokens, and joules while the batch is full. seconds: of an iteration, per request, beside the tables' time."""
    number = 1024 if batch < 256 else 2048
    with TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "profile.json", profile_text(engine(batch, seconds)))
        table = {"path": str(write_text(Path(folder) / "lengths.csv", lengths(model, number))), "format": "lengths"}
        table |= {"_target_": "experiments.workloads.TraceLengths", "order": "file", "too_long": "error"}
        keys = {"hardware": str(path), "model": model, "batch": batch, "chunk": 8192, "max_tokens": 8192}
        asked: dict[str, Any] = {"num_requests": number, "lengths": table, **keys}
        window = {"warmup_requests": max(batch // 16, 1), "drain_requests": batch}  # after the first prompts
        gaps = simulate("vllm_v1", "queued", seeds=None, **asked).summary["tbt_seconds"]
        energy = simulate("vllm_v1", "queued", seeds=None, metrics=window, **asked).summary["energy"]
    return *(1e3 * gaps[name] for name in ("p50", "p90", "p99")), energy["joules_per_token"]


def main() -> None:
    """Prints the fits, and each row measured, predicted and simulated."""
    found, limit, table = fit(FITTED), load_profile("h100").watts, []
    assert limit is not None
    print(
        f"busy {found[0]:.1f} W, {found[1]:.4g} J per byte, {found[2]:.4g} J per operation, at most {limit.limit:g} W"
    )
    tables_alone = {row: simulated(row.batch) for row in FITTED}
    seconds = per_request(FITTED, [tables_alone[row][0] for row in FITTED])
    print(f"{1e6 * seconds:.1f} us per request of an iteration, beside the tables")
    for model, rows in (("llama-3.1-8b", ROWS), ("qwen3-8b", QWEN)):
        for row in rows:
            watts = min(float(np.array(rates(row)) @ found), limit.limit)
            figures = simulated(row.batch, seconds, model)
            errors = [watts / row.watts - 1] if rows is ROWS else []
            errors += [ours / measured - 1 for ours, measured in zip(figures, row.figures, strict=True)]
            shown = [f"{error:+.1%}" for error in errors]
            table.append([model, row.batch, row.watts, row.figures[-1], *[""] * (5 - len(shown)), *shown])
            print(*table[-1], flush=True)
    heads = ["requests", "W", "J per token", "W, at measured speed", "median gap", "P90", "P99", "J, simulated"]
    print(tabulate(table, ["model", *heads], floatfmt=".4g"))
