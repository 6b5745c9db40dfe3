"""What clients may ask for, and what they are answered."""

from collections.abc import Iterator
from typing import Any

import pytest
from in_thread import InThread, in_thread

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("server") / "run", *SIMULATED) as running:
        yield running


ACCEPTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.0, "logprobs": None, "stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stop": ["a", "b"], "client": "c", "session": "s", "tier": "t", "slo": {"ttft": 1}, "priority": -3},
    {"predicted_new_tokens": 3, "max_completion_tokens": 3, "max_tokens": 5, "model": "llama-3.1-8b"},
]
REFUSED: list[tuple[int, str, dict[str, Any]]] = [
    (400, "max_tokens", {"max_tokens": 9000}),
    (400, "temperature", {"temperature": -0.1}),
    (400, "slo", {"slo": {"ttft": 0}}),
    (400, "stop", {"stop": [""]}),
    (400, "stream_options", {"stream_options": {"usage": True}}),
    (400, "echo", {"echo": True}),
    (404, "model", {"model": "other"}),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_fields_that_are_known_or_change_nothing_are_accepted(server: InThread, fields: dict[str, Any]) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
        answer = server.ask(path, {"max_tokens": 2, **asked, **fields})
        assert answer.status == 200, answer
        assert answer.content["choices"][0]["finish_reason"] == "length"
        assert answer.content["usage"]["completion_tokens"] == fields.get("max_completion_tokens", 2)


@pytest.mark.parametrize(("status", "param", "fields"), REFUSED)
def test_other_fields_are_refused_by_name(server: InThread, status: int, param: str, fields: dict[str, Any]) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
        answer = server.ask(path, {**asked, **fields})
        error = answer.content["error"]
        assert (answer.status, error["code"], error["param"]) == (status, status, param)
        assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("status", "path", "body"),
    [
        (200, COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 1}),
        (200, COMPLETIONS, {"prompt": [[1, 2], "two"], "max_tokens": 1}),
        (200, COMPLETIONS, {"prompt": [0, 128255], "max_tokens": 1}),
        (400, COMPLETIONS, {"prompt": [128256], "max_tokens": 1}),
        (400, COMPLETIONS, {"prompt": []}),
        (400, COMPLETIONS, {"prompt": ""}),
        (400, COMPLETIONS, {"prompt": [-1]}),
        (400, COMPLETIONS, {"prompt": [2**31]}),
        (400, COMPLETIONS, {"prompt": [True]}),
        (200, COMPLETIONS, {"prompt": ["a"] * 128, "max_tokens": 1}),
        (400, COMPLETIONS, {"prompt": ["a"] * 129}),
        (400, COMPLETIONS, {}),
        (200, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1}),
        (400, CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (400, CHAT, {"messages": [{"role": "banana", "content": "a"}]}),
        (400, CHAT, {"messages": []}),
        (400, COMPLETIONS, b"{"),
        (400, COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
        (400, COMPLETIONS, b"[" * 10_000),
        (400, COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (200, COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}' + b" " * (16_000_000 - 32)),
        (413, COMPLETIONS, b" " * 16_000_001),
        (404, "/v1/nothing", {}),
        (405, "/v1/models", {}),
        (200, "/health", None),
    ],
)
def test_bodies_and_routes(server: InThread, status: int, path: str, body: Any) -> None:
    answer = server.ask(path, body)
    assert answer.status == status, answer
    assert status == 200 or answer.content["error"]["code"] == status


def test_a_body_that_a_web_page_may_send_unasked_is_refused(server: InThread) -> None:
    assert server.ask(COMPLETIONS, {"prompt": "a"}, **{"Content-Type": "text/plain"}).status == 415
    assert (
        server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **{"Content-Type": "Application/JSON; a=b"}).status
        == 200
    )


def test_the_model_is_named_with_the_most_tokens_of_a_request(server: InThread) -> None:
    [model] = server.ask("/v1/models").content["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("llama-3.1-8b", "llama-3.1-8b", 8192)
