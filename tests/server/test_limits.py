"""What a server refuses, how it ends, and what happens when its engine fails."""

import asyncio
import http.client
import json
import multiprocessing
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop
from commands import PATIENCE, command, environment, new_process, summary, wait_for
from in_thread import in_thread
from live import events, serving

from experiments.server.link import read_from

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "a", "max_tokens": 500, "stream": True}
SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")
SLOW = ("policy=sarathi_serve", "backend=sim", "batch=64", "port=0")
"""A simulated server in real time: 500 tokens take two seconds."""


def test_a_key_is_asked_for_and_not_written(tmp_path: Path) -> None:
    keys = ({}, 401), ({"Authorization": "Bearer s3cre"}, 401), ({"Authorization": "Bearer s3cret"}, 200)
    with in_thread(tmp_path / "run", *SIMULATED, "api_key=s3cret") as server:
        for key, status in keys:
            assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **key).status == status
            assert server.ask("/v1/models", **key).status == status
        assert server.ask("/health").status == server.ask("/metrics").status == 200
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "run").iterdir())


def test_a_full_server_refuses_at_once(tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 500, "stream": True}
    with in_thread(tmp_path / "run", *SIMULATED, "max_open=2", "full_status=429") as server:

        async def crowd() -> list[Any]:
            clients = [server.call(COMPLETIONS, body), server.call(COMPLETIONS, body, leave_after=5)]
            tasks = [asyncio.create_task(client) for client in clients]
            await asyncio.sleep(0)  # both are open
            refused = await server.call(COMPLETIONS, {"prompt": "a"})
            return [refused, *await asyncio.gather(*tasks)]

        refused, whole, left = server.run(crowd())
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        assert len(whole.events) == 500 and len(left.events) < 500
        assert server.figures()["admission_rejections_total"] == 1
        for number, status in ((2, 200), (3, 429)):
            asked = {"prompt": "a", "max_tokens": 1, "n": number}
            assert server.ask(COMPLETIONS, asked).status == status
        assert server.figures()["admission_rejections_total"] == 4


@pytest.mark.parametrize(("seconds", "signals"), [(30, 1), (0.2, 1), (30, 2)])
def test_a_signal_lets_open_requests_end_for_a_while_or_until_the_next_signal(
    tmp_path: Path, seconds: float, signals: int
) -> None:
    is_cut = seconds < 1 or signals > 1
    with serving(tmp_path, *SLOW, f"drain_seconds={seconds}") as live:
        stream = live.send(COMPLETIONS, LONG)
        for _ in range(signals):
            live.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        if is_cut:
            with pytest.raises(http.client.IncompleteRead) as cut:
                stream.read()
            assert json.loads(cut.value.partial.decode().split("data: ")[-1])["error"]["code"] == 503
        else:
            assert len(events(stream)) == 500
        live.process.communicate()
        assert live.process.returncode == 0
    figures = summary(live.folder)
    assert figures["run"].get("cancelled_requests", 0) == is_cut
    assert figures["about"]["chosen"].get("cut") == ("1 requests, as the server ended" if is_cut else None)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_message_of_the_engine_that_is_longer_than_a_buffer_is_read_whole(loop: Any) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    received: list[object] = []

    async def receive() -> None:
        ended = asyncio.Event()

        def take(message: object) -> None:
            received.append(message)
            if len(received) == 2:
                ended.set()

        read_from(ours, take)
        writer = asyncio.create_task(asyncio.to_thread(theirs.send, "x" * 10_000_000))
        await writer
        theirs.close()
        await ended.wait()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(asyncio.wait_for(receive(), PATIENCE))
    assert received == ["x" * 10_000_000, "the engine's process has ended"]


def test_a_failing_engine_cuts_streams_after_an_error_and_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "policy=orca", "policy._target_=failing_policies.Fails", *SLOW[1:]) as live:
        stream = live.send(COMPLETIONS, LONG)
        with pytest.raises(http.client.IncompleteRead) as cut:
            stream.read()
        assert json.loads(cut.value.partial.decode().split("data: ")[-1])["error"]["code"] == 500
        printed, _ = live.process.communicate()
        assert live.process.returncode == 2 and "the policy's fault" in printed
    assert summary(live.folder)["run"]["cancelled_requests"] == 1
    assert "the policy's fault" in summary(live.folder)["about"]["chosen"]["ended by"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_engine_ends_with_a_server_that_has_not_begun_to_serve(tmp_path: Path, number: int) -> None:
    arguments = [
        sys.executable,
        "-m",
        "experiments.server",
        "policy=orca",
        "policy._target_=failing_policies.Sleeps",
        *SLOW[1:],
    ]
    engine = tmp_path / "pid"
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), text=True) as process:
        wait_for(lambda: engine.is_file() and engine.read_text(), process)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) != 0
    end = time.monotonic() + PATIENCE
    while Path("/proc", engine.read_text()).is_dir():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_request_that_the_policy_rejects_is_answered_with_503(tmp_path: Path) -> None:
    with in_thread(
        tmp_path / "run", "policy=orca", "policy._target_=failing_policies.Refuses", *SIMULATED[1:]
    ) as server:
        for stream in (True, False):
            answer = server.ask(COMPLETIONS, {**LONG, "stream": stream})
            assert answer.status == 503 and "too busy" in answer.content["error"]["message"]
    assert server.summary["run"]["rejected_requests"] == 2


@pytest.mark.parametrize(
    ("policy", "settings", "problem"),
    [
        ("Fails", (), "the policy's fault"),
        ("Idles", ("patience.seconds=0.3",), "plans nothing for 0.3 s with 2 requests"),
    ],
)
def test_a_failing_policy_ends_answers_with_an_error_and_the_server(
    policy: str, settings: tuple[str, ...], problem: str, tmp_path: Path
) -> None:
    arguments = ("policy=orca", f"policy._target_=failing_policies.{policy}", *SIMULATED[1:], *settings)
    with in_thread(tmp_path / "run", *arguments) as server:

        async def crowd() -> list[Any]:
            bodies = [{**LONG, "stream": stream} for stream in (True, False)]
            return await asyncio.gather(*(server.call(COMPLETIONS, body) for body in bodies))

        streamed, whole = server.run(crowd())
        error = streamed.events[-1] if policy == "Fails" else streamed.content
        assert error["error"]["code"] == whole.content["error"]["code"] == whole.status == 500
        assert streamed.is_whole == (policy != "Fails"), "it is cut where it has begun"
        assert server.ask("/health").status == 503
        assert server.ask(COMPLETIONS, {"prompt": "a"}).status == 503
    assert problem in server.problem
    assert summary(tmp_path / "run")["run"]["cancelled_requests"] == 2
    assert problem in summary(tmp_path / "run")["about"]["chosen"]["ended by"]


def test_the_end_of_a_server_cuts_the_requests_that_are_open(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", *SIMULATED) as server:

        async def crowd() -> Any:
            task = asyncio.create_task(server.call(COMPLETIONS, {**LONG, "max_tokens": 5000}))
            while b"cbatch:generation_tokens_total 0.0" in server.door.meters.text():
                await asyncio.sleep(0.001)
            server.door.cut()
            return await task

        answer = server.run(crowd())
        assert not answer.is_whole and answer.events[-1]["error"]["code"] == 503
    assert server.summary["about"]["chosen"]["cut"] == "1 requests, as the server ended"
    assert server.summary["run"]["cancelled_requests"] == 1


def test_a_policy_that_cannot_serve_the_longest_request_is_refused(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", "policy=orca", *SIMULATED[1:], "max_tokens=2048") as refused:
        pass
    assert "Orca may compute 8191 tokens at once, max_tokens=2048" in refused.problem
    with in_thread(tmp_path / "short", *SIMULATED, "kv_tokens=4000") as server:
        [model] = server.ask("/v1/models").content["data"]
        assert model["max_model_len"] == 4001, "the last token never enters the KV cache"
        assert server.ask(COMPLETIONS, {"prompt": [1] * 4000, "max_tokens": 1}).status == 200


def test_a_port_in_use_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = new_process("server", *SLOW[:-1], f"port={other.getsockname()[1]}", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("error: bind=127.0.0.1 port=")


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("workload=closed", "workload=closed: clients send"),
        ("time_scale=2", "time_scale=2: real tokens"),
        ("backend.replicas=2", "backend.replicas=2: a server"),
        ("stream=true", "stream, bounds:"),
        ("port=70000", "port=70000: give a whole number"),
    ],
)
def test_settings_that_a_server_has_not_are_refused(tmp_path: Path, argument: str, error: str) -> None:
    ended = command("server", "backend=cpu", "model=tiny", argument, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {error}")


def spoil(body: dict[str, Any], rng: random.Random) -> bytes:
    """Returns a body with a fault in one of its fields, or in its bytes."""
    values = (None, -1, 1e308, 2**70, "", "\0", [], {}, [[]], True, "x" * 300, [{}], [None], {"a": [1]}, 0.5)
    spoiled = dict(body)
    for _ in range(rng.randrange(1, 4)):
        spoiled[
            rng.choice([*body, "stop", "n", "slo", "stream_options", "seed", "top_k", "logprobs", "tools", "zz"])
        ] = rng.choice(values)
    content = bytearray(json.dumps(spoiled).encode())
    if rng.random() < 0.3:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content)


def test_any_body_is_answered(tmp_path: Path) -> None:
    rng = random.Random(0)
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "a b", "max_tokens": 2, "temperature": 0.5, "stream": False, "client": "c"},
        CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "user": "u"},
    }
    with in_thread(tmp_path / "run", *SIMULATED) as server:
        statuses = set()
        for _ in range(1000):
            path = rng.choice([*bodies])
            answer = server.ask(path, spoil(bodies[path], rng))
            statuses.add(answer.status)
            assert answer.status == 200 or answer.content["error"]["code"] == answer.status
        assert statuses == {200, 400}
