"""vLLM by its own rule and under policies, alternating on one engine: throughput and time per iteration."""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cbatch import ModelSpec, Request
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.setup.servers import equal_requests
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.bench.in_vllm.model import BATCH, BUDGET, LONGEST, SAME_RULE, VLLM, write_model
from reproduction.bench.peers.cases import Case
from reproduction.bench.peers.measure import graphics_card, serve
from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine


def main(
    policies: str = SAME_RULE,
    model: str = "llama-3.1-8b",
    repeats: Count = 2,
    requests: Count = 256,
    record: str = "",
    name: str = "vllm",
    folder: str = RESULTS,
) -> None:
    """Measures and prints; writes NAME.json after each round.

    `policies` are overrides as in the CBATCH variable, several separated by ";". In each round vLLM's own rule and every policy
    serve the same three pieces of work: 32 and 256 equal requests of 256 prompt tokens, and mixed requests, all queued at once. `record` is a folder for
    recordings of iterations of every size, for `reproduction.profiles recordings=`.
    """
    os.environ |= ENVIRONMENT
    spec, sides = load_spec(model), [VLLM, *policies.split(";")]
    hardware, driver = graphics_card()
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    stamped = {"model": spec.name, "batch": BATCH, "budget": BUDGET, "requests": requests, "driver": driver}
    stamped["engine"] = {"name": "vLLM", "version": metadata.version("vllm"), "environment": ENVIRONMENT}
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        engine = stack.enter_context(closing(TurnsEngine(spec, Path(temporary))))
        works = _works(spec, requests)
        for side in sides:
            engine.serve_by(side, works["32 decodes"])  # warms up
        for number, (side, asked) in enumerate(_coverage(spec) if record else ()):
            engine.serve_by(f"{side} vllm.record={Path(record).resolve() / str(number)}", asked)
        for _ in range(repeats):
            for side in sides:
                engine.serve_by(side, equal_requests(1, 16, 2, spec.vocab_size))  # the scheduler takes up the policy
                for work, asked in works.items():
                    seconds, tokens = engine.serve_by(side, asked), sum(request.max_tokens for request in asked)
                    figure = tokens / seconds if work == "mixed" else seconds / asked[0].max_new_tokens * 1e3
                    figures[side][work].append(figure)
                    print(f"{side:40} {work:14} {figures[side][work][-1]:10.3f}", flush=True)
            found = {side: {work: spread(values) for work, values in by.items()} for side, by in figures.items()}
            results = {**stamped, "settings": engine.settings, "figures": found}
            written = write_benchmark(name, hardware, results, folder, BENCH)
        for side, by in found.items():
            medians = {work: (values["median"], found[VLLM][work]["median"]) for work, values in by.items()}
            ratios = [f"{work} {median:.3f} ({median / own:.4f})" for work, (median, own) in medians.items()]
            print(f"{side}: {', '.join(ratios)}")
    print(f"written: {written}")


class TurnsEngine(VllmEngine):
    """vLLM with the scheduler that takes turns."""

    def __init__(self, spec: ModelSpec, folder: Path) -> None:
        write_model(spec, folder)
        case = Case("trace", spec.name, BATCH, BUDGET)
        super().__init__(folder, case, LONGEST, scheduler_cls="reproduction.bench.in_vllm.turns.TurnsScheduler")

    def serve_by(self, side: str, requests: list[Request]) -> float:
        """Returns the seconds in which they were served."""
        self.sampling = {"extra_args": {"cbatch": side}}
        return serve(self, requests)


def _works(spec: ModelSpec, number: int) -> dict[str, list[Request]]:
    """The mixed requests' lengths are uniform from a fifth to nine fifths of 1,024 and 200 tokens."""
    generator = np.random.default_rng(0)
    prompts, outputs = (generator.integers(mean // 5, mean * 9 // 5, number).tolist() for mean in (1024, 200))
    ids = [generator.integers(0, spec.vocab_size, prompt).tolist() for prompt in prompts]
    mixed = [Request(id_, prompts[id_], outputs[id_], prompt=ids[id_]) for id_ in range(number)]
    return {
        "32 decodes": equal_requests(32, 256, 256, spec.vocab_size),
        "256 decodes": equal_requests(256, 256, 256, spec.vocab_size),
        "mixed": mixed,
    }


def _coverage(spec: ModelSpec) -> Iterator[tuple[str, list[Request]]]:
    """Yields sides and requests: 256 decodes and ever fewer, of short and long contexts; prompts in chunks of several sizes."""
    for prompt in (64, 512):
        equal = equal_requests(BATCH, prompt, 1, spec.vocab_size)
        yield SAME_RULE, [Request(each.id, prompt, 2 * (each.id + 1), prompt=each.prompt) for each in equal]
    for chunk in (64, 128, 256, 384, 512, 768, 1024, 1536):
        number = max(4, 24 * chunk // 1024)
        yield f"policy=sarathi_serve chunk={chunk} batch=48", equal_requests(number, 1024, 48, spec.vocab_size)
