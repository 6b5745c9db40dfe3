"""Words in place of text, for models without a tokenizer and for simulated tokens, which have no values."""

from collections.abc import Mapping, Sequence
from zlib import crc32

_WORDS = (" the", " time", " of", " a", " token", " is", " not", " yet")


class Words:
    """A vocabulary of `size` words, with the methods of both `Vocabulary` and `OutputText`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def encode(self, text: str) -> list[int]:
        """Returns one id per word, and at least one id."""
        return [crc32(word.encode(errors="replace")) % self._size for word in text.split() or [""]]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def push(self, token: int) -> str:
        return _WORDS[token % len(_WORDS)]

    def finish(self) -> str:
        return ""
