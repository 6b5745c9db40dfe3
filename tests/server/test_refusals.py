"""What a server refuses, and what clients are told when it fails or ends."""

import json
import random
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from commands import PATIENCE
from in_thread import in_thread
from live import QUICK, Live, served

from cbatch import CbatchError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")
LONG = {"prompt": "a", "max_tokens": 500, "stream": True}


def test_a_key_is_asked_for_and_not_written(tmp_path: Path) -> None:
    keys = ({}, 401), ({"Authorization": "Bearer s3cre"}, 401), ({"Authorization": "Basic s3cret"}, 401)
    keys += ({"Authorization": "Bearer s3cret"}, 200), ({"Authorization": "bearer s3cret"}, 200)
    with in_thread(tmp_path / "run", *SIMULATED, "api_key=s3cret") as server:
        for key, status in keys:
            assert server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **key).status == status
            assert server.ask("/v1/models", **key).status == status
        assert server.ask("/health").status == server.ask("/metrics").status == 200
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "run").iterdir())


def test_a_request_that_the_policy_rejects_is_answered_with_503(tmp_path: Path) -> None:
    with in_thread(
        tmp_path / "run", "policy=orca", "policy._target_=failing_policies.Refuses", *SIMULATED[1:]
    ) as server:
        for stream in (True, False):
            answer = server.ask(COMPLETIONS, {**LONG, "stream": stream})
            assert answer.status == 503 and "too busy" in answer.content["error"]["message"]
            assert answer.headers["retry-after"] == "1"
    assert server.summary["run"]["rejected_requests"] == 2


def test_a_policy_that_cannot_serve_the_longest_request_is_refused(tmp_path: Path) -> None:
    arguments = ("policy=orca", *SIMULATED[1:], "max_tokens=2048")
    with (
        pytest.raises(CbatchError, match="Orca may compute 8191 tokens at once, max_tokens=2048"),
        in_thread(tmp_path / "run", *arguments),
    ):
        pass
    with in_thread(tmp_path / "short", *SIMULATED, "kv_tokens=4000", "block_size=16") as server:
        [model] = server.ask("/v1/models").content["data"]
        assert model["max_model_len"] == 4001, "the last token never enters the KV cache"
        assert server.ask(COMPLETIONS, {"prompt": [1] * 4000, "max_tokens": 1}).status == 200


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


@pytest.mark.parametrize(("bind", "hosts"), [("::", ["127.0.0.1", "::1"]), ("::1", ["::1"])])
def test_an_ipv6_address_is_in_brackets(bind: str, hosts: list[str], tmp_path: Path) -> None:
    """The address of all interfaces takes IPv4, too."""

    def ask(live: Live) -> list[int]:
        connections = [HTTPConnection(host, live.port, timeout=PATIENCE) for host in hosts]
        for connection in connections:
            connection.request("GET", "/health")
        return [connection.getresponse().status for connection in connections]

    _, statuses = served(tmp_path / "run", ask, *QUICK, f"bind='{bind}'")
    assert statuses == [200] * len(hosts)
