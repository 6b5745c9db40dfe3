"""Serves the work of our benchmarks on another engine, several times, and writes what it took.

    python -m reproduction.bench peers engine=vllm cases='trace-256;decode' path=TRACE

Runs in the engine's own environment, which needs this project's requirements beside it, on a machine with a GPU. nano-vllm has no
script: its package could not be installed beside the others on the machine of the measurements.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

from cbatch import CbatchError, ModelSpec, Request
from experiments.bench import shortened
from experiments.settings.command_line import Count
from experiments.settings.presets import load_spec
from experiments.store.provenance import spread, write_benchmark
from reproduction import BENCH, RESULTS
from reproduction.bench.peers.cases import CASES, UNITS, Case, requests_of, speed
from reproduction.bench.peers.transformers_engine import TransformersEngine
from reproduction.bench.peers.vllm_engine import VllmEngine
from reproduction.selection import beginning_with

WARM_UP_REQUESTS = 32


class Engine(Protocol):
    """Another engine, built from a checkpoint folder (config.json alone), a case, and the longest request's tokens."""

    label: str
    """Its name in tables, before its version."""
    environment: Mapping[str, str]
    """Variables to set before the engine and `transformers` are imported."""

    def __init__(self, checkpoint: Path, case: Case, longest: int) -> None: ...

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, for the results file; of `async_scheduling` and `variant` its name in tables depends."""

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Submits all requests at once, greedy and without end-of-sequence token.

        Returns:
            Seconds from the first submission to the last token, and the output tokens of each request.
        """

    def close(self) -> None:
        """Frees the GPU's memory."""


PEERS: dict[str, type[Engine]] = {"vllm": VllmEngine, "transformers": TransformersEngine}
"""By the names of their packages."""


def main(
    engine: Literal["vllm", "transformers"], cases: str = "", path: str = "", repeats: Count = 3, folder: str = RESULTS
) -> None:
    """Measures and prints; writes peers/ENGINE-CASE.json after each case.

    cases: beginnings of names, separated by ";". path: of the trace.
    """
    for name in beginning_with("cases", cases, CASES):
        print(f"written: {measure(engine, name, path, repeats, folder)}", flush=True)


def measure(package: str, name: str, path: str, repeats: int, folder: str) -> Path:
    """Measures one case, prints its figures and writes them; returns the file's path."""
    peer, case = PEERS[package], CASES[name]
    os.environ.update(peer.environment)
    spec = load_spec(case.model)
    requests = requests_of(case, spec, path)
    hardware, driver = graphics_card()
    start_seconds, seconds, settings = run(peer, case, spec, requests, repeats)
    values = spread([speed(case, requests, taken) for taken in seconds])
    version = metadata.version(package)
    loop = "async" if settings["async_scheduling"] else "sync"
    row = f"{peer.label} {version}{settings.get('variant', '')}{case.row(loop)}"
    print(f"{row}: {UNITS[case.work]} {values['median']:.6g} ({values['min']:.6g} to {values['max']:.6g})", flush=True)
    found = {
        "case": name,
        "section": [case.work, *([f"{case.new} new"] if case.work == "decode" else [])],
        "row": row,
        "unit": UNITS[case.work],
        "driver": driver,
        "engine": {"name": peer.label, "version": version, "environment": peer.environment, **settings},
        **case._asdict(),
        "requests": len(requests),
        "prompt_tokens": sum(request.num_prompt_tokens for request in requests),
        "output_tokens": sum(request.max_new_tokens for request in requests),
        "start_seconds": start_seconds,
        "figures": {"value": values, "seconds": spread(seconds)},
    }
    return write_benchmark(f"peers/{package}-{name}", hardware, found, folder, BENCH)


def run(
    peer: type[Engine], case: Case, spec: ModelSpec, requests: Sequence[Request], repeats: int
) -> tuple[float, list[float], dict[str, Any]]:
    """Starts the engine, warms it up, serves the requests; returns seconds of the start and of each run, and its settings."""
    with TemporaryDirectory() as checkpoint:
        write_checkpoint(spec, Path(checkpoint))
        began = time.perf_counter()
        engine = peer(Path(checkpoint), case, max(request.max_tokens for request in requests))
        start_seconds = time.perf_counter() - began
        try:
            serve(engine, shortened(requests, min(case.batch, WARM_UP_REQUESTS)))
            return start_seconds, [serve(engine, requests) for _ in range(repeats)], engine.settings
        finally:
            engine.close()


def serve(engine: Engine, requests: Sequence[Request]) -> float:
    """Returns the seconds for all requests.

    Raises:
        CbatchError: a request did not get its tokens, so that the engine did other work than ours.
    """
    seconds, generated = engine.serve(requests)
    asked = [request.max_new_tokens for request in requests]
    if generated != asked:
        wrong = sum(got != wanted for got, wanted in zip(generated, asked, strict=False))
        served = len(generated)
        raise CbatchError(f"{wrong} of {len(asked)} requests, {served} of them served, got too few or many tokens")
    return seconds


def write_checkpoint(spec: ModelSpec, folder: Path) -> None:
    """Writes a checkpoint without weights: config.json with the shape that our random weights have."""
    from cbatch.runtime.weights import transformers_config  # imports transformers, which reads its environment then

    config = transformers_config(spec)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = spec.dtype
    config.save_pretrained(folder)


def graphics_card() -> tuple[str, str]:
    """Returns name and driver version of the first GPU, as another process reads them: this one must not start CUDA before it forks."""
    if shutil.which("nvidia-smi") is None:
        raise CbatchError("peers: nvidia-smi is not there; measure on a machine with an NVIDIA GPU")
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, driver = cards.splitlines()[0].split(", ")
    return name, driver
