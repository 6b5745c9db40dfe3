"""`vllm serve` by its own rule and under policies, driven by `vllm bench serve`: what that client reports at shares of the capacity."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.request import urlopen

from cbatch import CbatchError
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from experiments.workloads import TraceReplay
from reproduction import BENCH, RESULTS
from reproduction.bench.in_vllm.client import OUTPUT, PROMPT, RATIO, SLO, Client, Rows
from reproduction.bench.in_vllm.model import BATCH, BUDGET, LONGEST, SAME_RULE, VLLM, write_model
from reproduction.bench.peers.measure import graphics_card
from reproduction.bench.peers.vllm_engine import ATTENTION, ENVIRONMENT, MEMORY_SHARE

POLICIES = (
    f"{SAME_RULE};policy=sarathi_serve chunk={BUDGET};policy=qoserve chunking=slack model=llama-3.1-8b;"
    f"policy=longest_first chunk={BUDGET}"
)
TIMES = "vllm-times.json"
COMMAND = (sys.executable, "-m", "vllm.entrypoints.cli.main")


def main(
    policies: str = POLICIES,
    shares: str = "0.6,0.9",
    seconds: Count = 20,
    capacity: float = 0.0,
    trace: str = "",
    traced: str = "0.75",
    model: str = "llama-3.1-8b",
    port: Count = 8000,
    name: str = "vllm-serving",
    folder: str = RESULTS,
) -> None:
    """Measures and prints; writes NAME.json after each run of the client.

    `policies` as for benchmark vllm. `capacity` is in requests per second; 0 measures it first: all requests at once, vLLM's own rule.
    `shares` of it are offered for about `seconds` each, as requests of random lengths at random times; and, given a `trace`, the shares
    `traced`, as its first requests at their recorded times, sped up or slowed down to the share.
    """
    spec = load_spec(model)
    hardware, driver = graphics_card()
    about = {"model": spec.name, "batch": BATCH, "budget": BUDGET, "prompt": PROMPT, "output": OUTPUT, "ratio": RATIO}
    about |= {"trace": Path(trace).name, "slo": SLO, "driver": driver, "version": metadata.version("vllm")}
    about["environment"] = ENVIRONMENT
    loads = [*filter(None, shares.split(",")), *(f"trace {share}" for share in traced.split(",") if trace)]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    in_scheduler: dict[str, dict[str, object]] = {}
    sent: dict[str, Rows] = {}
    times = Path(folder) / TIMES
    os.environ |= ENVIRONMENT
    with TemporaryDirectory() as temporary:
        write_model(spec, Path(temporary))
        with _server(Path(temporary), port, Path(folder)) as wait:
            client = Client(Path(temporary), port)  # imports vLLM while the server starts
            wait()
            client.run(VLLM, float("inf"), 32)  # warms up
            capacity = capacity or client.run(VLLM, float("inf"), 2 * BATCH)[0]["request_throughput"]
            print(f"capacity: {capacity:.2f} requests/s", flush=True)
            for load, side in product(loads, (VLLM, *policies.split(";"))):
                rate = float(load.split()[-1]) * capacity
                found, rows = _offer(client, side, rate, round(rate * seconds), trace if "trace" in load else "")
                sent.setdefault(load, rows)
                figures.setdefault(side, {})[load] = found
                print(f"{load:10} {side:50} {_row(found)}", flush=True)
                about |= {"capacity": capacity, "figures": figures, "requests": sent}
                measured = json.loads(times.read_text())
                in_scheduler.setdefault(side, {})[load] = measured["host"]
                about |= {"host": in_scheduler, "counts": measured["counts"]}
                written = write_benchmark(name, hardware, about, folder, BENCH)
    print(f"written: {written}")


def _offer(client: Client, side: str, rate: float, number: int, trace: str) -> tuple[dict[str, float], Rows]:
    if not trace:
        return client.run(side, rate, number)
    lengths = TraceReplay(path=trace, num_requests=number, max_length=LONGEST, too_long="clip")
    last = lengths.requests(None)[-1].arrival_time
    return client.replay(side, replace(lengths, speed=last * rate / number).requests(None))


@contextmanager
def _server(model: Path, port: int, folder: Path) -> Iterator[Callable[[], None]]:
    """`vllm serve` until the end of the `with`; its log is kept in the folder. Yields what waits until it answers."""
    options = {
        "port": port,
        "dtype": "bfloat16",
        "load-format": "dummy",
        "max-num-seqs": BATCH,
        "max-num-batched-tokens": BUDGET,
        "max-model-len": LONGEST,
        "gpu-memory-utilization": MEMORY_SHARE,
        "scheduler-cls": "reproduction.bench.in_vllm.turns.TurnsScheduler",
        "attention-config": json.dumps(ATTENTION),
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "CBATCH_TIMES": str(folder.resolve() / TIMES)}
    with (folder / "vllm-serve.log").open("w") as log:
        command = [*COMMAND, "serve", str(model), *words, "--no-enable-prefix-caching"]
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield partial(_wait, process, port, folder / "vllm-serve.log")
        finally:
            process.terminate()
            process.wait(30)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    while process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except HTTPError as error:
            raise CbatchError(f"vllm serve answers /health with {error.code}; see its log {log}") from error
        except OSError:  # it does not listen yet
            time.sleep(0.5)
    raise CbatchError(f"vllm serve ended with status {process.returncode}; see its log {log}")


def _row(found: dict[str, float]) -> str:
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
    latencies = ", ".join(f"{name[:-3].replace('_', ' ')} {found[name]:.2f} ms" for name in names)
    return f"{found['total_token_throughput']:.0f} tokens/s, {latencies}"
