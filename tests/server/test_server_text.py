"""Real text from a server whose engine has a process of its own."""

import json
from pathlib import Path

from commands import summary
from live import events, serving
from tiny_models import save_model_of_words

COMPLETIONS = "/v1/completions"


def test_a_stop_string_ends_a_text_streamed_or_not(tmp_path: Path) -> None:
    save_model_of_words(tmp_path / "model")
    body = {"prompt": "w3 w14 w15", "max_tokens": 20, "ignore_eos": True}
    with serving(tmp_path, "policy=orca", "backend=cpu", "model.path=model", "batch=4", "port=0") as live:
        _, whole = live.ask(COMPLETIONS, body)
        text = whole["choices"][0]["text"]
        stop = " ".join(text.split()[8:10])[1:]  # begins and ends within tokens
        body["stop"] = ["never", stop]
        _, stopped = live.ask(COMPLETIONS, body)
        chunks = events(live.send(COMPLETIONS, {**body, "stream": True}))
        assert stopped["choices"][0]["text"] == text[: text.find(stop)]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text[: text.find(stop)]
        assert chunks[-1]["choices"][0]["finish_reason"] == stopped["choices"][0]["finish_reason"] == "stop"
        assert len(chunks) == stopped["usage"]["completion_tokens"] < 20
        status, answer = live.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "w3"}]})
        assert status == 400 and "chat template" in answer["error"]["message"]
        assert live.stop()[0] == 0
    lines = [json.loads(line) for line in (live.folder / "outputs.jsonl").read_text().splitlines()]
    assert [line["finish_reason"] for line in lines] == ["length", "stop", "stop"]
    assert [line["text"] for line in lines] == [text, *[text[: text.find(stop)]] * 2]
    assert summary(live.folder)["run"].get("cancelled_requests") is None
