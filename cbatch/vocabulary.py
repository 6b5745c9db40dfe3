"""The token ids of a model, and its tokenizer if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbatch.checkpoint import stop_tokens_of
from cbatch.errors import ModelError
from cbatch.model import ModelSpec


class Vocabulary:
    """What a workload needs to generate prompts.

    size: token ids are 0 to size - 1.
    stop_tokens: ids that end a request; none for a model with random weights.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """
        Raises:
            ModelError: the checkpoint's files are missing or malformed.
        """
        self.size = spec.vocab_size
        self.stop_tokens: tuple[int, ...] = () if spec.path is None else stop_tokens_of(spec.path)
        self._name, self._path = spec.name, spec.path
        self._loaded: Any = None

    def encode(self, text: str) -> list[int]:
        """
        Raises:
            ModelError: the model has no tokenizer.
        """
        ids: list[int] = self._tokenizer().encode(text)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """
        Raises:
            ModelError: the model has no tokenizer.
        """
        text: str = self._tokenizer().decode(list(ids))
        return text

    def _tokenizer(self) -> Any:
        """Loaded at the first use: most workloads are token ids."""
        if self._path is None:
            raise ModelError(
                f"model {self._name} has random weights and no tokenizer; give prompts as token ids, or set model.path"
            )
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
            except Exception as error:
                raise ModelError(
                    f"model.path={self._path}: its tokenizer cannot be loaded ({' '.join(str(error).split())}); "
                    "add the tokenizer's files, or give prompts as token ids"
                ) from error
        return self._loaded
