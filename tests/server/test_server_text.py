"""Real text from a server."""

import asyncio
import json
from pathlib import Path

from desk import Desk, read
from in_thread import in_thread
from tiny_models import save_model_of_words

from cbatch import FinishReason

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
