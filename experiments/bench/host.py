"""Host time of one iteration: plan, validate, pack the inputs, launch, absorb the tokens. Computing is left out.

Engine, policy, KV accounting and packing are real; the executor packs each step into its slot and returns a fixed token
at once. For comparison, on the same kind of machine: nano-vllm 0.15 ms at 32 running requests and 0.87 ms at 256,
transformers' asynchronous continuous batching 1.9 and 6.6 ms.
"""

import time

import numpy as np

from cbatch import Executor, KVSize, Limits, Request, Server, Step, StepResult
from cbatch.cost import NO_COST
from cbatch.runtime.batch import Shape, host_views, pack
from experiments.bench.plans import measure
from experiments.settings.this_machine import cpu_name
from experiments.store.benchmark_file import spread, write
from policies.chunking import TileAligned
from policies.sarathi_serve import SarathiServe

PROMPT, LONGEST, BLOCK = 64, 4096, 16
WARM_UP, REPEATS, ITERATIONS = 50, 7, 200


class PackOnly(Executor):
    """Packs each step as a real executor does, then returns token 1 for every request."""

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


def main(folder: str = "results") -> None:
    """Measures, prints and writes host.json."""
    cases = [(32, 0), (128, 0), (256, 0), (256, 100_000)]
    figures = {
        f"running {running}, waiting {waiting}": spread([_once(running, waiting) for _ in range(REPEATS)])
        for running, waiting in cases
    }
    # both in one loop, so that the machine's speed cancels out
    ratios = [_once(256, 100_000) / _once(256, 0) for _ in range(REPEATS)]
    print(f"host time of one decode iteration on {cpu_name()}")
    for case, values in figures.items():
        print(f"  {case:28} {values['median']:.3f} ms   ({values['min']:.3f} to {values['max']:.3f})")
    print(f"  100,000 waiting over none      {spread(ratios)['median']:.3f}")
    content = {"unit": "ms per iteration", "figures": figures, "queue_ratio": spread(ratios), "plans": measure()}
    print(f"written: {write('host', cpu_name(), content, folder)}")


def _once(running: int, waiting: int) -> float:
    """Returns mean milliseconds per iteration with all `running` requests decoding and `waiting` more in the queue."""
    limits = Limits(running, LONGEST, LONGEST, graph_sizes=())
    server = Server(PackOnly(running), limits, NO_COST, KVSize(running * LONGEST // BLOCK, BLOCK))
    prompt = [1] * PROMPT
    requests = (Request(index, PROMPT, 2000, prompt=prompt) for index in range(running + waiting))
    engine = server.engine(SarathiServe(TileAligned(1024)), requests)
    while len(engine.view.decoding) < running:
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    begin = time.perf_counter()
    for _ in range(ITERATIONS):
        engine.step()
    return (time.perf_counter() - begin) / ITERATIONS * 1e3
