"""Serves the work of our benchmarks on another engine, several times, and writes what it took.

    python -m reproduction.bench peers cases='trace-256;decode' path=TRACE
    python -m reproduction.bench peers engine=transformers-async cases=decode-2048

vLLM and SGLang run in environments of their own, which need this project's requirements beside them; transformers in this one, on cases of equal outputs.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol

from cbatch import CbatchError, ModelSpec, Request
from experiments.bench import shortened
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.store.provenance import provenance, slug, spread, write_json
from reproduction import BENCH, RESULTS
from reproduction.bench.peers.cases import CASES, UNITS, Case, requests_of, speed
from reproduction.bench.peers.sglang_engine import SglangEngine
from reproduction.bench.peers.turns import in_turn
from reproduction.bench.peers.vllm_engine import ENVIRONMENT, VllmEngine, cache_of
from reproduction.selection import beginning_with

WARM_UP_REQUESTS = 32
Name = Literal["vllm", "sglang", "transformers-sync", "transformers-async"]
LABELS = {"vllm": "vLLM", "sglang": "SGLang"}


class Engine(Protocol):
    """An engine with a model of its own. settings: what it was built with."""

    @property
    def settings(self) -> dict[str, Any]: ...

    def serve(self, requests: Sequence[Request]) -> tuple[float, list[int]]: ...

    def close(self) -> None: ...


def main(
    engine: Name = "vllm",
    cases: str = "",
    path: str = "",
    repeats: Count = 3,
    attention: str = "flash_attention_4",
    kv_tokens: int = 0,
    turns: str = "",
    folder: str = RESULTS,
) -> None:
    """Measures and prints; adds each case to peers.json, under the engine and its version, after its first run and again after each further one.

    cases: beginnings of names, separated by ";". path: of the trace. attention: of transformers. kv_tokens: of the
    cache of vLLM or SGLang, 0 for what the card has. turns: a file that processes on the same cards name: they start together, run in turn.
    """
    os.environ.update(ENVIRONMENT)
    for name in beginning_with("cases", cases, CASES):
        case = CASES[name]
        spec = load_spec(case.model)
        requests = requests_of(case, spec, path)
        longest = max(request.max_tokens for request in requests)
        warm_up = shortened(requests, min(case.batch, WARM_UP_REQUESTS))
        about = {
            "requests": len(requests),
            "prompt_tokens": sum(request.num_prompt_tokens for request in requests),
            "output_tokens": sum(request.max_new_tokens for request in requests),
        }
        seconds = list[float]()
        with started(engine, case, spec, longest, warm_up, attention, kv_tokens, turns) as (peer, start_seconds):
            for _ in range(repeats):
                seconds.append(serve(peer, requests))
                speeds = [speed(case, requests, taken) for taken in seconds]
                figures = {"value": spread(speeds), "seconds": spread(seconds)}
                add_row(engine, name, case, peer.settings, figures, folder, **about, start_seconds=start_seconds)


def add_row(
    engine: Name, name: str, case: Case, settings: dict[str, Any], figures: dict[str, Any], folder: str, **about: Any
) -> None:
    """Prints what a piece of work took and adds it to peers.json. figures: the speed is `value`. about: the work."""
    label = LABELS.get(engine, "transformers")
    (hardware, driver), version = graphics_card(), metadata.version(label.lower())
    row = f"{label} {version}{case.row('async' if settings['async_scheduling'] else 'sync')}"
    found = {
        "case": name,
        "section": case.section(name),
        "row": row,
        "unit": UNITS[case.work],
        "driver": driver,
        "engine": {"name": label, "version": version, "environment": ENVIRONMENT, **settings},
        **case._asdict(),
        **about,
        "figures": figures,
    }
    values = figures["value"]
    shown = f"{values['median']:.6g} ({values['min']:.6g} to {values['max']:.6g})"
    print(f"{name}, {row}: {UNITS[case.work]} {shown}", flush=True)
    print(f"written: {store(f'{engine}-{version}-{name}', hardware, found, folder)}", flush=True)


def store(name: str, hardware: str, found: dict[str, Any], folder: str) -> Path:
    """Adds what was measured, with its provenance, to the engines in peers.json. Returns the path."""
    path = Path(folder) / slug(hardware) / "peers.json"
    engines = json.loads(path.read_text(encoding="utf-8"))["engines"] if path.is_file() else {}
    engines[name] = provenance(BENCH) | found
    return write_json(path, {"benchmark": "peers", "hardware": hardware, "engines": dict(sorted(engines.items()))})


@contextmanager
def started(
    name: Name,
    case: Case,
    spec: ModelSpec,
    longest: int,
    warm_up: Sequence[Request],
    attention: str = "",
    kv_tokens: int = 0,
    turns: str = "",
    *,
    prefix_cache: bool = False,
) -> Iterator[tuple[Engine, float]]:
    """Yields an engine that has served `warm_up` and whose turn it is, and the seconds of its start. The other arguments are those of `start`."""
    graphics_card()  # is missed now rather than when all has been measured
    with TemporaryDirectory() as checkpoint, in_turn(turns) as wait:
        write_checkpoint(spec, Path(checkpoint))
        began = time.perf_counter()
        engine = start(name, Path(checkpoint), case, longest, attention, kv_tokens, spec, prefix_cache=prefix_cache)
        seconds = time.perf_counter() - began
        with closing(engine):
            serve(engine, warm_up)
            wait()
            yield engine, seconds


def start(
    name: Name,
    checkpoint: Path,
    case: Case,
    longest: int,
    attention: str,
    kv_tokens: int,
    spec: ModelSpec,
    *,
    prefix_cache: bool = False,
) -> Engine:
    """prefix_cache: of vLLM and SGLang; the other arguments as for `main`."""
    if name == "vllm":
        cache = cache_of(kv_tokens * spec.kv_bytes_per_token)
        return VllmEngine(checkpoint, case, longest, enable_prefix_caching=prefix_cache, **cache)
    if name == "sglang":
        return SglangEngine(checkpoint, case, longest, kv_tokens, prefix_cache=prefix_cache)
    # imports torch, which must not be loaded before vLLM
    from reproduction.bench.peers.transformers_engine import TransformersEngine

    return TransformersEngine(checkpoint, case, longest, asynchronous=name == "transformers-async", attention=attention)


def serve(engine: Engine, requests: Sequence[Request]) -> float:
    """Returns the seconds for all requests.

    Raises:
        CbatchError: a request did not get its tokens, so that vLLM did other work than our engine.
    """
    seconds, generated = engine.serve(requests)
    asked = [request.max_new_tokens for request in requests]
    if generated != asked:
        wrong = sum(got != wanted for got, wanted in zip(generated, asked, strict=True))
        raise CbatchError(f"{wrong} of {len(asked)} requests got too few or too many tokens")
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
