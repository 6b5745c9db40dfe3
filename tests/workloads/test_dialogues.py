"""Conversations of a prompt file in closed loop: each turn's prompt holds the model's own answers, as text through the chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from schedules import UnitCost
from tiny_models import LLAMA, make_executor

from cbatch import FinishReason, KVSize, Limits, Request, Server, WorkloadError
from experiments.workloads import PromptFile
from policies.evictions import LRU
from policies.orca import Orca


class Characters:
    """A vocabulary of a token per character, whose chat template is `user:text;` for each message, then `a:`."""

    size, stop_tokens = LLAMA.vocab_size, ()

    def encode(self, text: str) -> list[int]:
        return [ord(character) - 32 for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(32 + token) for token in ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self.encode("".join(f"{each['role'][0]}:{each['content']};" for each in messages) + "a:")


def write(folder: Path, *lines: Mapping[str, Any]) -> str:
    file = folder / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


def says(text: str, **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_new_tokens": 4, **keys}


def serve(path: str, asynchronous: bool = True, cached: bool = True, **keys: Any) -> list[Request]:
    vocabulary: Any = Characters()
    limits = Limits(3, 128, 128)
    server = Server(make_executor(LLAMA, limits, 96, 4), limits, UnitCost(), KVSize(96, 4), asynchronous)
    engine = Server(**{**vars(server), "prefix_cache": LRU() if cached else None}).engine(
        Orca(), PromptFile(path=path, closed=True, **keys).within(128).source(vocabulary)
    )
    requests = sorted(engine.run().requests, key=lambda each: each.id)
    server.close()
    return requests


@pytest.mark.parametrize(("asynchronous", "cached"), [(False, True), (True, True), (True, False)])
def test_a_turn_holds_the_answer_before_as_text(asynchronous: bool, cached: bool, tmp_path: Path) -> None:
    """Two conversations interleave in the file; a single prompt belongs to none."""
    system = {"role": "system", "content": "be"}
    lines = [
        says("one", session="s"),
        says("x", session="t"),
        says("two", session="s", pause=0.01),
        {"prompt": "alone", "max_new_tokens": 4},
    ]
    lines += [{**says("y", session="t"), "messages": [system, *says("y")["messages"]]}, says("three", session="s")]
    made = serve(write(tmp_path, *lines), asynchronous, cached)
    text = Characters().decode
    answers = [text(each.output) for each in made]
    assert [text(each.prompt or ()) for each in made] == [
        "u:one;a:",
        "u:x;a:",
        f"u:one;a:{answers[0]};u:two;a:",
        "alone",
        f"u:x;a:{answers[1]};s:be;u:y;a:",
        f"u:one;a:{answers[0]};u:two;a:{answers[2]};u:three;a:",
    ]
    assert made[2].arrival_time == (made[0].finished_at or 0.0) + 0.01
    assert made[5].arrival_time == made[2].finished_at
    assert [each.follows for each in made] == [(), (), (0,), (), (1,), (2,)]
    assert [(each.turn, each.last, each.pause) for each in made[2:4]] == [(1, False, 0.01), (None, None, None)]
    assert not cached or made[5].num_cached_tokens >= len(made[2].prompt or ()) // 4 * 4


def test_a_stop_string_is_no_part_of_the_answer(tmp_path: Path) -> None:
    whole = Characters().decode(serve(write(tmp_path, says("hi", max_new_tokens=8)))[0].output)
    stop = whole[3:5]
    lines = [says("hi", max_new_tokens=8, session="s", stop=stop), says("on", session="s")]
    first, second = serve(write(tmp_path, *lines))
    assert first.finish_reason is FinishReason.LENGTH, "stop strings are not looked for here"
    assert Characters().decode(second.prompt or ()) == f"u:hi;a:{whole[: whole.index(stop)]};u:on;a:"


def test_a_conversation_ends_before_a_turn_that_is_too_long(tmp_path: Path) -> None:
    lines = [says("a" * 50, session="s"), says("b" * 80, session="s"), says("c", session="s"), says("d" * 200)]
    path = write(tmp_path, *lines)
    assert [each.id for each in serve(path, too_long="clip")] == [0]
    with pytest.raises(WorkloadError, match="exceed the 128 positions"):
        serve(path)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"prompt": "x", "session": "s"}, "line 2: is a later turn of session s; give messages"),
        (says("x", session="s", arrival_time=1.0), "pause in place of arrival_time"),
        (says("x", session="t", pause=1.0), "line 2: pause is of later turns"),
    ],
)
def test_lines_that_cannot_be_turns_are_named(second: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message):
        serve(write(tmp_path, says("one", session="s"), second))
