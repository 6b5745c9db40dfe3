"""Words in place of text, for models without a tokenizer, and for simulated tokens, which have no values."""

from collections.abc import Sequence
from zlib import crc32

_WORDS = (" the", " time", " of", " a", " token", " is", " not", " yet")


class Words:
    """A vocabulary of so many words, as `cbatch.model.checkpoint.Vocabulary`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def encode(self, text: str) -> list[int]:
        """Returns an id for each word, at least one."""
        return [crc32(word.encode(errors="replace")) % self._size for word in text.split() or [""]]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(_WORDS[id_ % len(_WORDS)] for id_ in ids)


class Placeholder:
    """The text of an output without a tokenizer, as `experiments.text.OutputText`. Stop strings are not looked for in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._number = -1

    def push(self, token: int) -> tuple[str, bool]:
        """Returns a word, and that the output goes on. token: -1 stands for any."""
        self._number += 1
        return _WORDS[(self._number if token < 0 else token) % len(_WORDS)], False

    def finish(self) -> str:
        return ""
