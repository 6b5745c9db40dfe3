"""Words in place of a tokenizer, for models without one: a token of a prompt is a word, and an output is made of a few words."""

from collections.abc import Sequence
from itertools import count
from zlib import crc32

_WORDS = (" the", " time", " of", " a", " token", " is", " not", " yet")


class Words:
    """Converts text to token ids and back. size: of the vocabulary."""

    stop_tokens: tuple[int, ...] = ()

    def __init__(self, size: int) -> None:
        self._size = size

    def encode(self, text: str) -> list[int]:
        """Returns an id for each word, at least one."""
        return [crc32(word.encode(errors="replace")) % self._size for word in text.split() or [""]]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(f"{message['role']}: {message['content']}" for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(_WORDS[id_ % len(_WORDS)] for id_ in ids)

    def output(self, stops: Sequence[str]) -> "Output":
        return Output()


class Output:
    """The text of an output. Stop strings are not looked for, as it has no meaning."""

    def __init__(self) -> None:
        self._number = count()

    def push(self, token: int) -> tuple[str, bool]:
        """Returns the text that the token adds, and whether a stop string has ended the text. A negative one stands for any."""
        place = next(self._number) if token < 0 else token
        return _WORDS[place % len(_WORDS)], False

    def finish(self) -> str:
        """Returns what was held back."""
        return ""
