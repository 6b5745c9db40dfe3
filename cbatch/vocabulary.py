"""The token ids of a model, and its tokenizer if it has one."""

from collections.abc import Sequence
from functools import cached_property
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
        """Raises ModelError if the checkpoint's files are missing or malformed."""
        self.size = spec.vocab_size
        self.stop_tokens: tuple[int, ...] = () if spec.path is None else stop_tokens_of(spec.path)
        self._name, self._path = spec.name, spec.path

    def encode(self, text: str) -> list[int]:
        """Raises ModelError if the model has no tokenizer."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Raises ModelError if the model has no tokenizer."""
        return str(self._tokenizer.decode(list(ids)))

    @cached_property
    def _tokenizer(self) -> Any:
        """Loaded at the first use: most workloads are token ids."""
        give = "give prompts as token ids"
        if self._path is None:
            raise ModelError(f"model {self._name} has random weights and no tokenizer; {give}, or set model.path")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        except Exception as error:
            why = f"its tokenizer cannot be loaded ({' '.join(str(error).split())})"
            raise ModelError(f"model.path={self._path}: {why}; add the tokenizer's files, or {give}") from error
