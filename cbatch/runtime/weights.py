"""Makes the `transformers` modules of a model: random weights from a seed, or a local checkpoint's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cbatch.checkpoint import spec_from_checkpoint
from cbatch.errors import ModelError
from cbatch.model import ModelSpec
from cbatch.runtime.model import ATTENTION_NAME, register_attention

if TYPE_CHECKING:
    from collections.abc import Iterator


def load_model(spec: ModelSpec, device: torch.device, *, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    """Build the model on the device, ready for inference.

    Args:
        attention: name of the attention function in `transformers`; the paged one, or "eager" for their own `generate`.

    Raises:
        ModelError: no such model can be built, or the checkpoint is missing, broken, or not the model of `spec`.
    """
    register_attention()
    model = _random(spec, device, attention) if spec.path is None else _pretrained(spec, device, attention)
    model.eval()
    model.requires_grad_(False)
    return model


def transformers_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration of `transformers` for a model with random weights.

    "nanogpt" is GPT-NeoX with its sequential residual: LayerNorm, plain 4 H feed-forward with GELU, 12 H^2 parameters a
    layer; its positions are rotary where nanoGPT's are learned, which changes no matrix product.

    Weights have the variance 1 / hidden_size, so that activations keep their size and attention its say at any width.
    """
    settings: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.hidden_size**-0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if spec.family == "nanogpt":
        _check_nanogpt(spec)
        settings["use_parallel_residual"] = False
        settings["rope_parameters"]["partial_rotary_factor"] = 1.0
    else:
        settings["num_key_value_heads"] = spec.num_kv_heads
        settings["head_dim"] = spec.head_dim
    if spec.family == "mistral":
        settings["sliding_window"] = None
    try:
        return AutoConfig.for_model("gpt_neox" if spec.family == "nanogpt" else spec.family, **settings)
    except Exception as error:
        raise ModelError(
            f"model {spec.name}: transformers refuses its shape ({_one_line(error)}); change model.hidden_size or model.num_heads"
        ) from error


def _random(spec: ModelSpec, device: torch.device, attention: str) -> PreTrainedModel:
    config, factory = transformers_config(spec), cast(Any, AutoModelForCausalLM)
    with _seeded(spec.seed, device), device:
        model = factory.from_config(config, dtype=getattr(torch, spec.dtype), attn_implementation=attention)
    return cast(PreTrainedModel, model)


def _pretrained(spec: ModelSpec, device: torch.device, attention: str) -> PreTrainedModel:
    assert spec.path is not None
    _check_shape(spec, spec_from_checkpoint(spec.path))
    factory = cast(Any, AutoModelForCausalLM)
    try:
        model, report = factory.from_pretrained(
            spec.path,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=attention,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(
            f"model.path={spec.path}: the weights cannot be loaded ({_one_line(error)}); copy the checkpoint again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model.path={spec.path}: {len(missing)} weights are missing, {missing[0]} first; copy the checkpoint again"
        )
    return cast(PreTrainedModel, model.to(device))


def _check_nanogpt(spec: ModelSpec) -> None:
    if spec.num_kv_heads != spec.num_heads or spec.head_dim * spec.num_heads != spec.hidden_size:
        raise ModelError(
            f"model {spec.name}: family nanogpt has as many kv heads as heads, and heads * head_dim = hidden_size; "
            "change model.num_kv_heads and model.head_dim"
        )


def _check_shape(spec: ModelSpec, found: ModelSpec) -> None:
    """The KV cache and all accounting follow `spec`, so it must be the checkpoint's."""
    for field in ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        if getattr(spec, field) != getattr(found, field):
            raise ModelError(
                f"model.{field}={getattr(spec, field)}, but {spec.path} holds a model with "
                f"{getattr(found, field)}; leave the shape to the checkpoint"
            )
    if spec.max_positions > found.max_positions:
        raise ModelError(
            f"model.max_positions={spec.max_positions} exceeds the {found.max_positions} that {spec.path} supports "
            "(its positions or sliding window); lower it"
        )


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from the seed, and the generators of the process left as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
