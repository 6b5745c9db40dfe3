"""The limits of each field of a body, and the values that ask for nothing."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from cbatch import SLO
from experiments.server.bodies import ChatBody, CompletionBody
from experiments.server.words import Words

DEFAULTS = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "slo": SLO(ttft=0.5)}
LIMITS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, 2**31 - 1], [0, 2**31, 1.5, "1", True]),
    ("temperature", [0, 0.0, 3.5], [-0.1, "1", True]),
    ("top_k", [-1, 0, 2.0, 2**31 - 1], [-2, 2**31, 0.5]),
    ("top_p", [0.1, 1], [0, 1.1]),
    ("seed", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63, 2**70]),
    ("stop", [[], ["a"] * 16, ["a" * 256]], [["a"] * 17, ["a" * 257], [""], [1], 1]),
    ("n", [1, 128], [0, 129]),
    ("priority", [-(2**31), 2**31 - 1], [-(2**31) - 1, 2**31]),
    ("client", ["", "ü" * 512], ["a" * 513, "\n", "\u202e", 1]),
    ("stream", [True, False], [1, "true"]),
    ("predicted_new_tokens", [1], [0]),
]


def read(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"prompt": "a", **fields}), context=DEFAULTS)


@pytest.mark.parametrize(("name", "accepted", "refused"), LIMITS)
def test_limits(name: str, accepted: list[Any], refused: list[Any]) -> None:
    for value in accepted:
        assert getattr(read(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValidationError, match=name):
            read(**{name: value})


@pytest.mark.parametrize("text", ["1e400", "NaN", "-Infinity"])
def test_numbers_are_finite(text: str) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        CompletionBody.model_validate_json(f'{{"prompt": "a", "temperature": {text}}}', context=DEFAULTS)


def test_what_a_body_leaves_out_is_as_in_the_settings() -> None:
    for body in (read(), read(temperature=None, top_k=None, top_p=None, stop=None, n=None)):
        assert (body.temperature, body.top_k, body.top_p, body.stop, body.n) == (0.5, 3, 0.9, [], 1)
        assert (body.priority, body.slo, body.stream, body.ignore_eos) == (0, SLO(ttft=0.5), False, False)
        assert not body.stream_options.include_usage and not body.stream_options.continuous_usage_stats


NEUTRAL = {
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), ([1, 1.0], [0, 2, True])),
    **dict.fromkeys(
        ("skip_special_tokens", "add_special_tokens", "add_generation_prompt", "detokenize"), ([True], [False, 1])
    ),
    **dict.fromkeys(
        ("logit_bias", "tools", "suffix", "echo", "anything"), ([False, 0, 0.0, "", [], {}], [1, "a", [0]])
    ),
    "logprobs": ([False], [0, 1, True]),
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, {}]),
    "tool_choice": (["none", "auto"], ["required"]),
    "parallel_tool_calls": ([True, False], [1]),
    "modalities": ([["text"]], [["audio"], ["text", "audio"]]),
    "service_tier": (["auto", "default"], ["flex"]),
    "stream_options": ([{"include_obfuscation": False}], []),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_supported_may_ask_for_nothing(name: str) -> None:
    accepted, refused = NEUTRAL[name]
    for value in [None, *accepted]:
        assert read(**{name: value}) == read()
    for value in refused:
        with pytest.raises(ValidationError, match=rf"{name}[^ ]*\n.*Extra inputs"):
            read(**{name: value})


def test_prompts_and_messages_become_tokens() -> None:
    words = Words(1000)
    assert read(prompt=["a b", [1, 2]]).encode(words) == [words.encode("a b"), [1, 2]]
    assert read(prompt=[1, 2]).encode(words) == [[1, 2]]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    content = json.dumps({"messages": [{"role": "user", "content": parts}]})
    assert ChatBody.model_validate_json(content, context=DEFAULTS).encode(words) == [words.encode("a b")]
    answer = {"role": "assistant", "content": "c", "annotations": [], "tool_calls": [], "refusal": None}
    body = ChatBody.model_validate({"messages": [answer]}, context=DEFAULTS)
    assert body.encode(words) == [words.encode("c")]
    with pytest.raises(ValidationError, match="tool_calls"):
        ChatBody.model_validate({"messages": [{**answer, "tool_calls": [1]}]}, context=DEFAULTS)


def test_words_stand_for_tokens_without_text() -> None:
    words, texts = Words(50), (" the", " time", " of", " a", " token", " is", " not", " yet")
    assert [len(words.encode(text)) for text in ("a b  c", "a", "")] == [3, 1, 1]
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    assert words.encode_chat(chat) == words.encode("a b c") and 0 <= min(words.encode("\ud800 b c d e")) < 50
    assert [words.push(token) for token in (*range(10), -1)] == [
        *texts,
        " the1",
        " time1",
        " yet",
    ] and not words.finish()
    for size in (50, 8, 128256):
        tokens = [*range(0, size, 1 + size // 999), size - 1]
        assert Words(size).encode("".join(map(words.push, tokens))) == tokens, "an answer is read back as its tokens"
