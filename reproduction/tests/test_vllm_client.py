"""How the serving benchmark drives vLLM's client: its options, the policy that is taken up first, and a trace's arrival times."""

import asyncio
import json
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cbatch import BatchShape, Request
from cbatch.sim import ProfileCost, load_profile
from experiments.settings.presets import load_spec
from reproduction.bench.__main__ import main as bench
from reproduction.bench.in_vllm import serving
from reproduction.bench.in_vllm.client import Client
from reproduction.bench.in_vllm.model import SAME_RULE

LATENCIES = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
FIGURES = {"request_throughput": 2.0, "mean_ttft_ms": 3.0, "backend": "openai"}


class Api(BaseHTTPRequestHandler):
    """vLLM's server, which answers everything and keeps what it was asked."""

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


class Serve(ModuleType):
    """`vllm.benchmarks.serve`: sends the rows of its data set as its generator of requests yields them."""

    def add_cli_args(self, parser: ArgumentParser) -> None:
        for name in ["backend", "model", "dataset-name", "dataset-path", "extra-body", "percentile-metrics"]:
            parser.add_argument(f"--{name}")
        for name in ["port", "num-prompts", "seed", "custom-output-len", "temperature"]:
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--request-rate", type=float, default=float("inf"))
        for name in ["ignore-eos", "save-detailed", "disable-tqdm", "disable-shuffle", "skip-chat-template"]:
            parser.add_argument(f"--{name}", action="store_true")

    async def get_request(self, rows: Any, rate: float) -> Any:
        for row in rows:
            yield row, rate

    def main(self, given: Any) -> dict[str, Any]:
        self.given = given
        rows = [json.loads(line) for line in Path(given.dataset_path).read_text().splitlines()]

        async def send() -> list[tuple[float, int, int]]:
            chosen = self.get_request(rows, given.request_rate)
            return [(time.perf_counter(), len(row["prompt"].split()), row["output_tokens"]) async for row, _ in chosen]

        started, prompts, outputs = map(list, zip(*asyncio.run(send()), strict=True))
        lengths = {"input_lens": prompts, "output_lens": outputs}
        return {**FIGURES, "completed": len(rows), "start_times": started, **lengths}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Client, Serve, list[Any]]]:
    serve = Serve("vllm.benchmarks.serve")
    monkeypatch.setitem(sys.modules, serve.__name__, serve)
    server: Any = HTTPServer(("127.0.0.1", 0), Api)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Client(tmp_path, server.server_port), serve, server.asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_trace_is_sent_at_its_times(served: tuple[Client, Serve, list[Any]]) -> None:
    client, serve, asked = served
    requests = [Request(id_, 5 + id_, 7 - id_, arrival_time=10 + at) for id_, at in enumerate((0.0, 0.03, 0.05))]
    figures, rows = client.replay("policy=orca", requests)
    assert figures == {"completed": 3.0, "request_throughput": 2.0, "mean_ttft_ms": 3.0}
    assert [row.split()[1:] for row in rows] == [["5", "7"], ["6", "6"], ["7", "5"]]
    assert all(float(row.split()[0]) >= at - 1e-4 for row, at in zip(rows, (0.0, 0.03, 0.05), strict=True))
    assert [body["vllm_xargs"] for body in asked] == [{"cbatch": "policy=orca", "turn": 0}], "the turn begins before"
    sent = {"cbatch": "policy=orca", "slo_ttft": 1.0, "slo_tbt": 0.05}
    assert json.loads(serve.given.extra_body)["vllm_xargs"] == sent
    assert serve.given.disable_shuffle and serve.given.ignore_eos and serve.given.num_prompts == 3


def test_the_host_is_timed_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that becomes slower with every pass moves neither ratio: 1.25 of both calls and 1.5 of `schedule`."""
    asked: list[tuple[str, int, int]] = []

    class FakeClient:
        def __init__(self, *_: Any) -> None: ...

        def run(self, side: str, rate: float, number: int) -> tuple[dict[str, float], list[str]]:
            return dict.fromkeys(("total_token_throughput", *LATENCIES), 1.0), [f"0.0 {number} 1"]

        def replay(self, side: str, requests: list[Request], stretch: int) -> None:
            asked.append((side, len(requests), stretch))
            slower = 1 + len(asked)
            own = {"iterations": 40, "milliseconds": 0.4 * slower, "schedule": 0.2 * slower, "cpu": 0.0}
            other = own | {"milliseconds": 0.5 * slower, "schedule": 0.3 * slower}
            found = {"1": {"vllm": own}, str(len(requests)): {"vllm": own, SAME_RULE: other}}
            (tmp_path / serving.TIMES).write_text(json.dumps({"host": found, "counts": {SAME_RULE: "all"}}))

    monkeypatch.setattr(serving, "Client", FakeClient)
    monkeypatch.setattr(serving, "_server", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr(serving, "graphics_card", lambda: ("NVIDIA H200", "580"))
    monkeypatch.setattr(serving, "write_model", lambda *_: None)
    monkeypatch.setattr(serving.metadata, "version", lambda _: "0.22.1")
    serving.main("policy=orca", shares="0.9", capacity=20.0, host=True, folder=str(tmp_path))
    assert asked == 4 * [*4 * [(SAME_RULE, 32, 16)], (SAME_RULE, 256, 16)]
    written = json.loads((tmp_path / "h200" / "vllm-serving.json").read_text())
    found = written["pairs"][SAME_RULE]
    assert set(found) == {"32", "256"} and set(found["32"]) == {"milliseconds", "schedule"}, "the CPU clock stood still"
    for what, ratio in (("milliseconds", 1.25), ("schedule", 1.5)):
        assert found["32"][what]["ratio"]["repeats"] == 16 and found["256"][what]["ratio"]["repeats"] == 4
        assert found["32"][what]["interval"] == pytest.approx([ratio, ratio])
    assert set(written["host"]) == {"vllm", "policy=orca"} and written["counts"] == {SAME_RULE: "all"}
    assert f"    {SAME_RULE}, 256 running, schedule: 4.050 ms instead of 2.700; ratio 1.500" in capsys.readouterr().out


def test_what_a_client_measured_is_simulated(tmp_path: Path) -> None:
    """One request: a prompt of 100 tokens in one iteration, and two decodes."""
    client = {
        "mean_ttft_ms": 10.0,
        "p99_ttft_ms": 10.0,
        "mean_tpot_ms": 5.0,
        "p99_tpot_ms": 5.0,
        "total_token_throughput": 5000.0,
    }
    about = {"hardware": "NVIDIA H200", "model": "llama-3.1-8b", "batch": 64, "budget": 2048, "slo": {"slo_ttft": 1.0}}
    kept = {**about, "figures": {"vllm": {"0.6": client}}, "requests": {"0.6": ["0.0000 100 3"]}}
    (tmp_path / "serving.json").write_text(json.dumps(kept))
    assert bench(["vllm_simulated", f"measured={tmp_path / 'serving.json'}", f"folder={tmp_path}"]) == 0
    (run,) = json.loads((tmp_path / "h200" / "vllm-simulated.json").read_text())["runs"].values()
    cost = ProfileCost(load_profile("h200-vllm"), load_spec("llama-3.1-8b"))
    ttft = cost.predict(BatchShape(((100, 0),)))
    decodes = [cost.predict(BatchShape((), 1, context)) for context in (101, 102)]
    assert run["TTFT mean"] == pytest.approx({"measured": 0.01, "simulated": ttft, "error": ttft / 0.01 - 1})
    assert run["TPOT mean"]["simulated"] == pytest.approx(sum(decodes) / 2)
    assert run["throughput"]["simulated"] == pytest.approx(103 / (ttft + sum(decodes)))
