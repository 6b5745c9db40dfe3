"""Clients that leave at any moment: what they held is free again, and the others' tokens are those of a run without them."""

import asyncio
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import command, wait_for
from live import QUICK, Live, served, serving

MANNERS = ("stays", "stays", "reads slowly", "leaves", "leaves at once", "sends half", "closes half")


async def client(port: int, body: dict[str, Any], manner: str, rng: random.Random) -> bytes:
    """Returns what a client reads before it leaves, or the whole answer."""
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(head.encode() + content[: len(content) // 2 if manner == "sends half" else None])
        await writer.drain()
        if manner in ("leaves at once", "sends half"):
            await asyncio.sleep(rng.random() / 20)
            return answer
        if manner == "closes half":  # counts as a client that has left
            writer.write_eof()
        num_chunks = rng.randrange(1, body["max_tokens"])
        while part := await reader.read(64 if manner == "reads slowly" else 4096):
            answer += part
            if manner == "leaves" and answer.count(b"data: {") >= num_chunks:
                break
        return answer
    finally:
        writer.close()


async def crowd(port: int, bodies: list[dict[str, Any]], manners: list[str], at_once: int) -> list[bytes]:
    """Returns what each client has read. at_once: most connections."""
    places, rng = asyncio.Semaphore(at_once), random.Random(0)

    async def one(body: dict[str, Any], manner: str) -> bytes:
        async with places:
            return await client(port, body, manner, rng)

    return await asyncio.gather(*map(one, bodies, manners))


def bodies_and_manners(number: int, vocabulary: int) -> tuple[list[dict[str, Any]], list[str]]:
    rng = random.Random(1)
    bodies = [
        {
            "prompt": [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 80))],
            "max_tokens": rng.randrange(2, 30),
            "stream": rng.random() < 0.7,
            "client": str(index),
        }
        for index in range(number)
    ]
    return bodies, rng.choices(MANNERS, k=number)


def check_answers(bodies: list[dict[str, Any]], manners: list[str], answers: list[bytes]) -> None:
    """Checks that those who stayed have a whole answer."""
    for body, manner, answer in zip(bodies, manners, answers, strict=True):
        if manner in ("stays", "reads slowly"):
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert answer.count(b'"finish_reason') == (body["max_tokens"] if body["stream"] else 1)
            assert b"[DONE]" in answer or not body["stream"]


def check_crowd(live: Live, pid: int, at_once: int, bodies: list[dict[str, Any]], manners: list[str]) -> None:
    """Checks the answers of a crowd, and that the server's process holds nothing of it when all have gone."""
    files = Path(f"/proc/{pid}/fd")
    live.ask("/health")
    num_files = len([*files.iterdir()])
    check_answers(bodies, manners, asyncio.run(crowd(live.port, bodies, manners, at_once)))
    idle = {f"cbatch:{name} 0.0" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
    wait_for(lambda: idle <= {*live.ask("/metrics")[1].splitlines()})
    wait_for(lambda: len([*files.iterdir()]) <= num_files)


def test_ten_thousand_requests_of_a_thousand_clients_leave_nothing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes half a minute of two cores")
    with serving(tmp_path, "policy=vllm_v1", "backend=sim", "batch=512", "chunk=2048", "port=0") as live:
        check_crowd(live, live.process.pid, 1000, *bodies_and_manners(10_000, 500))
        assert live.stop() == 0


def test_a_client_that_leaves_ends_its_request_although_another_waits_behind_it(tmp_path: Path, capfd: Any) -> None:
    """Both requests are in one connection; uvicorn answers them in order."""
    content = b'{"prompt": [1], "max_tokens": 8000}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"

    def leaves(live: Live) -> None:
        def runs(number: int) -> bool:
            return f"cbatch:num_requests_running {number}.0" in live.ask("/metrics")[1]

        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            connection.sendall((head.encode() + content) * 2)
            wait_for(lambda: runs(1))
        wait_for(lambda: runs(0))

    figures, _ = served(tmp_path / "run", leaves, *QUICK, "time_scale=5")
    assert (figures["run"]["requests"], figures["run"]["cancelled_requests"]) == (1, 1)
    assert "File" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_the_others_get_the_tokens_of_a_run_without_those_who_leave(tmp_path: Path, capfd: Any) -> None:
    bodies, manners = bodies_and_manners(60, 512)
    tiny, folder = ("backend=cpu", "model=tiny", "batch=6"), tmp_path / "run"

    def clients(live: Live) -> None:
        check_crowd(live, os.getpid(), 30, bodies, manners)

    served(folder, clients, *tiny, "policy=sarathi_serve", "chunk=16", "port=0")
    assert "File" not in "".join(capfd.readouterr())
    requests = pd.read_csv(folder / "requests.csv", dtype={"client": str}).set_index("id")
    lines = (json.loads(line) for line in (folder / "outputs.jsonl").read_text().splitlines())
    live_outputs = {
        requests.client[line["id"]]: line["output"] for line in lines if requests.finish_reason[line["id"]] == "length"
    }
    assert {"length", "cancelled"} == {*requests.finish_reason}
    prompts = [{"token_ids": body["prompt"], "max_new_tokens": body["max_tokens"]} for body in bodies]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    offline = ("policy=orca", "workload=prompts", "workload.path=prompts.jsonl", "output=offline")
    assert command("run", *tiny, *offline, cwd=tmp_path).returncode == 0
    lines = (json.loads(line) for line in (tmp_path / "offline" / "outputs.jsonl").read_text().splitlines())
    outputs = {str(line["id"]): line["output"] for line in lines}
    assert len(live_outputs) >= manners.count("stays") and live_outputs.items() <= outputs.items()
