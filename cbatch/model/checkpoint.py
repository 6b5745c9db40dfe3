"""Reads the shape and the vocabulary of a model from a local checkpoint folder, without loading torch.

`cbatch.runtime.weights` loads the weights.
"""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cbatch.errors import ModelError
from cbatch.model.spec import DTYPE_BYTES, ModelSpec

CHECKPOINT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_NO_WINDOW = 2**31 - 1
_VARYING_ROPE = ("dynamic", "longrope")  # rotate by the longest position of a batch, so results depend on the batch


def spec_from_checkpoint(path: str | Path) -> ModelSpec:
    """Returns the shape of the model in a checkpoint folder, from its config.json.

    `max_positions` is at most the sliding window: up to there windowed attention is plain attention.

    Raises:
        ModelError: the folder or its config.json is missing, malformed, or describes a model that cannot be run here.
    """
    file = Path(path) / "config.json"
    config = _read(file)
    family = config.get("model_type")
    if family not in CHECKPOINT_FAMILIES:
        raise ModelError(f"{file}: model_type {family!r} is not supported; use one of {', '.join(CHECKPOINT_FAMILIES)}")
    if "quantization_config" in config:
        raise ModelError(f"{file}: quantized checkpoints are not supported; use one in {', '.join(DTYPE_BYTES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type in _VARYING_ROPE:
        raise ModelError(f"{file}: rope type {rope_type!r} is not supported; use default, linear, yarn or llama3")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"{file}: dtype {dtype!r} is not supported; use a checkpoint in {', '.join(DTYPE_BYTES)}")
    size = partial(_size, file, config)
    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    return ModelSpec(
        name=file.parent.resolve().name,
        family=family,
        num_layers=size("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        intermediate_size=size("intermediate_size"),
        vocab_size=size("vocab_size"),
        max_positions=min(size("max_position_embeddings"), _window(config)),
        dtype=dtype,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        path=str(path),
    )


def stop_tokens_of(path: str | Path) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of a checkpoint, from its generation_config.json or else its config.json.

    Raises:
        ModelError: a file is malformed, or config.json is missing.
    """
    folder = Path(path)
    for name in ("generation_config.json", "config.json"):
        if name == "config.json" or (folder / name).is_file():
            stop = _read(folder / name).get("eos_token_id")
            if stop is not None:
                return tuple(stop) if isinstance(stop, list) else (stop,)
    return ()


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


def _read(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise ModelError(f"model.path={file.parent} is not a folder; give a checkpoint's folder, or null")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}; give the folder of a checkpoint") from error
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds a {type(content).__name__}, not an object; copy the checkpoint again")
    return content


def _size(file: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config[key] if config.get(key) is not None else default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: {key} is {value!r}, not a size of at least 1; copy the checkpoint again")
    return value


def _window(config: dict[str, Any]) -> int:
    """Returns the sliding window in tokens. Mistral's default is 4096, as in `transformers`."""
    if config["model_type"] == "mistral":
        return int(config.get("sliding_window", 4096) or _NO_WINDOW)
    return int((config.get("use_sliding_window") and config.get("sliding_window")) or _NO_WINDOW)
