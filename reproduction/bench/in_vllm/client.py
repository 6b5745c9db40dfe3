"""vLLM's own client, `vllm bench serve` (0.22), run in this process: its imports take longer than most runs.

It generates Poisson arrivals only; for those of a trace, its generator of requests is replaced.
"""

import asyncio
import io
import json
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

from cbatch import CbatchError, Request

PROMPT, OUTPUT, RATIO = 1024, 200, 0.8
SLO = {"slo_ttft": 1.0, "slo_tbt": 0.05}
Rows = list[str]
"""A line for each request: seconds since the first was sent, prompt tokens, output tokens."""


def arguments(folder: Path, port: int, number: int, options: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of `vllm bench serve`, which sends `number` requests. folder: of the model, or of its tokenizer."""
    options = {
        "backend": "openai",
        "model": folder,
        "port": port,
        "num-prompts": number,
        "seed": 1,
        "temperature": 0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        **options,
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [*words, "--ignore-eos", "--disable-tqdm", "--disable-shuffle", "--skip-chat-template"]


def write_lengths(path: Path, lengths: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Writes requests of these prompt and output tokens to a file; returns the options that send them."""
    rows = (
        {"prompt": " ".join([f"t{number % 1000}"] * prompt), "output_tokens": new}
        for number, (prompt, new) in enumerate(lengths)
    )
    path.write_text("\n".join(map(json.dumps, rows)))
    return {"dataset-name": "custom", "dataset-path": path, "custom-output-len": -1}


def figures_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns what the client reports, in milliseconds and per second."""
    kept = ("completed", "request_throughput", "output_throughput", "total_token_throughput")
    return {key: float(value) for key, value in result.items() if key in kept or key.endswith("_ms")}


class Client:
    """Sends requests to a server on this machine that serves the model in `folder`."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._module: Any = import_module("vllm.benchmarks.serve")
        self._parser = ArgumentParser()
        self._module.add_cli_args(self._parser)

    def run(self, side: str, rate: float, number: int) -> tuple[dict[str, float], Rows]:
        """Returns what it reports of `number` requests of random lengths at `rate` per second, and the requests."""
        lengths = {"random-input-len": PROMPT, "random-output-len": OUTPUT, "random-range-ratio": RATIO}
        return self._run(side, number, {"dataset-name": "random", "request-rate": rate, **lengths})

    def replay(self, side: str, requests: Sequence[Request]) -> tuple[dict[str, float], Rows]:
        """The same for requests of these lengths and arrival times, in seconds since the first."""
        lengths = ((request.num_prompt_tokens, request.max_new_tokens) for request in requests)
        options = write_lengths(self._folder / "trace.jsonl", lengths)

        async def at_its_time(chosen: Sequence[Any], rate: float, *_: Any) -> AsyncIterator[tuple[Any, float]]:
            began = time.perf_counter() - requests[0].arrival_time
            for sample, request in zip(chosen, requests, strict=True):
                await asyncio.sleep(max(began + request.arrival_time - time.perf_counter(), 0.0))
                yield sample, rate

        with patch.object(self._module, "get_request", at_its_time):
            return self._run(side, len(requests), options)

    def _run(self, side: str, number: int, options: dict[str, Any]) -> tuple[dict[str, float], Rows]:
        options |= {"extra-body": json.dumps({"vllm_xargs": {"cbatch": side, **SLO}})}
        words = [*arguments(self._folder, self._port, number, options), "--save-detailed"]
        # a short request, with which the scheduler begins a turn of this side
        begin = {"cbatch": side, "turn": 1}
        asked = {"model": str(self._folder), "prompt": "t1 t2", "max_tokens": 2, "vllm_xargs": begin}
        url, head = f"http://127.0.0.1:{self._port}/v1/completions", {"Content-Type": "application/json"}
        with urlopen(HttpRequest(url, json.dumps(asked).encode(), head), timeout=60) as answer:
            answer.read()
        with redirect_stdout(io.StringIO()) as printed:
            result = self._module.main(self._parser.parse_args(words))
        if result["completed"] < number:
            raise CbatchError(
                f"vllm bench serve completed {result['completed']} of {number}: {printed.getvalue()[-2000:]}"
            )
        sent = [time - min(result["start_times"]) for time in result["start_times"]]
        rows = sorted(zip(sent, result["input_lens"], result["output_lens"], strict=True))
        return figures_of(result), [f"{time:.4f} {prompt} {output}" for time, prompt, output in rows]
