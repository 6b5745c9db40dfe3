"""Host time of one iteration: plan, validate, pack the inputs, launch, take the tokens in. Computing is left out.

The engine, policy, KV accounting and packing are the real ones; the executor packs each step into its slot and answers
with a fixed token at once. For comparison, measured by others' engines on the same kind of machine: nano-vllm 0.15 ms at
32 running requests and 0.87 ms at 256, transformers' asynchronous continuous batching 1.9 and 6.6 ms.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from cbatch import BatchShape, Engine, Limits, Request, Step, StepResult
from cbatch.runtime.batch import Shape, host_views, pack
from experiments.store.benchmark_file import cpu_name, spread, write
from policies.chunking import TileAligned
from policies.sarathi_serve import SarathiServe

PROMPT, LONGEST, BLOCK = 64, 4096, 16
WARM_UP, REPEATS, ITERATIONS = 50, 7, 200


class NothingCosts:
    def predict(self, shape: BatchShape) -> float:
        return 1e-3


class PackOnly:
    """Packs each step as a real executor does, then says that token 1 was sampled everywhere."""

    num_stages = 1
    needs_tokens = True

    def __init__(self, num_rows: int) -> None:
        self.buffer = np.zeros(Shape(LONGEST, num_rows, LONGEST // BLOCK).size, np.int32)
        self.tokens = np.ones(num_rows, np.int32)

    def launch(self, step: Step) -> Step:
        shape = Shape(step.pad_to, len(step.rows), LONGEST // BLOCK)
        pack(step, shape, host_views(self.buffer, shape))
        return step

    def wait(self, in_flight: Step) -> StepResult:
        return StepResult(self.tokens[: len(in_flight.rows)], 0.0, 0.0)

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, time: float) -> None:
        """Never idle here."""

    def close(self) -> None:
        """Nothing to give back."""


def main(folder: str = "results") -> None:
    """Measure, print and write host.json."""
    cases = [(32, 0), (128, 0), (256, 0), (256, 100_000)]
    figures = {f"running {running}, waiting {waiting}": milliseconds(running, waiting) for running, waiting in cases}
    # the effect of the queue in one loop, so that the machine's speed cancels out
    ratios = [_once(256, 100_000) / _once(256, 0) for _ in range(REPEATS)]
    print(f"host time of one decode iteration on {cpu_name()}")
    for case, values in figures.items():
        print(f"  {case:28} {values['median']:.3f} ms   ({values['min']:.3f} to {values['max']:.3f})")
    print(f"  100,000 waiting over none      {spread(ratios)['median']:.3f}")
    path = write(
        "host",
        cpu_name(),
        {"unit": "ms per iteration", "figures": figures, "queue_ratio": spread(ratios)},
        Path(folder),
    )
    print(f"written: {path}")


def milliseconds(running: int, waiting: int) -> dict[str, float]:
    return spread([_once(running, waiting) for _ in range(REPEATS)])


def _once(running: int, waiting: int) -> float:
    """Mean milliseconds of an iteration with all `running` requests decoding and `waiting` more in the queue."""
    limits = Limits(running, LONGEST, LONGEST, graph_sizes=())
    engine = Engine(
        SarathiServe(TileAligned(1024)),
        PackOnly(running),
        limits,
        NothingCosts(),
        num_blocks=running * LONGEST // BLOCK,
        block_size=BLOCK,
    )
    prompt = [1] * PROMPT
    engine.submit(Request(index, PROMPT, 2000, prompt=prompt) for index in range(running + waiting))
    while len(engine.view.decoding) < running:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        engine.step()
    return (time.perf_counter() - begin) / ITERATIONS * 1e3
