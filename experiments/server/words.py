"""Words in place of text, for models without a tokenizer and for simulated tokens, which have no values."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from zlib import crc32

from cbatch.kv.hashes import SIMULATED_TOKEN
from cbatch.model.checkpoint import Vocabulary

_WORDS = ("the", "time", "of", "a", "token", "is", "not", "yet")
_ANSWERED = re.compile(rf"({'|'.join(_WORDS)})(\d{{0,9}})")


class Words:
    """A vocabulary of `size` words, with the methods of both `Vocabulary` and `OutputText`. An answer, sent back, is the same tokens."""

    def __init__(self, size: int) -> None:
        self._size = size

    def encode(self, text: str) -> list[int]:
        """Returns one id per word, and at least one id."""
        return [self._id(word) for word in text.split() or [""]]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(" ".join(message["content"] for message in messages))

    def push(self, token: int) -> str:
        """Returns the word of a token; -1 is a simulated one."""
        number, kind = divmod(SIMULATED_TOKEN if token < 0 else token, len(_WORDS))
        return f" {_WORDS[kind]}{number or ''}"

    def finish(self) -> str:
        return ""

    def _id(self, word: str) -> int:
        if answered := _ANSWERED.fullmatch(word):
            return (int(answered[2] or 0) * len(_WORDS) + _WORDS.index(answered[1])) % self._size
        return crc32(word.encode(errors="replace")) % self._size


class SimulatedVocabulary(Vocabulary):
    """The tokenizer of a checkpoint, to which the word of simulated answers is `SIMULATED_TOKEN`."""

    def encode(self, text: str) -> list[int]:
        return self._simulated(super().encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._simulated(super().encode_chat(messages))

    def _simulated(self, ids: list[int]) -> list[int]:
        return [SIMULATED_TOKEN if id_ in self._answered else id_ for id_ in ids]

    @cached_property
    def _answered(self) -> set[int]:
        """The ids of the word, after a space or at the beginning of an answer."""
        from tokenizers import AddedToken

        word = Words(self.size).push(-1)
        forms = [AddedToken(word, normalized=False), AddedToken(word.strip(), single_word=True, normalized=False)]
        self._tokenizer.add_tokens(forms)
        return {*self._tokenizer.convert_tokens_to_ids([word, word.strip()])}

    @cached_property
    def _tokenizer(self) -> Any:
        return super()._tokenizer
