"""Real text from a server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from desk import Desk, read
from in_thread import in_thread
from tiny_models import LLAMA, save_model_of_words

from cbatch import FinishReason
from cbatch.model.checkpoint import Vocabulary

COMPLETIONS = "/v1/completions"


def test_a_stop_string_ends_a_text_streamed_or_not(tmp_path: Path) -> None:
    save_model_of_words(tmp_path / "model")
    body = {"prompt": "w3 w14 w15", "max_tokens": 20, "ignore_eos": True}
    model = f"model.path={tmp_path / 'model'}"
    with in_thread(tmp_path / "run", "policy=orca", "backend=cpu", model, "batch=4") as server:
        text = server.ask(COMPLETIONS, body).content["choices"][0]["text"]
        stop = " ".join(text.split()[8:10])[1:]  # begins and ends within tokens
        body["stop"] = ["never", stop]
        stopped, chunks = (
            server.ask(COMPLETIONS, body).content,
            server.ask(COMPLETIONS, {**body, "stream": True}).events,
        )
        assert stopped["choices"][0]["text"] == text[: text.find(stop)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: text.find(stop)]
        assert chunks[-1]["choices"][0]["finish_reason"] == stopped["choices"][0]["finish_reason"] == "stop"
        assert len(chunks) == stopped["usage"]["completion_tokens"] < 20
        answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "w3"}]})
        assert answer.status == 400 and "chat template" in answer.content["error"]["message"]
        long = " ".join(["w3"] * 2000)  # tokenized beside the event loop
        assert server.ask(COMPLETIONS, {"prompt": long}).status == 400
    lines = [json.loads(line) for line in (tmp_path / "run" / "outputs.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["length", "stop", "stop"]
    assert [line["text"] for line in lines] == [text, *[text[: text.find(stop)]] * 2]
    assert server.summary["run"].get("cancelled_requests") is None


def test_a_stop_string_may_begin_before_a_request_moves(tmp_path: Path) -> None:
    """The first token is computed by one replica, the others by another."""
    save_model_of_words(tmp_path / "model")
    body = {"prompt": "w3 w14 w15", "max_tokens": 20, "ignore_eos": True}
    roles = "prefix_cache=true", "backend.pools={p:{role:prefill},d:{role:decode}}"
    model = f"model.path={tmp_path / 'model'}"
    with in_thread(tmp_path / "run", "policy=orca", "backend=cpu", model, "batch=4", *roles) as server:
        text = server.ask(COMPLETIONS, body).content["choices"][0]["text"]
        first, second = text.split()[:2]
        stopped = server.ask(COMPLETIONS, {**body, "stop": f"{first[1:]} {second}"}).content
    assert stopped["choices"][0]["text"] == text[: text.find(first) + 1]
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", [("backend=cpu", "model=tiny"), ("backend=sim",), ("backend=sim", "model.path=model")]
)
def test_an_answer_sent_back_is_found_in_the_cache(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With or without a tokenizer, all but the answer's last token, which was never computed: 63 tokens are 15 blocks."""
    monkeypatch.chdir(tmp_path)
    save_model_of_words(tmp_path / "model")
    prompt = " ".join(f"w{number}" for number in range(32))
    cached = (
        "prefix_cache=true",
        "block_size=4",
        "kv_tokens=4096",
        "batch=4",
        "time_scale=20"[: 99 * ("backend=sim" in arguments)],
    )
    with in_thread(tmp_path / "run", "policy=orca", *filter(None, cached), *arguments) as server:
        first = server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 32}).content
        assert (first["usage"]["prompt_tokens"], first["usage"]["completion_tokens"]) == (32, 32)
        again = f"{prompt}{first['choices'][0]['text']} w3"
        usage = server.ask(COMPLETIONS, {"prompt": again, "max_tokens": 1}).content["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (65, 60)


def test_a_chat_template_of_content_parts_gets_parts(tmp_path: Path) -> None:
    save_model_of_words(tmp_path)
    parts = (
        "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }} {% endif %}{% endfor %}"
    )
    for shown in (parts, "{{ message['content'] }} "):
        (tmp_path / "chat_template.jinja").write_text(f"{{% for message in messages %}}{shown}{{% endfor %}}w9")
        chat = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
        assert Vocabulary(replace(LLAMA, path=str(tmp_path))).encode_chat(chat) == [3, 4, 5, 9]


def test_an_end_token_has_no_text_though_only_generation_config_names_it(tmp_path: Path) -> None:
    save_model_of_words(tmp_path / "model")
    body = {"prompt": "w3 w14 w15", "max_tokens": 20}
    arguments = ("policy=orca", "backend=cpu", f"model.path={tmp_path / 'model'}", "batch=4")
    with in_thread(tmp_path / "first", *arguments) as server:
        words = server.ask(COMPLETIONS, {**body, "ignore_eos": True}).content["choices"][0]["text"].split()
    end = words[-1]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": int(end[1:])}))
    with in_thread(tmp_path / "second", *arguments) as server:
        [choice] = server.ask(COMPLETIONS, body).content["choices"]
        chunks = server.ask(COMPLETIONS, {**body, "stream": True}).events
    text = " ".join(words[: words.index(end)])
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert [json.loads(line)["text"] for line in (tmp_path / "second" / "outputs.jsonl").open()] == [text] * 2


def test_stop_tokens_end_texts_and_words_stand_for_simulated_tokens(tmp_path: Path) -> None:
    save_model_of_words(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 5}')

    async def stream(desk: Desk) -> str:
        answer = await desk.open(prompt="w3 w4 w5", stop=["x"], stream=True)
        await desk.open(prompt="w3", ignore_eos=True)
        [_, part] = await read(answer, lambda: desk.tell({0: 3}, r0=FinishReason.LENGTH))
        return str(json.loads(part["body"].decode().split("data: ")[1])["choices"][0]["text"])

    for backend, text, tokens, strings in (("cpu", "w3", (5,), ("x",)), ("sim", " a", (), ())):
        desk = Desk(f"backend={backend}", f"model.path={tmp_path / 'model'}")
        assert asyncio.run(stream(desk)) == text
        first, second = desk.sent
        assert (first.stop_tokens, first.stop_strings, second.stop_tokens) == (tokens, strings, ())
        assert first.num_prompt_tokens == second.num_prompt_tokens + 2
