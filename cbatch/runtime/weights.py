"""Makes the `transformers` modules of a model, with random weights from a seed or with a local checkpoint's weights."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cbatch.errors import ModelError, type_and_message
from cbatch.model import Layers, ModelSpec
from cbatch.model.checkpoint import CHECKPOINT_FAMILIES, read_config, spec_from_checkpoint
from cbatch.runtime.model import ATTENTION_NAME, norm_name, paged_attention


def load_model(spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    """Returns the model on the device, ready for inference with paged attention.

    Raises ModelError if the model cannot be built, or if the checkpoint is missing, broken, or does not match `spec`.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    if spec.path is not None:
        return _pretrained(spec, spec.path).to(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(spec.seed)
        return _build(spec, transformers_config(spec))


def move_stages(model: PreTrainedModel, layers: Sequence[Layers], devices: Sequence[torch.device]) -> None:
    """Moves each stage's weights to the stage's device, in place, and the rotary embedding to the first device."""
    body: Any = model.base_model
    embedding, head = model.get_input_embeddings(), cast(Any, model.get_output_embeddings())
    if head.weight is embedding.weight and devices[0] != devices[-1]:
        head.weight = torch.nn.Parameter(embedding.weight.detach().to(devices[-1]), requires_grad=False)
    head.to(devices[-1])
    embedding.to(devices[0])
    body.rotary_emb.to(devices[0])
    getattr(body, norm_name(body)).to(devices[-1])
    for part, device in zip(layers, devices, strict=True):
        body.layers[part.first : part.end].to(device)


def can_fuse(spec: ModelSpec) -> bool:
    """Returns whether `FusedModel` supports the model: SiLU, and biases only in queries, keys and values. `PagedModel` supports all."""
    if spec.family not in CHECKPOINT_FAMILIES or spec.head_dim & (spec.head_dim - 1):
        return False
    config = None if spec.path is None else read_config(spec.path)
    biases = any(getattr(config, key, False) for key in ("attention_bias", "mlp_bias"))  # attention_bias: o_proj too
    return not biases and getattr(config, "hidden_act", "silu") in ("silu", "swish")


def transformers_config(spec: ModelSpec) -> PreTrainedConfig:
    """Returns the `transformers` configuration of a model with random weights of variance 1 / hidden_size.

    "nanogpt" is GPT-NeoX with the sequential residual: LayerNorm, plain 4 H feed-forward with GELU, 12 H^2 parameters
    per layer. Positions are rotary, whereas nanoGPT learns them; the matrix products are the same.
    """
    nanogpt = spec.family == "nanogpt"
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
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    if nanogpt:
        if spec.num_kv_heads != spec.num_heads or spec.head_dim * spec.num_heads != spec.hidden_size:
            rule = "family nanogpt has as many kv heads as heads, and heads * head_dim = hidden_size"
            raise ModelError(f"model {spec.name}: {rule}; change model.num_kv_heads and model.head_dim")
        settings["use_parallel_residual"] = False
        settings["rope_parameters"]["partial_rotary_factor"] = 1.0
    else:
        settings |= {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    if spec.family == "mistral":
        settings["sliding_window"] = None
    try:
        return AutoConfig.for_model("gpt_neox" if nanogpt else spec.family, **settings)
    except Exception as error:
        problem = f"transformers refuses its shape ({type_and_message(error)})"
        raise ModelError(f"model {spec.name}: {problem}; change model.hidden_size or model.num_heads") from error


def load_skeleton(spec: ModelSpec, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the modules of a model with random weights, ready for inference, without allocating the weights."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    with torch.device("meta"):
        return _build(spec, config)


def _build(spec: ModelSpec, config: PreTrainedConfig) -> PreTrainedModel:
    factory = cast(Any, AutoModelForCausalLM)
    model = factory.from_config(config, dtype=getattr(torch, spec.dtype), attn_implementation=ATTENTION_NAME)
    return cast(PreTrainedModel, model.eval().requires_grad_(False))


def _pretrained(spec: ModelSpec, path: str) -> PreTrainedModel:
    stored = spec_from_checkpoint(path, spec.dtype)
    for field in ("family", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
        wanted, actual = getattr(spec, field), getattr(stored, field)
        if wanted != actual:  # the KV cache and all accounting follow `spec`
            reason = f"but {path} holds a model with {actual}"
            raise ModelError(f"model.{field}={wanted}, {reason}; leave the shape to the checkpoint")
    if spec.max_positions > stored.max_positions:
        reason = f"exceeds the {stored.max_positions} that {path} supports (its positions or sliding window)"
        raise ModelError(f"model.max_positions={spec.max_positions} {reason}; lower it")
    settings = {"config": read_config(path), "dtype": getattr(torch, spec.dtype), "attn_implementation": ATTENTION_NAME}
    factory = cast(Any, AutoModelForCausalLM)
    try:
        model, report = factory.from_pretrained(path, **settings, local_files_only=True, output_loading_info=True)
    except Exception as error:
        reason = f"the weights cannot be loaded ({type_and_message(error)})"
        raise ModelError(f"model.path={path}: {reason}; copy the checkpoint again") from error
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        reason = f"{len(wrong)} weights are missing or of no part of the model, {wrong[0]} first"
        raise ModelError(f"model.path={path}: {reason}; copy the checkpoint again")
    return cast(PreTrainedModel, model.eval().requires_grad_(False))
