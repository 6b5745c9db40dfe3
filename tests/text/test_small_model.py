"""A real model from real text to real text: the tokens are those of `transformers`' own `generate`. Needs `make model`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import command, summary

from cbatch.model.checkpoint import MADE

FOLDER = MADE.expanduser()
NEW_TOKENS = 24
PROMPTS = [
    "Hi",
    "Name three rivers.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Repeat exactly, nothing else: 你好，世界。今天天气很好。",  # noqa: RUF001
    "Repeat exactly, nothing else: 🎉👩‍👩‍👧🇫🇷",
    "Repeat this sentence: Žluťoučký kůň úpěl ďábelské ódy.",
    "Answer with one emoji for joy.",
    "List three fruits, separated by commas.",
    "def fibonacci(n):\n\treturn",
    "What is 17 + 25?",
    "Translate into German: The house is old.",
    "Explain in one sentence why the sky is blue.",
    "Who wrote Hamlet? One name.",
    "Count from one to five.",
    "Give me a synonym of quick.",
    "Is water wet? Yes or no.",
    "   spaces   and\n\nlines   ",
    "Complete: once upon a time",
    "Summarize: the river crosses the valley, meets the lake, leaves it as a smaller river and reaches the sea after two days.",
]
SETTINGS = {
    "sync": ("runtime=sync", "chunk=7"),
    "async": ("chunk=16",),
    "tensor_parallel": ("backend.tensor_parallel=3",),
    "pipeline": ("backend.pipeline_stages=2", "chunk=32"),
    "preempting": ("policy=vllm_v1", "kv_tokens=256"),
}


@pytest.fixture(autouse=True)
def _only_at_night(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes minutes, and the checkpoint of `make model`")


@cache
def generated() -> list[tuple[list[int], str]]:
    """Returns the new tokens of each prompt, and their text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModelForCausalLM.from_pretrained(FOLDER)
    outputs = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            whole = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        new = whole[inputs["input_ids"].shape[1] :].tolist()
        outputs.append((new, tokenizer.decode(new, skip_special_tokens=True)))
    return outputs


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prompts = (
        "workload=prompts",
        "workload.path=prompts.jsonl",
        f"workload.max_new_tokens={NEW_TOKENS}",
        "progress=off",
    )
    run = ("run", "backend=cpu", f"model.path={FOLDER}", "batch=6", *prompts, *SETTINGS[name], "output=out")
    done = command(*run, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    outputs = [json.loads(line) for line in (tmp_path / "out" / "outputs.jsonl").read_text().splitlines()]
    assert [(output["output"], output["text"]) for output in outputs] == generated()
    assert {output["finish_reason"] for output in outputs} == {"stop", "length"}
    assert all((output["finish_reason"] == "stop") == (output["output"][-1] == 2) for output in outputs)
    assert (summary(tmp_path / "out")["run"]["preemptions"] > 0) == (name == "preempting")
