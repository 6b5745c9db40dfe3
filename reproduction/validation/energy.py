"""Joules per token of one H100: what ML.ENERGY measured beside a fit of its power to five of its rows, and beside simulation.

    python -m reproduction.validation energy

The rows are of ML.ENERGY's benchmark, version 3 (Apache-2.0): vLLM 0.11.1, 1,024 chats, 395 output tokens of Llama-3.1-8B on average. The lengths of
prompts are in a data set that is not read here: 100 tokens are assumed, which changes the joules per operation (26% more with 25 tokens) but no predicted
watt. Bytes and operations per second follow from the measured tokens per second, so that the error is of the power alone.

Simulated is `h100-vllm`, measured with vLLM 0.22.1, with equal lengths. One number is fitted to the median gaps of the same five rows: the seconds
per request of an iteration that the tables lack.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch.results.utilisation import work_of
from cbatch.sim import load_profile
from cbatch.sim.profile_file import make_profile, profile_content, profile_text
from experiments.api import simulate
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_text

PROMPT, OUTPUT = 100, 395


class Row(NamedTuple):
    """max_num_seqs, watts, output tokens per second, and the median time between tokens in ms."""

    batch: int
    watts: float
    tokens_per_second: float
    gap: float


ROWS = (
    Row(8, 486.4, 1069.6, 7.32),
    Row(16, 513.3, 1953.6, 7.91),
    Row(32, 559.7, 3391.1, 8.91),
    Row(64, 610.3, 5147.2, 11.50),
    Row(96, 644.0, 6260.1, 14.08),
    Row(128, 669.2, 7036.5, 16.48),
    Row(192, 688.3, 8223.3, 20.91),
    Row(256, 690.5, 9009.6, 26.13),
    Row(384, 686.5, 9248.0, 37.70),
    Row(512, 688.3, 9805.6, 47.41),
)
FITTED = ROWS[:5]
QWEN = {8: 0.444, 64: 0.1192, 256: 0.082}
"""Joules per token of Qwen3-8B by max_num_seqs; its lengths of outputs are unknown, and taken to be the same."""


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


def simulated(batch: int, seconds: float = 0.0, model: str = "llama-3.1-8b") -> tuple[float, float]:
    """Returns the median gap in ms, and the joules per token. seconds: of an iteration, per request, beside the tables' time."""
    content = profile_content(load_profile("h100-vllm"))
    tables = content["models"]["llama-3.1-8b"]["tensor_parallel"]["1"]
    for part in (tables, tables["decode_only"]):
        part["head"] = {"requests": [1, 512], "seconds": [seconds, 512 * seconds]}
    lengths = {"length": PROMPT + OUTPUT, "pd_ratio": PROMPT / OUTPUT, "requests": max(2 * batch, 64)}
    with TemporaryDirectory() as folder:
        path = write_text(Path(folder) / "profile.json", profile_text(make_profile(content)))
        keys = {"hardware": str(path), "model": model, "batch": batch, "chunk": 8192, "max_tokens": 8192}
        summary = simulate("vllm_v1", "closed", seeds=None, output=None, **lengths, **keys).summary
    return 1e3 * summary["tbt_seconds"]["p50"], summary["energy"]["joules_per_token"]


def main() -> None:
    """Prints the fits, and each row measured, predicted and simulated."""
    found, limit, table = fit(FITTED), load_profile("h100").watts, []
    assert limit is not None
    print(
        f"busy {found[0]:.1f} W, {found[1]:.4g} J per byte, {found[2]:.4g} J per operation, at most {limit.limit:g} W"
    )
    tables_alone = {row: simulated(row.batch) for row in ROWS}
    seconds = per_request(FITTED, [tables_alone[row][0] for row in FITTED])
    print(f"{1e6 * seconds:.1f} us per request of an iteration, beside the tables")
    for row in ROWS:
        measured = row.watts / row.tokens_per_second
        watts = min(float(np.array(rates(row)) @ found), limit.limit)
        errors = [watts / row.watts - 1]
        for gap, joules in (tables_alone[row], simulated(row.batch, seconds)):
            errors += [gap / row.gap - 1, joules / measured - 1]
        table.append(
            (row.batch, row.watts, measured, "fitted" if row in FITTED else "", *(f"{e:+.1%}" for e in errors))
        )
    heads = ["requests", "W", "J per token", "", "J, at measured speed", *["median gap, tables alone", "J"]]
    for batch, measured in QWEN.items():
        both = (simulated(batch, added, "qwen3-8b")[1] / measured - 1 for added in (0.0, seconds))
        alone, added = (f"{error:+.1%}" for error in both)
        table.append((f"Qwen3-8B, {batch}", "", measured, "", "", "", alone, "", added))
    print(tabulate(table, [*heads, "median gap, with time per request", "J"], floatfmt=".4g"))
