"""What clients may ask for, and what they are answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from in_thread import InThread, in_thread

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SIMULATED = ("policy=sarathi_serve", "backend=sim", "time_scale=20", "batch=64")
TINY = ("policy=sarathi_serve", "backend=cpu", "model=tiny", "batch=6", "chunk=16")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("server") / "run", *SIMULATED) as running:
        yield running


ACCEPTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.0, "logprobs": None, "n": 1, "echo": False, "best_of": 1, "logit_bias": {}, "tools": []},
    {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "suffix": "",
        "anything": None,
    },
    {"stop": "\n", "seed": -1, "top_k": -1, "top_p": 0.5, "temperature": 1.5, "ignore_eos": True, "user": "ü"},
    {"stop": ["a", "b"], "client": "c", "session": "s", "tier": "t", "slo": {"ttft": 1}, "priority": -3},
    {"predicted_new_tokens": 3, "max_completion_tokens": 3, "max_tokens": 5, "model": "llama-3.1-8b"},
]
REFUSED: list[tuple[int, str, dict[str, Any]]] = [
    (400, "max_tokens", {"max_tokens": 0}),
    (400, "max_tokens", {"max_tokens": 9000}),
    (400, "max_tokens", {"max_tokens": True}),
    (400, "temperature", {"temperature": -0.1}),
    (400, "top_p", {"top_p": 0}),
    (400, "n", {"n": 129}),
    (400, "stop", {"stop": [""]}),
    (400, "seed", {"seed": 2**63}),
    (400, "slo", {"slo": {"ttft": 0}}),
    (400, "slo", {"slo": {"first": 1}}),
    (400, "client", {"client": "x" * 65}),
    (400, "client", {"client": "line\nbreak"}),
    (400, "stream_options", {"stream_options": {"usage": True}}),
    (400, "logprobs", {"logprobs": 0}),
    (400, "echo", {"echo": True}),
    (400, "frequency_penalty", {"frequency_penalty": 0.1}),
    (400, "tools", {"tools": [{}]}),
    (400, "salt", {"salt": "x"}),
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
    for prompt, new, status in ((8000, 192, 200), (8191, 1, 200), (8191, 2, 400), (8192, None, 400)):
        body = {"prompt": [1] * prompt, **({"max_tokens": new} if new else {})}
        assert server.ask(COMPLETIONS, body).status == status
    whole = server.ask(COMPLETIONS, {"prompt": [1] * 8000}).content
    assert whole["usage"]["completion_tokens"] == 192, "what fits, where it is less than max_new_tokens"


def test_a_stream_has_a_chunk_for_each_token_and_says_what_the_whole_answer_says(server: InThread) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": ["a", "b"], "n": 2}), (CHAT, {"messages": HELLO})):
        body, kind = {**asked, "max_tokens": 5}, "chat.completion" if path == CHAT else "text_completion"
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = server.ask(path, {**body, "stream": True, "stream_options": options})
        chunks, whole = answer.events, server.ask(path, body).content
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert {chunk["object"] for chunk in chunks} == {kind + ".chunk" * (path == CHAT)} and whole["object"] == kind
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        counted = [chunk["usage"]["completion_tokens"] for chunk in chunks[:-1] if "usage" in chunk]
        assert counted == sorted(counted) and {*counted} == {*range(1, counted[-1] + 1)}
        assert len(whole["choices"]) == (4 if path == COMPLETIONS else 1)
        for index, choice in enumerate(whole["choices"]):
            own = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]]
            assert choice["index"] == index and choice["finish_reason"] == "length"
            assert [c["finish_reason"] for c in own[-5:]] == [None] * 4 + ["length"]
            texts = [c["text"] if path == COMPLETIONS else c["delta"]["content"] for c in own]
            assert "".join(texts) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
            assert len(own) == 5 + (path == CHAT)  # the first of a chat has its role
        if path == CHAT:
            assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant", None]
            assert whole["choices"][0]["message"]["role"] == "assistant"


def test_a_stream_says_no_more_than_was_asked_for(server: InThread) -> None:
    chunks = server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True}).events
    assert len(chunks) == 3 and not any("usage" in chunk for chunk in chunks)


def test_equal_seeds_draw_equal_tokens_and_choices_of_one_prompt_differ(tmp_path: Path) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 2.0}
    with in_thread(tmp_path / "run", *TINY) as server:
        for asked in ({"seed": 5}, {"seed": -1, "top_k": 40, "top_p": 0.9}):
            first, again = (server.ask(COMPLETIONS, {**body, **asked, "n": 2}).content["choices"] for _ in range(2))
            assert first == again and first[0]["text"] != first[1]["text"]
        assert server.ask(COMPLETIONS, {**body, "n": 1}).content != server.ask(COMPLETIONS, {**body, "n": 1}).content
        greedy = {server.ask(COMPLETIONS, {**body, "temperature": 0}).content["choices"][0]["text"] for _ in range(2)}
        first_only = server.ask(COMPLETIONS, {**body, "top_k": 1}).content["choices"][0]["text"]
        assert greedy == {first_only}


def test_what_policies_read_is_in_the_run(tmp_path: Path) -> None:
    asked = {"session": "s", "tier": "t", "priority": 3, "slo": {"ttft": 1, "total": 2}, "predicted_new_tokens": 7}
    with in_thread(tmp_path / "run", *SIMULATED) as server:
        server.ask(COMPLETIONS, {"prompt": "a b", "max_tokens": 4, "client": "c", "user": "u", **asked})
        server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "u"})
    rows = pd.read_csv(tmp_path / "run" / "requests.csv")
    assert rows.client.tolist() == ["c", "u"] and rows.prompt_tokens.tolist() == [2, 1]
    named = ("session", "tier", "priority", "slo_ttft_seconds", "slo_total_seconds", "predicted_new_tokens")
    assert rows.loc[0, [*named]].tolist() == ["s", "t", 3, 1, 2, 7]
    assert rows.loc[0, "output_tokens"] == 4 and server.summary["run"]["requests"] == 2


def test_usage_counts_what_the_prefix_cache_held(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", *SIMULATED, "prefix_cache=true", "block_size=4") as server:
        for cached in (0, 16):
            answer = server.ask(COMPLETIONS, {"prompt": [*range(20)], "max_tokens": 4, "n": 2}).content
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
