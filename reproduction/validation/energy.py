"""Joules per token and gaps between tokens of one H100: what ML.ENERGY measured beside a fit to five of its rows, and beside simulation.

    python -m reproduction.validation energy

The rows are of ML.ENERGY's benchmark, version 3 (Apache-2.0; ml-energy/leaderboard 0cd52da, public/data/models/*__lm-arena-chat.json): vLLM 0.11.1, 1,024 chats, of Llama with 256 requests and more each twice
(ml-energy/benchmark c1d6557, configs/vllm/lm-arena-chat), all queued. Power and tokens per second are measured from the first tokens of a whole batch until the queue is empty, gaps over the whole run, which ends with ever
fewer requests (mlenergy/benchmark/llm/benchmark.py there; ml-energy/data b37408f, mlenergy_data/records/runs.py). Lengths of outputs are drawn from its histograms. Those of prompts are in a data set that is not read here:
simulated are lognormal ones, whose two numbers were chosen by the gaps of the fitted rows. The power is fitted to the watts of the fitted rows, with the bytes and
operations of their simulated iterations, each 60 ms of which take the limit at most.

Simulated is `h100-vllm`, measured with vLLM 0.22.1, as far as its host has no part in it, and what the benchmark asks for beside it: a repetition penalty of 1.1, `top_p` 0.95, and of Qwen3-8B its own `top_k` 20, whose time was
measured by itself (`sampling`). One number more is fitted to the median gaps of the same five rows: the seconds per request of an iteration that all this lacks.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from tabulate import tabulate

from cbatch.results.utilisation import device_seconds, work_of
from cbatch.sim import Profile, load_profile
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.measured import Measured, MeasuredModel
from cbatch.sim.profile_file import profile_text
from experiments.api import simulate
from experiments.serve import Result
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_text
from reproduction import RESULTS
from reproduction.validation.power import Done, fit

PROMPT_MEAN, PROMPT_SIGMA, LONGEST_PROMPT = 300, 1.0, 7000
LAUNCH = 0.01
"""Most seconds of a launch of Llama's layers without a graph: 8 requests have graphs of up to 16 tokens, so that prompts run without, and a P99 of 10.9 ms. On the profile's host it takes 31 ms."""

GRAPHS = 512
"""Tokens of vLLM's largest graph."""

WIDTH = 81.88
"""Tokens of a bin of the histograms, which begin at 2 tokens and end at the limit, 4,096."""

OUTPUTS = {  # of all rows of a model
    "llama-3.1-8b": "2868 1433 1165 1231 1198 1217 1076 815 601 441 285 216 185 108 89 56 43 41 42 28 18 12 21 8 10 15 11 8 4 7 8 4 3 3 2 6 1 1 1 1 0 0 2 0 0 0 0 1 0 27",
    "qwen3-8b": "1826 904 662 582 456 482 477 560 516 480 431 405 344 315 286 253 187 160 121 128 121 86 69 50 38 40 42 34 28 12 12 13 18 8 11 4 7 4 6 8 4 3 2 2 0 1 1 1 0 40",
}


SAMPLED = {"llama-3.1-8b": "top-p", "qwen3-8b": "top-k, top-p"}


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


def sampling(model: str, folder: str = RESULTS) -> PiecewiseLinear:
    """Returns the seconds that vLLM 0.11.1 takes to choose the tokens of an iteration, against its requests (`bench sampling`).

    They were measured on an H200. An H100 computes as fast, but moves fewer bytes per second; what more than the fewest requests take is in proportion to that.
    """
    of_h100, of_h200 = (load_profile(name).ceilings.bandwidth_bytes_per_second for name in ("h100", "h200"))
    entries, parts = load_spec(model).vocab_size, (SAMPLED[model], "penalties 1024 1024")
    rows = json.loads((Path(folder) / "h200" / "sampling.json").read_text(encoding="utf-8"))["rows"]
    measured = {row["requests"]: sum(map(row["seconds"].get, parts)) for row in rows if row["vocabulary"] == entries}
    least = min(measured.values())
    return PiecewiseLinear.through((n, least + (time - least) * of_h200 / of_h100) for n, time in measured.items())


def engine(batch: int, seconds: float, model: str = "llama-3.1-8b") -> Profile:
    """Returns `h100-vllm` for a server of at most this many requests of a model, each of which adds seconds to an iteration.

    vLLM captures graphs of up to twice as many tokens. Where the profile's recordings have launches of their host in an iteration (beyond `GRAPHS`), products grow as in `h100` from one of its graphs to the next: vLLM does not
    pad there. Another model than Llama takes more by as much as in `h100`, for attention and launches in proportion to its layers.
    """
    profile, ours, name, spec = load_profile("h100-vllm"), load_profile("h100"), "llama-3.1-8b", load_spec(model)
    tables, llama, other = (
        of.models[key].tensor_parallel[1] for of, key in ((profile, name), (ours, name), (ours, model))
    )
    linear, alone, graphs = tables.linear, tables.without_prompts, tables.captured_graphs
    assert linear and alone and graphs and llama.captured_graphs and profile.host

    def more(tokens: float, *, mixed: bool) -> float:
        return _seconds(other, tokens, mixed=mixed) - _seconds(llama, tokens, mixed=mixed)

    known = [(size, time + more(size, mixed=True)) for size, time in zip(*linear, strict=True) if size <= GRAPHS]
    lack = known[-1][1] - _seconds(other, GRAPHS)
    sizes = (size for size in llama.captured_graphs.tokens if size > GRAPHS)
    mixed = PiecewiseLinear.through([*known, *((float(size), _seconds(other, size) + lack) for size in sizes)])
    decodes = [(size, time + more(size, mixed=False)) for size, time in zip(*alone.linear, strict=True)]
    head = PiecewiseLinear.through((n, time + n * seconds) for n, time in zip(*sampling(model), strict=True))
    captured, layers = tuple(size for size in graphs.tokens if size <= 2 * batch), spec.num_layers / 32
    tables = replace(
        tables.scaled(chunks=layers, decodes=layers, mixed_decodes=layers),
        linear=mixed,
        head=head,
        decode_only=replace(alone, linear=PiecewiseLinear.through(decodes), head=head),
        captured_graphs=replace(graphs, tokens=captured, fewest=(0,) * len(captured)),
    )
    host = {loop: replace(time, eager_seconds=LAUNCH * layers) for loop, time in profile.host.items()}
    measured = MeasuredModel(num_layers=spec.num_layers, shape=spec.shape, tensor_parallel={1: tables})
    return replace(profile, models={model: measured}, host=host)


def _seconds(tables: Measured, tokens: float, *, mixed: bool = True) -> float:
    """Returns the seconds of products, small operations and the head of an iteration, of as many decodes alone if there are such tables."""
    alone = tables.decode_only
    assert tables.linear and tables.other and tables.head and alone
    if mixed or tokens > alone.linear.sizes[-1]:
        return tables.linear.at(tokens) + tables.other.at(tokens) + tables.head.at(1 if mixed else tokens)
    return alone.linear.at(tokens) + alone.other.at(tokens) + alone.head.at(tokens)


def serve(batch: int, seconds: float = 0.0, model: str = "llama-3.1-8b") -> Result:
    """Returns the simulated run. seconds: of an iteration, per request, beside the tables' time."""
    number = 2048 if batch >= 256 and model == "llama-3.1-8b" else 1024
    with TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "profile.json", profile_text(engine(batch, seconds, model)))
        table = {"path": str(write_text(Path(folder) / "lengths.csv", lengths(model, number))), "format": "lengths"}
        table |= {"_target_": "experiments.workloads.TraceLengths", "order": "file", "too_long": "error"}
        keys: dict[str, Any] = {"hardware": str(path), "model": model, "batch": batch, "chunk": 8192}
        return simulate("vllm_v1", "queued", seeds=None, num_requests=number, lengths=table, max_tokens=8192, **keys)


def simulated(batch: int, seconds: float = 0.0, model: str = "llama-3.1-8b") -> tuple[float, ...]:
    """Returns `Row.figures`: gaps of all tokens, joules while the batch is full, and the watts then."""
    result = serve(batch, seconds, model)
    gaps = result.summary["tbt_seconds"]
    full = {"warmup_requests": max(batch // 16, 1), "drain_requests": batch}  # after the first prompts
    energy = replace(result, measures={**result.measures, **full}).summary["energy"]
    return *(1e3 * gaps[name] for name in ("p50", "p90", "p99")), energy["joules_per_token"], energy["watts"]


def metered(row: Row, seconds: float) -> Done:
    """Returns the simulated run of a row while its batch is full, with the measured power."""
    gathered, work = serve(row.batch, seconds).gathered, work_of(load_spec("llama-3.1-8b"))
    window = gathered.window(max(row.batch // 16, 1), row.batch)
    steps, ended = gathered.steps, gathered.steps["ended"]
    taken = device_seconds(steps, np.zeros(len(ended), np.int64))
    iterations = np.stack([taken, work.bytes(steps), work.flops(steps)], axis=1)
    return Done(
        iterations[(ended > window.start) & (ended <= window.end)], window.seconds, 0, row.watts * window.seconds
    )


def main() -> None:
    """Prints the fits, and each row measured and simulated."""
    known, table = load_profile("h100").watts, []
    assert known is not None
    tables_alone = {row: simulated(row.batch) for row in FITTED}
    seconds = per_request(FITTED, [tables_alone[row][0] for row in FITTED])
    print(f"{1e6 * seconds:.1f} us per request of an iteration, beside the tables")
    print(f"the power of these rows: {fit([metered(row, seconds) for row in FITTED], known.idle)}")
    for model, rows in (("llama-3.1-8b", ROWS), ("qwen3-8b", QWEN)):
        for row in rows:
            found = zip(simulated(row.batch, seconds, model), (*row.figures, row.watts), strict=True)
            shown = [f"{ours / measured - 1:+.1%}" for ours, measured in found]
            table.append([model, row.batch, row.watts, row.figures[-1], *shown])
            print(*table[-1], flush=True)
    heads = ["requests", "W", "J per token", "median gap", "P90", "P99", "J, simulated", "W, simulated"]
    print(tabulate(table, ["model", *heads], floatfmt=".4g"))
