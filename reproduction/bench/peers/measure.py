"""Serves a case on another engine, several times, and writes what it took."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

from cbatch import CbatchError, ModelSpec, Request
from experiments.settings.presets import load_spec
from experiments.store.benchmark_file import spread
from reproduction.bench.peers.cases import CASES, WORKS, Case, requests_of, speed
from reproduction.stored import write

WARM_UP_REQUESTS = 32
WARM_UP_TOKENS = 16


class Engine(Protocol):
    """Another engine with a model in place."""

    @property
    def settings(self) -> dict[str, Any]:
        """What it was built with, for the results file; of `async_scheduling` and `variant` its name in tables depends."""

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]:
        """Submit all requests at once, greedy and without end-of-sequence token.

        Returns:
            Seconds from the first submission to the last token, and the output tokens of each request.
        """

    def close(self) -> None:
        """Free the GPU's memory."""


class Peer(NamedTuple):
    """An engine to measure.

    package: installed under this name.
    label: its name in tables, before its version.
    start: builds it from a checkpoint folder (config.json alone), a case, and the longest request's tokens.
    environment: variables to set before it and `transformers` are imported.
    """

    package: str
    label: str
    start: Callable[[Path, Case, int], Engine]
    environment: Mapping[str, str]


def measure(name: str, peer: Peer, *, path: str, repeats: int, folder: Path) -> Path:
    """Measure the case `name`, print its figures and write them to `folder`/<card>/peers; returns the file's path.

    path: of the trace.
    """
    os.environ.update(peer.environment)
    case = CASES[name]
    spec, work, fields = load_spec(case.model), WORKS[case.work], case._asdict()
    requests = requests_of(case, spec, path)
    hardware, driver = graphics_card()
    start_seconds, seconds, settings = run(peer, case, spec, requests, repeats)
    values = spread([speed(case, requests, taken) for taken in seconds])
    version = metadata.version(peer.package)
    loop = "async" if settings["async_scheduling"] else "sync"
    row = f"{peer.label} {version}{settings.get('variant', '')}{work.row.format(**fields, loop=loop)}"
    print(f"{row}: {work.unit} {values['median']:.6g} ({values['min']:.6g} to {values['max']:.6g})", flush=True)
    found = {
        "case": name,
        "section": [key.format(**fields) for key in work.section],
        "row": row,
        "unit": work.unit,
        "driver": driver,
        "engine": {"name": peer.label, "version": version, "environment": peer.environment, **settings},
        **fields,
        "requests": len(requests),
        "prompt_tokens": sum(request.num_prompt_tokens for request in requests),
        "output_tokens": sum(request.max_new_tokens for request in requests),
        "start_seconds": start_seconds,
        "figures": {"value": values, "seconds": spread(seconds)},
    }
    return write(f"peers/{peer.package}-{name}", hardware, found, folder, "python -m reproduction.bench.peers")


def run(
    peer: Peer, case: Case, spec: ModelSpec, requests: Sequence[Request], repeats: int
) -> tuple[float, list[float], dict[str, Any]]:
    """Start the engine, warm it up, serve the requests; the seconds of the start and of each run, and its settings."""
    with TemporaryDirectory() as checkpoint:
        write_checkpoint(spec, Path(checkpoint))
        began = time.perf_counter()
        engine = peer.start(Path(checkpoint), case, max(request.max_tokens for request in requests))
        start_seconds = time.perf_counter() - began
        try:
            serve(engine, [shortened(request) for request in requests[: min(case.batch, WARM_UP_REQUESTS)]])
            return start_seconds, [serve(engine, requests) for _ in range(repeats)], engine.settings
        finally:
            engine.close()


def serve(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds for all requests; a CbatchError if one did not get its tokens, as the engine did other work than ours."""
    seconds, generated = engine.serve(requests)
    asked = [request.max_new_tokens for request in requests]
    if generated != asked:
        wrong = sum(got != wanted for got, wanted in zip(generated, asked, strict=False))
        served = len(generated)
        raise CbatchError(f"{wrong} of {len(asked)} requests, {served} of them served, got too few or many tokens")
    return seconds


def shortened(request: Request) -> Request:
    """The same prompt with few tokens to generate."""
    new = min(WARM_UP_TOKENS, request.max_new_tokens)
    return Request(request.id, request.num_prompt_tokens, new, prompt=request.prompt)


def write_checkpoint(spec: ModelSpec, folder: Path) -> None:
    """A checkpoint without weights: config.json with the shape that our random weights have."""
    from cbatch.runtime.weights import transformers_config  # imports transformers, which reads its environment then

    config = transformers_config(spec)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = spec.dtype
    config.save_pretrained(folder)


def graphics_card() -> tuple[str, str]:
    """Name and driver version of the first GPU, from another process: this one must not start CUDA before it forks."""
    if shutil.which("nvidia-smi") is None:
        raise CbatchError("peers: nvidia-smi is not there; measure on a machine with an NVIDIA GPU")
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    cards = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, driver = cards.splitlines()[0].split(", ")
    return name, driver
