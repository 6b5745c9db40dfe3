"""Reads the shape and the vocabulary of a model from a local checkpoint folder.

`transformers` reads the configuration and defines each family's defaults. `cbatch.runtime.weights` loads the weights.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbatch.errors import ConfigError, ModelError, WorkloadError, check_installed, type_and_message
from cbatch.model.spec import DTYPE_BYTES, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CHECKPOINT_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_COMPUTED = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("head_dim", "vocab_size", "tie_word_embeddings", "dtype", "hidden_act", "rms_norm_eps", "layer_types"),
    *("attention_bias", "mlp_bias", "max_position_embeddings", "rope_parameters"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),
}
_HARMLESS = {  # aliases, or keys without effect on the tokens of a prompt
    *("architectures", "transformers_version", "initializer_range", "use_cache", "pretraining_tp", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type"),
    *("tokenizer_class", "model_type", "rope_theta", "rope_scaling", "head_dim", "max_sequence_length"),
    *("is_llama_config", "transformers.js_config", "unsloth_version"),  # of the tools that wrote the file
}
_NEUTRAL = {"partial_rotary_factor", "logits_scaling", "embedding_multiplier", "residual_multiplier"}
"""Factors of other families, without effect if 1."""

_ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # types that depend only on a token's position
_ROPE_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings")
_ROPE_OPTIONS = {
    *("type", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
}

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Number formats by their names in the header of a safetensors file."""

MADE = Path("~/.cache/cbatch/SmolLM2-135M-Instruct")  # the folder that `make model` writes


def spec_from_checkpoint(path: str | Path, dtype: str | None = None) -> ModelSpec:
    """Returns the shape of the model in a checkpoint folder, from its config.json. Raises ModelError like `read_config`.

    dtype: None: as config.json states, or else as the weights are stored.
    `max_positions` is at most the sliding window: up to the window's size windowed attention equals plain attention. Yarn
    stretches the positions that the model was trained on.
    """
    file, config = Path(path) / "config.json", read_config(path)
    rope, positions, window = config.rope_parameters, config.max_position_embeddings, sliding_window(config)
    if rope["rope_type"] == "yarn":
        positions = max(positions, int(rope["factor"] * rope["original_max_position_embeddings"]))
    try:
        return ModelSpec(
            name=file.parent.resolve().name,
            family=config.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // max(config.num_attention_heads, 1),
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            tied_embeddings=config.tie_word_embeddings,
            max_positions=positions if window is None else min(positions, window),
            dtype=dtype or _dtype(file),
            rope_theta=rope["rope_theta"],
            path=str(path),
        )
    except ConfigError as error:
        raise ModelError(f"{file}: {error}; copy the checkpoint again") from error


def read_config(path: str | Path) -> "PreTrainedConfig":
    """Returns the configuration of a checkpoint, read from config.json by its family's class.

    Raises ModelError if the folder or its config.json is missing or malformed, or has an unsupported setting; ConfigError if
    `transformers` is not installed.
    """
    file = Path(path) / "config.json"
    content = _read(file)
    family = content.get("model_type")
    if family not in CHECKPOINT_FAMILIES:
        raise ModelError(f"{file}: model_type {family!r} is not supported; use one of {', '.join(CHECKPOINT_FAMILIES)}")
    if content.pop("quantization_config", None) is not None:
        raise ModelError(f"{file}: quantized checkpoints are not supported; use one in {', '.join(DTYPE_BYTES)}")
    check_installed("real", "transformers")
    for key in ("dtype", "torch_dtype"):  # the caller chooses the number format
        content.pop(key, None)
    from transformers import CONFIG_MAPPING

    try:
        config: PreTrainedConfig = CONFIG_MAPPING[family].from_dict(content)
    except Exception as error:
        raise ModelError(f"{file}: {type_and_message(error)}; correct it, or copy the checkpoint again") from error
    if others := _not_computed(content, config):
        settings = ", ".join(f"{key}={value!r}" for key, value in others.items())
        raise ModelError(f"{file}: {settings} is not supported; use another checkpoint, or remove what has no effect")
    return config


def _dtype(file: Path) -> str:
    """Returns the number format that a config.json states, or else the format of most bytes of the weights beside it."""
    content = _read(file)
    stated = [text for key in ("dtype", "torch_dtype") if (text := content.get(key)) not in (None, "auto")]
    if stated:
        return str(stated[0]).removeprefix("torch.")
    weights = next(iter(sorted(file.parent.glob("*.safetensors"))), None)
    if weights is None:
        problem = "states no dtype, and there are no weights (*.safetensors) that show it"
        raise ModelError(f"{file}: {problem}; give +model.dtype=bfloat16, or another of {', '.join(DTYPE_BYTES)}")
    try:
        with weights.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        sizes = Counter[str]()
        for tensor in (tensor for name, tensor in header.items() if name != "__metadata__"):
            begin, end = tensor["data_offsets"]
            sizes[tensor["dtype"]] += end - begin
        [(name, _)] = sizes.most_common(1)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{weights}: has no header ({type_and_message(error)}); copy the checkpoint again") from error
    return _DTYPES.get(name, name)


def sliding_window(config: "PreTrainedConfig") -> int | None:
    """Returns the sliding window of attention in tokens; None if no layer has a sliding window."""
    windowed = "sliding_attention" in getattr(config, "layer_types", ["sliding_attention"])
    return getattr(config, "sliding_window", None) if windowed else None


def _not_computed(content: dict[str, Any], config: "PreTrainedConfig") -> dict[str, Any]:
    """Returns the settings in a config.json that would be ignored although they may affect tokens."""
    defaults = {field.name: field.default for field in fields(config)}
    others = {
        key: value
        for key, value in content.items()
        if key not in _COMPUTED.intersection(defaults) | _HARMLESS and not key.startswith("_")
        if not (key in _NEUTRAL and value == 1)
        if hasattr(config, key) and (value != defaults[key] if key in defaults else value)  # others are for generation
    }
    for key, value in config.rope_parameters.items():
        number = key in _ROPE_NUMBERS and isinstance(value, int | float)
        neutral = key in _NEUTRAL and value == 1
        if not (number or neutral or key in _ROPE_OPTIONS or (key == "rope_type" and value in _ROPE_TYPES)):
            others[f"rope_parameters.{key}"] = value
    types = {*getattr(config, "layer_types", ())}
    if types - {"full_attention", *(["sliding_attention"] if sliding_window(config) else [])}:
        others["layer_types"] = types
    return others


def stop_tokens_of(path: str | Path) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of generation_config.json and config.json, in this order. Raises like `read_config`."""
    files = (Path(path) / name for name in ("generation_config.json", "config.json"))
    stated = [_read(file).get("eos_token_id") for file in files if file.is_file()]
    if stated in ([], [None], [None, None]):
        stated = [read_config(path).eos_token_id]  # the family's default
    lists = (stop if isinstance(stop, list) else [stop] for stop in stated)
    return tuple(dict.fromkeys(id_ for stops in lists for id_ in stops if id_ is not None))


class Vocabulary:
    """Token ids from 0 to `size` - 1, and the tokenizer of a checkpoint.

    stop_tokens: ids that end a request; none for a model with random weights.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Raises ModelError if the checkpoint's files are missing or malformed."""
        self.size = spec.vocab_size
        self.stop_tokens: tuple[int, ...] = () if spec.path is None else stop_tokens_of(spec.path)
        self._name, self._path = spec.name, spec.path

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt; adds the tokenizer's special tokens unless the text already has them.

        Raises ModelError if the model has no tokenizer.
        """
        ids: list[int] = self._tokenizer.encode(text)
        return ids[1:] if ids[:2] == [self._tokenizer.bos_token_id] * 2 else ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a chat in the model's training format, up to the beginning of the answer.

        messages: role and content of each message. As in other engines, control tokens in a content are not escaped.

        Raises:
            ModelError: the model has no tokenizer, or no chat template.
            WorkloadError: the chat template refuses the messages, for example two consecutive user messages.
        """
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise ModelError(f"model {self._name} has no chat template; give prompt in place of messages")
        if self._wants_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        try:
            return list(tokenizer.apply_chat_template([*messages], add_generation_prompt=True, return_dict=False))
        except Exception as error:
            problem = f"messages: the chat template of {self._name} refuses them ({type_and_message(error)})"
            raise WorkloadError(f"{problem}; give other messages") from error

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the chat template shows a content only as a list of parts."""

        def shows(content: Any) -> bool:
            with suppress(Exception):  # a template may refuse any message
                chat = [{"role": "user", "content": content}]
                return "cbatch" in self._tokenizer.apply_chat_template(chat, tokenize=False)
            return False

        return not shows("cbatch") and shows([{"type": "text", "text": "cbatch"}])

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text without control tokens. Raises ModelError if the model has no tokenizer."""
        return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True))

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """Returns a cached function that returns the text of a single token."""
        return cache(lambda id_: self.decode([id_]))

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """Returns the texts of control tokens by id. Raises ModelError if the model has no tokenizer."""
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {id_: token.content for id_, token in added.items() if token.special}

    @cached_property
    def _tokenizer(self) -> Any:
        """Returns the tokenizer, loaded on first use, since most workloads consist of token ids."""
        give = "give prompts as token ids"
        if self._path is None:
            raise ModelError(f"model {self._name} has random weights and no tokenizer; {give}, or set model.path")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
            if len(tokenizer) <= len(tokenizer.all_special_ids):
                raise ValueError("it has no tokens but special ones")  # `transformers` made it without files
            if not tokenizer.is_fast:
                raise ValueError("it is not one of the package tokenizers")
        except Exception as error:
            why = f"its tokenizer cannot be loaded ({type_and_message(error)})"
            raise ModelError(f"model.path={self._path}: {why}; add the tokenizer's files, or {give}") from error
        return tokenizer


def _read(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        remedy = "run make model" if file.parent == MADE.expanduser() else "give a checkpoint's folder, or null"
        raise ModelError(f"model.path={file.parent} is not a folder; {remedy}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror or error}; give the folder of a checkpoint") from error
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({error}); copy the checkpoint again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: holds a {type(content).__name__}, not an object; copy the checkpoint again")
    return content
