"""What a server costs: the same requests, all at once, from a trace's file and from streaming clients of `experiments.server`.

    python -m reproduction.bench door_offline path=azure_llm_2023_conv.csv.gz

Both sides have the same settings and lengths; prompts are random token ids. The figures are those of their run folders. The clients are one process.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tabulate import tabulate

from cbatch import ConfigError, Request
from experiments.settings.command_line import Count
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_benchmark
from experiments.store.run_folder import SUMMARY
from experiments.workloads import TraceReplay
from reproduction import BENCH, RESULTS

_LONGEST = 4096


def main(
    path: str,
    settings: str = "policy=sarathi_serve chunk=2048 batch=256 max_tokens=2048 backend=cuda",
    model: str = "llama-3.1-8b",
    number: Count = 512,
    repeats: Count = 3,
    name: str = "door_offline",
    folder: str = RESULTS,
) -> None:
    """Measures alternately, prints, and writes NAME.json. number: of requests, the trace's first that fit. repeats: runs of each side."""
    asked = list(islice(TraceReplay(path=path, max_length=_LONGEST, too_long="drop").requests(None), number))
    trace = f"workload=trace workload.path={path} workload.max_length={_LONGEST} workload.too_long=drop"
    offline = f"{settings} model={model} {trace} workload.queued=true workload.num_requests={number}"
    served = f"{settings} model={model} max_request_tokens={_LONGEST} port=0"
    rates: dict[str, list[float]] = {"offline": [], "server": []}
    with TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            ours, theirs = Path(scratch, f"offline{repeat}"), Path(scratch, f"server{repeat}")
            subprocess.run([*_command("run", offline, ours)], check=True, stdout=subprocess.DEVNULL)
            with _serving(_command("server", served, theirs)) as port:
                asyncio.run(_ask_all(port, asked, load_spec(model).vocab_size))
            for side, run in zip(rates, (ours, theirs), strict=True):
                summary = json.loads((run / SUMMARY).read_text())
                rates[side].append(summary["throughput"]["total_tokens_per_second"])
    lost = 1 - max(rates["server"]) / max(rates["offline"])
    rows = [(side, *values) for side, values in rates.items()]
    print(tabulate(rows, ("tokens/s", *range(1, repeats + 1)), floatfmt=".5g"))
    print(f"the server costs {lost:.1%} of the offline throughput (best of {repeats} runs of each)")
    figures: dict[str, Any] = {"trace": Path(path).name, "settings": settings, "tokens_per_second": rates, "lost": lost}
    print(f"written: {write_benchmark(name, summary['about']['hardware'], figures, folder, BENCH)}")


def _command(name: str, keys: str, folder: Path) -> Sequence[str]:
    return [sys.executable, "-m", f"experiments.{name}", *keys.split(), f"output={folder}"]


@contextmanager
def _serving(command: Sequence[str]) -> Iterator[int]:
    """Runs a server inside the `with`; yields its port."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        printed = ""
        while not (serving := re.search(r"serving .* on http://\S+:(\d+)", printed)):
            if not (line := process.stdout.readline()):
                raise ConfigError(f"door_offline: the server has not started: {printed}")
            printed += line
        yield int(serving[1])
        process.terminate()
        process.communicate()


async def _ask_all(port: int, requests: Sequence[Request], vocab_size: int) -> None:
    draw = random.Random(0)
    prompts = [draw.choices(range(vocab_size), k=request.num_prompt_tokens) for request in requests]
    bodies = [
        {"prompt": prompt, "max_tokens": request.max_new_tokens, "ignore_eos": True, "stream": True}
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    await asyncio.gather(*(_ask(port, json.dumps(body).encode()) for body in bodies))


async def _ask(port: int, body: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json"
    writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if b"[DONE]" not in answer:
        raise ConfigError(f"door_offline: an answer is not complete: {answer[:300]!r}")
