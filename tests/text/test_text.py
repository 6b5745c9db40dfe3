"""Text in and out: messages become tokens once, tokens become text as they come, whatever the tokenizer's kind."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any
from weakref import ref

import pytest
from tiny_models import LLAMA
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from cbatch import ConfigError, Request, RequestSpec, WorkloadError
from cbatch.errors import ModelError
from cbatch.model.checkpoint import Vocabulary
from cbatch.validation import read
from experiments.text import OutputText, ends_text, up_to_stop
from experiments.workloads.prompts import PromptLine

CONTROL = ["<s>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "The river meets the lake.  It is so.\n\n\tA tab, and spaces   ",
    "Žluťoučký kůň úpěl ďábelské ódy",
    "你好、世界。今天天气很好。",
    "🎉👩‍👩‍👧🇫🇷 ok",
    " a true replacement \ufffd\ufffd character",
    "ภาษาไทย हिन्दी",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As LLaMA-2's: characters that are no tokens become a token per byte, and spaces begin words."""
    letters = [*CONTROL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,T你"]
    tokenizer = Tokenizer(
        models.BPE({text: id_ for id_, text in enumerate(letters)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request: Any, tmp_path_factory: Any) -> Vocabulary:
    folder, tokenizer = tmp_path_factory.mktemp(request.param), KINDS[request.param]()
    bos = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHAT
    )
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    made = Vocabulary(replace(LLAMA, path=str(folder)))
    assert made.stop_tokens == (2, 1) and [*made.control_tokens.values()][:3] == CONTROL
    return made


def read_messages(messages: Any) -> list[dict[str, str]]:
    line = read(PromptLine, {"messages": messages, "max_new_tokens": 1})
    return [vars(message) for message in line.messages or ()]


def streamed(vocabulary: Vocabulary, tokens: Sequence[int], *stops: str) -> tuple[str, bool]:
    output, parts = OutputText(vocabulary, stops), []
    for token in tokens:
        parts.append(output.push(token))
        if output.is_stopped:
            break
    return "".join([*parts, output.finish()]), output.is_stopped


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_comes_with_the_tokens_and_is_that_of_the_tokenizer(text: str, vocabulary: Vocabulary) -> None:
    """Parts of characters are held back, control tokens left out; the end may be within a character."""
    tokens = vocabulary.encode(text)[1:]
    output, shown = OutputText(vocabulary), ""
    for end, token in enumerate(tokens):
        cut, so_far = streamed(vocabulary, [2, *tokens[:end], 1])[0], vocabulary.decode(tokens[:end])
        if so_far.endswith("\ufffd") and ends_are_taken_back(vocabulary):
            assert cut.rstrip("\ufffd") == shown.rstrip("\ufffd")
        else:
            assert cut == so_far
        shown += output.push(token)
        assert text.startswith(shown)
    assert shown + output.finish() == vocabulary.decode(tokens) == text


def ends_are_taken_back(vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer decodes all bytes before a part of a character as parts of characters."""
    return "byte_fallback" in str(vocabulary._path)


def test_any_tokens_are_converted(vocabulary: Vocabulary) -> None:
    """Also bytes that are no characters. Only a tokenizer with byte fallback takes back shown text, which then differs from the whole text."""
    numbers = random.Random(0)
    size = vocabulary._tokenizer.vocab_size
    assert size > 256
    for length in [1, 3, 10, 40] * 200 + [10_000]:
        low = numbers.choice([0, size // 2])
        tokens = [numbers.randrange(low, size) for _ in range(length)]
        text, _ = streamed(vocabulary, tokens)
        whole = vocabulary.decode(tokens)
        if "\ufffd" not in whole or not ends_are_taken_back(vocabulary):
            assert text == whole
    (lead,) = [token for token in range(size) if vocabulary._tokenizer.convert_ids_to_tokens(token) in ("ð", "<0xF0>")]
    assert set(streamed(vocabulary, [lead] * 1000)[0]) == {"\ufffd"}


def test_a_chat_has_its_special_tokens_once(vocabulary: Vocabulary) -> None:
    messages = read_messages(
        [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    )
    ids = vocabulary.encode_chat(messages)
    rendered = "<s><|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(0) == 1 and ids == vocabulary.encode(rendered)
    assert vocabulary.encode("a b").count(0) == 1
    controls = [token for token in ids if token in vocabulary.control_tokens]
    assert controls == [0, 1, 2, 1]


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages=[]: List should have at least 1 item"),
    ("hello", "messages=hello: Input should be a valid list"),
    ([{"content": "a"}], "messages[0].role: is missing"),
    ([{"role": "user"}], "messages[0].content: is missing"),
    (
        [{"role": "user", "content": "a"}, {"role": "banana", "content": "a"}],
        "messages[1].role=banana: give 'system', 'user'",
    ),
    ([{"role": "user", "content": "a", "tool_calls": [1]}], "messages[0].tool_calls: is not supported"),
    (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages[0].content=[{'type': 'image_url'}]: give a text",
    ),
    (["x"], "messages[0]=x: Input should be a valid dictionary"),
]


@pytest.mark.parametrize(("messages", "problem"), BAD_MESSAGES)
def test_bad_messages(messages: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_messages(messages)
    assert str(caught.value).startswith(problem)


def test_null_keys_of_messages_pass_and_templates_may_refuse(vocabulary: Vocabulary) -> None:
    assert read_messages([{"role": "user", "content": "a", "name": None}]) == [{"role": "user", "content": "a"}]
    tokenizer = vocabulary._tokenizer
    for template, error in ((None, ModelError), ("{{ raise_exception('alternate!') }}", WorkloadError)):
        tokenizer.chat_template = template
        with pytest.raises(error):
            vocabulary.encode_chat([{"role": "user", "content": "a"}])
    tokenizer.chat_template = CHAT


def test_stop_strings_end_wherever_tokens_begin(vocabulary: Vocabulary) -> None:
    """Every part of a text is found as a stop string, and nothing of it is shown before."""
    text = "a lake, ale 你好. the last"
    tokens = vocabulary.encode(text)[1:]
    for begin in range(len(text)):
        for size in (1, 2, 5):
            stop = text[begin : begin + size]
            assert streamed(vocabulary, tokens, "never", stop, "xyz") == (text[: text.find(stop)], True)
    assert streamed(vocabulary, tokens, "last!", "the lasting") == (text, False), "held back, and shown in the end"
    output = OutputText(vocabulary, ["lakes", "z"])
    parts = [output.push(token) for token in tokens]
    assert "".join(parts) == text and parts[-1], "only what may begin a stop string is held back"


def test_the_stop_string_that_ends_first_counts(vocabulary: Vocabulary) -> None:
    for stops in permutations(["b cd", "c", "zz"]):
        assert up_to_stop("a b cd", stops) == ("a b ", True)
    assert up_to_stop("a b cd", ["bc", "x"]) == ("a b cd", False)
    assert up_to_stop("abc", ["bc", "abc"]) == ("a", True)
    assert up_to_stop("abc", ["abc", "bc"]) == ("", True)
    tokens = [*vocabulary.encode("a lak")[1:], 2, *vocabulary.encode("e")[1:]]
    assert streamed(vocabulary, tokens, "lakes", "<|im_end|>") == ("a lak", True), "a control token's text"
    assert streamed(vocabulary, tokens, "im_end")[1] is False


def test_the_token_that_completes_a_stop_string_ends_its_request(vocabulary: Vocabulary) -> None:
    ends, tokens = ends_text(vocabulary), vocabulary.encode("a lake, ale")[1:]
    stopped, other = (
        Request.from_spec(RequestSpec(id_, 1, 9, stop_strings=stops)) for id_, stops in enumerate([("lake",), ("zz",)])
    )
    ended = [(ends(stopped, token), ends(other, token)) for token in tokens]
    first = next(end for end in range(len(tokens)) if "lake" in vocabulary.decode(tokens[: end + 1]))
    assert ended[:first] == [(False, False)] * first and ended[first] == (True, False)


def test_nothing_is_kept_of_the_text_of_requests_that_have_ended(vocabulary: Vocabulary) -> None:
    """Else the stop strings of all requests of a server stay in memory: up to 0.7 MB each."""
    ends, (token, *_) = ends_text(vocabulary), vocabulary.encode("a lake")[1:]
    first, second = (Request.from_spec(RequestSpec(id_, 1, 9, stop_strings=("zz",))) for id_ in range(2))
    ends(first, token)
    first.finished_at, known = 1.0, ref(first)
    del first
    ends(second, token)
    assert known() is None
