"""The server as its clients see it, over real sockets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import command, summary, wait_for
from live import QUICK, Live, events, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("server"), *QUICK) as live:
        yield live


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
    (400, "stream_options", {"stream_options": {"include_usage": True}}),
    (400, "logprobs", {"logprobs": 0}),
    (400, "echo", {"echo": True}),
    (400, "frequency_penalty", {"frequency_penalty": 0.1}),
    (400, "tools", {"tools": [{}]}),
    (400, "salt", {"salt": "x"}),
    (404, "model", {"model": "other"}),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_fields_that_are_known_or_change_nothing_are_accepted(server: Live, fields: dict[str, Any]) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
        status, answer = server.ask(path, {"max_tokens": 2, **asked, **fields})
        assert status == 200, answer
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == fields.get("max_completion_tokens", 2)


@pytest.mark.parametrize(("status", "param", "fields"), REFUSED)
def test_other_fields_are_refused_by_name(server: Live, status: int, param: str, fields: dict[str, Any]) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": HELLO})):
        answered, answer = server.ask(path, {**asked, **fields})
        assert (answered, answer["error"]["code"], answer["error"]["param"]) == (status, status, param)


@pytest.mark.parametrize(
    ("status", "path", "body"),
    [
        (200, COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 1}),
        (200, COMPLETIONS, {"prompt": [[1, 2], "two"], "max_tokens": 1}),
        (400, COMPLETIONS, {"prompt": []}),
        (400, COMPLETIONS, {"prompt": ""}),
        (400, COMPLETIONS, {"prompt": [2**31]}),
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
        (413, COMPLETIONS, b" " * 16_000_001),
        (404, "/v1/nothing", {}),
        (405, "/v1/models", {}),
        (200, "/v1/models", None),
        (200, "/health", None),
    ],
)
def test_bodies_and_routes(server: Live, status: int, path: str, body: Any) -> None:
    answered, answer = server.ask(path, body)
    assert answered == status, answer
    assert status == 200 or answer["error"]["code"] == status


def test_a_body_that_a_web_page_may_send_unasked_is_refused(server: Live) -> None:
    status, _ = server.ask(COMPLETIONS, {"prompt": "a"}, **{"Content-Type": "text/plain"})
    assert status == 415


def test_a_stream_has_a_chunk_for_each_token_and_says_what_the_whole_answer_says(server: Live) -> None:
    for path, asked in ((COMPLETIONS, {"prompt": ["a", "b"], "n": 2}), (CHAT, {"messages": HELLO})):
        body = {**asked, "max_tokens": 5}
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(server.send(path, {**body, "stream": True, "stream_options": options}))
        _, whole = server.ask(path, body)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        for choice in whole["choices"]:
            own = [c for chunk in chunks[:-1] for c in chunk["choices"] if c["index"] == choice["index"]]
            assert [c["finish_reason"] for c in own[-5:]] == [None] * 4 + ["length"]
            texts = [c["text"] if path == COMPLETIONS else c["delta"]["content"] for c in own]
            assert "".join(texts) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
            assert len(own) == 5 + (path == CHAT)  # the first of a chat has its role


def test_a_run_of_a_server_is_a_run_folder(tmp_path: Path) -> None:
    with serving(tmp_path, *QUICK, "decisions=true") as live:
        for number in range(3):
            live.send(COMPLETIONS, {"prompt": "a b", "max_tokens": 4, "client": f"c{number}"}).read()
        _, shown = live.ask("/metrics")
        status, printed = live.stop()
    assert status == 0 and "results: run" in printed
    figures = summary(live.folder)
    assert figures["run"]["requests"] == 3
    counted = {line.split()[0]: float(line.split()[1]) for line in shown.splitlines() if line[0] != "#"}
    for name, group in (("time_to_first_token", "ttft_seconds"), ("e2e_request_latency", "end_to_end_seconds")):
        mean = counted[f"cbatch:{name}_seconds_sum"] / counted[f"cbatch:{name}_seconds_count"]
        assert mean == pytest.approx(figures[group]["mean"])
    assert counted["cbatch:generation_tokens_total"] == 12 and counted["cbatch:prompt_tokens_total"] == 6
    assert command("replay", "run", cwd=tmp_path).returncode == 0
    assert command("plot", "latency_cdf", "run", cwd=tmp_path).returncode == 0


def test_what_the_prefix_cache_held_is_in_the_usage_and_in_the_metrics(tmp_path: Path) -> None:
    tiny = ("policy=sarathi_serve", "backend=cpu", "model=tiny", "batch=6", "chunk=16", "port=0")
    with serving(tmp_path, *tiny, "prefix_cache=true", "block_size=4") as live:
        for cached in (0, 16):
            _, answer = live.ask(COMPLETIONS, {"prompt": [*range(20)], "max_tokens": 4, "n": 1})
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        _, shown = live.ask("/metrics")
        assert live.stop()[0] == 0
    assert "cbatch:prefix_cache_queries_total 40.0" in shown and "cbatch:prefix_cache_hits_total 16.0" in shown
    assert summary(live.folder)["prefix_cache"]["hit_share"] == pytest.approx(0.4)


def test_metrics_count_the_tokens_of_those_who_leave(tmp_path: Path) -> None:
    slow = ("policy=sarathi_serve", "backend=sim", "batch=64", "port=0")
    with serving(tmp_path, *slow) as live:
        answer = live.send(COMPLETIONS, {"prompt": "a b c", "max_tokens": 500, "stream": True})
        answer.read(100)
        answer.close()
        wait_for(lambda: 'finished_reason="cancelled"} 1.0' in live.ask("/metrics")[1], live.process)
        _, shown = live.ask("/metrics")
    assert "cbatch:prompt_tokens_total 3.0" in shown and "cbatch:generation_tokens_total 0.0" not in shown
    assert "cbatch:time_to_first_token_seconds_count 0.0" in shown
