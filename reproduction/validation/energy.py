"""Joules per token of one H100: what ML.ENERGY measured beside a fit of its power to five of its rows.

    python -m reproduction.validation energy

The rows are of ML.ENERGY's benchmark, version 3 (Apache-2.0): Llama-3.1-8B, vLLM 0.11.1, 1,024 chats, 395 output tokens on average. The lengths of prompts
are in a data set that is not read here: 100 tokens are assumed, which changes the joules per operation (26% more with 25 tokens) but no predicted watt.
Bytes and operations per second follow from the measured tokens per second, so that the error is of the power alone.

The last columns are simulated with `h100-vllm`, fitted to vLLM 0.22.1, and equal lengths: nothing is fitted to these rows but the watts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from cbatch.results.utilisation import work_of
from cbatch.sim import load_profile
from experiments.api import simulate
from experiments.settings.presets import load_spec

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


def main(requests: int = 512) -> None:
    """Prints the fit, and each row measured, predicted and simulated."""
    found, limit, table = fit(FITTED), load_profile("h100").watts, []
    assert limit is not None
    print(
        f"busy {found[0]:.1f} W, {found[1]:.4g} J per byte, {found[2]:.4g} J per operation, at most {limit.limit:g} W"
    )
    for row in ROWS:
        measured = row.watts / row.tokens_per_second
        watts = min(float(np.array(rates(row)) @ found), limit.limit)
        lengths = {"length": PROMPT + OUTPUT, "pd_ratio": PROMPT / OUTPUT, "requests": requests}
        keys = {"hardware": "h100-vllm", "batch": row.batch, "chunk": 8192, "max_tokens": 8192}
        summary = simulate("vllm_v1", "closed", seeds=None, output=None, **lengths, **keys).summary
        gap, joules = summary["tbt_seconds"]["p50"], summary["energy"]["joules_per_token"]
        errors = (watts / row.watts - 1, 1e3 * gap / row.gap - 1, joules / measured - 1)
        table.append(
            (row.batch, row.watts, measured, "fitted" if row in FITTED else "", *(f"{e:+.1%}" for e in errors))
        )
    heads = [
        "requests",
        "W",
        "J per token",
        "",
        "J per token, at measured speed",
        "simulated: median gap",
        "J per token",
    ]
    print(tabulate(table, heads, floatfmt=".4g"))
