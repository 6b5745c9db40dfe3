"""MFU and MBU of real runs beside an independent count, and beside a simulation of the same requests.

Counted independently: tokens and contexts from each step that the executor is given, weights from the modules of `transformers`, peaks from
data sheets, and the time around the whole run by the host's clock.
"""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cbatch import ConfigError, Server
from cbatch.executor import Step
from cbatch.model import ModelSpec
from cbatch.results.summary import summarize
from cbatch.results.utilisation import machines_of
from experiments.settings.backends import Cuda
from experiments.settings.compose import compose_run
from experiments.setup.assemble import Run, assemble
from experiments.store.provenance import write_benchmark, write_json
from reproduction import BENCH, RESULTS
from reproduction.validation.compare import tables_of

PEAKS = {"H100": (989.4e12, 3.35e12), "H200": (989.4e12, 4.8e12)}
"""Data sheets of the SXM cards: dense bfloat16 products per second, and bytes per second."""

Shapes = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]]


def main(
    policies: str = "policy=sarathi_serve chunk=512;policy=sarathi chunk=256;policy=prefill_first;policy=orca",
    settings: str = "model=llama-3.1-8b batch=64 max_tokens=8192 workload.num_requests=128 workload.length=1024 workload.pd_ratio=8",
    measured: str = "",
    folder: str = RESULTS,
) -> None:
    """Measures, prints and writes utilisation.json. measured: such a file, whose runs are simulated again, without a GPU."""
    if measured:
        simulate_again(Path(measured))
        return
    Cuda().check_here()
    names = policies.split(";")
    card = torch.cuda.get_device_name()
    profile = next((name for name in PEAKS if name in card), None)
    if profile is None:
        raise ConfigError(f"utilisation: {card} is none of {', '.join(PEAKS)}; add its data sheet to PEAKS")
    peaks, keys = PEAKS[profile], [f"hardware={profile.lower()}", *settings.split()]
    real, simulated = (assemble(compose_run(f"backend={backend}", *keys), print) for backend in ("cuda", "sim"))
    server, figures = real.server, dict[str, Any]()
    assert isinstance(server, Server)
    with closing(server):
        serve(real, names[0], keys)
        for name in names:
            shapes, inner = Shapes(), server.executor.launch

            def launch(step: Step, shapes: Shapes = shapes, inner: Any = inner) -> Any:
                shapes.append((step.start.copy(), step.num_tokens.copy(), len(step.sampled)))
                return inner(step)

            server.executor.launch = launch
            found, seconds = serve(real, name, keys)
            server.executor.launch = inner
            counted = [
                done / (seconds * peak) for done, peak in zip(count(real.settings.model, shapes), peaks, strict=True)
            ]
            figures[name] = {
                "seconds": seconds,
                "real": found,
                "counted": dict(zip(("mfu", "mbu"), counted, strict=True)),
                "simulated": serve(simulated, name, keys)[0],
            }
            print(f"  {name}: {figures[name]}", flush=True)
    tables = {"profile": simulated.first.cost.profile.name, "tables": tables_of(simulated.first.cost.profile)}
    content = {**tables, "model": real.settings.model.name, "settings": settings, "figures": figures}
    print(f"written: {write_benchmark('utilisation', card, content, folder, BENCH)}")


def simulate_again(path: Path) -> None:
    """Writes the file's simulated figures with today's tables."""
    content = json.loads(path.read_text(encoding="utf-8"))
    keys = [f"hardware={content['profile']}", *content["settings"].split()]
    run = assemble(compose_run("backend=sim", *keys), print)
    content["tables"] = tables_of(run.first.cost.profile)
    for name, figures in content["figures"].items():
        figures["simulated"] = serve(run, name, keys)[0]
        print(f"  {name}: {figures}")
    print(f"written: {write_json(path, content)}")


def serve(run: Run, policy: str, keys: Sequence[str]) -> tuple[dict[str, float], float]:
    """Returns mfu and mbu of a policy on the server of a run, and the seconds by the host's clock."""
    chosen = compose_run(f"backend={run.settings.backend.name}", *keys, *policy.split())
    requests = chosen.workload.requests(chosen.backend.vocabulary(chosen.model))
    assert isinstance(run.server, Server)
    plans, began = chosen.policy(), time.perf_counter()
    record = run.server.serve(plans, requests)
    seconds, machines = time.perf_counter() - began, machines_of(run.about["utilisation"])
    num_blocks, max_batch = run.first.kv.num_blocks, run.first.limits.max_batch
    summary = summarize(record, num_blocks=num_blocks, max_batch=max_batch, machines=machines)
    return {name: summary[name]["run"] for name in ("mfu", "mbu")}, seconds


def count(spec: ModelSpec, shapes: Shapes) -> tuple[float, float]:
    """Returns the operations and the bytes of all iterations. shapes: cached and computed tokens by request, and sampled tokens."""
    from cbatch.runtime.weights import load_skeleton, transformers_config

    model: Any = load_skeleton(spec, transformers_config(spec))
    weights = sum(weight.numel() for weight in model.base_model.layers.parameters() if weight.dim() == 2)
    head, size = model.get_output_embeddings().weight.numel(), model.dtype.itemsize
    config, flops, moved = model.config, 0.0, 0.0
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    for start, computed, sampled in shapes:
        tokens = int(computed.sum())
        scores = sum(sum(range(before + 1, before + new + 1)) for before, new in zip(start, computed, strict=True))
        width = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        flops += 2.0 * weights * tokens + 2.0 * head * sampled + 4.0 * width * float(scores)
        moved += size * (weights + head + config.hidden_size * tokens) + kv_bytes * float(
            tokens + (start + computed).sum()
        )
    return flops, moved
