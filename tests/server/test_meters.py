"""What `/metrics` shows."""

import asyncio
import time
from pathlib import Path

import pytest
from in_thread import figures_of, in_thread
from prometheus_client import generate_latest

COMPLETIONS = "/v1/completions"
SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")


def test_metrics_are_those_of_the_run(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", *SIMULATED) as server:
        for prompt, new in (("a b", 4), ("a b c", 1)):
            server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": new})
        left = {"prompt": "a b c d", "max_tokens": 3000, "stream": True}
        assert not server.run(server.call(COMPLETIONS, left, leave_after=2)).is_whole
        while not (figures := server.figures()).get('request_success_total{finished_reason="cancelled"}'):
            time.sleep(0.01)
        assert figures['request_success_total{finished_reason="length"}'] == 2
        assert figures["prompt_tokens_total"] == 9 and figures["prefix_cache_queries_total"] == 9
        assert 6 < figures["generation_tokens_total"] < 3000 and figures["num_preemptions_total"] == 0
        assert [figures[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")] == [
            0
        ] * 3
    assert server.summary["run"]["cancelled_requests"] == 1
    for name, group, number in (
        ("time_to_first_token", "ttft_seconds", 2),
        ("e2e_request_latency", "end_to_end_seconds", 2),
        ("request_time_per_output_token", "tpot_seconds", 1),
    ):
        assert figures[f"{name}_seconds_count"] == number
        assert figures[f"{name}_seconds_sum"] / number == pytest.approx(server.summary[group]["mean"])


def test_what_the_prefix_cache_held_is_in_the_usage_and_in_the_metrics(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", *SIMULATED, "prefix_cache=true", "block_size=4") as server:
        for cached in (0, 16):
            answer = server.ask(COMPLETIONS, {"prompt": [*range(20)], "max_tokens": 4, "n": 2}).content
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        figures = server.figures()
    assert figures["prefix_cache_queries_total"] == 80 and figures["prefix_cache_hits_total"] >= 32


def test_requests_that_wait_and_run_are_counted(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", "policy=orca", "backend=sim", "batch=2") as server:

        async def crowd() -> set[tuple[float, ...]]:
            seen, body = set(), {"prompt": "a", "max_tokens": 30, "stream": True}
            clients = asyncio.gather(*(server.call(COMPLETIONS, body) for _ in range(3)))
            while not clients.done():
                await asyncio.sleep(0.001)
                figures = figures_of(generate_latest(server.door.meters).decode())
                is_empty = not figures["kv_cache_usage_perc"]
                seen.add((figures["num_requests_running"], figures["num_requests_waiting"], is_empty))
            return seen

        assert {(2, 1, False), (1, 0, False)} <= server.run(crowd())
