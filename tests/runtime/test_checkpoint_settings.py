"""Every setting of a checkpoint is computed as `transformers` computes it, or refused by name."""

import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from schedules import UnitCost
from tiny_models import CPU
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from cbatch import Limits, Request, Server
from cbatch.errors import ModelError
from cbatch.kv import KVSize
from cbatch.model.checkpoint import CHECKPOINT_FAMILIES, read_config, spec_from_checkpoint
from cbatch.runtime import cpu
from cbatch.runtime.weights import load_model
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

ABSENT = type("Absent", (), {"__repr__": lambda self: "absent"})()
FACTOR_4 = {"factor": 4.0, "original_max_position_embeddings": 64}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **FACTOR_4}

COMPUTED: dict[str, dict[str, Any]] = {
    "as it is": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0},
    "yarn": {"rope_scaling": {"type": "yarn", "beta_fast": 16, **FACTOR_4}},
    "yarn without trained positions": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}
    },
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "both forms": {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": LLAMA3},
    "null": {"rope_scaling": None, "quantization_config": None, "eos_token_id": None, "compression_config": None},
    "settings of text": {"temperature": 0.7, "max_length": 20, "_name_or_path": "elsewhere", "use_cache": False},
    "another activation": {"hidden_act": "gelu"},
    "another epsilon": {"rms_norm_eps": 0.1},
    "tied": {"tie_word_embeddings": True},
    "multi-query": {"num_key_value_heads": 1},
}
OF_FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "no kv heads": {"num_key_value_heads": ABSENT},
        "null kv heads": {"num_key_value_heads": None},
        "null head dim": {"head_dim": None},
        "wide heads": {"head_dim": 16},
        "biases": {"attention_bias": True},
        "biases of the MLP": {"mlp_bias": True},
    },
    "mistral": {
        "no kv heads": {"num_key_value_heads": ABSENT},
        "no window": {"sliding_window": None},
        "window": {"sliding_window": 48},
        "wide heads": {"head_dim": 16},
    },
    "qwen2": {
        "null kv heads": {"num_key_value_heads": None},
        "unused window": {"sliding_window": 8, "max_window_layers": 1},
        "window": {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
        "window of no layer": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        "wide heads": {"head_dim": 16},
    },
    "qwen3": {
        "null kv heads": {"num_key_value_heads": None},
        "no head dim": {"head_dim": ABSENT},
        "layer types": {"layer_types": ["full_attention"] * 2, "use_sliding_window": True, "sliding_window": 8},
        "biases": {"attention_bias": True},
    },
}
CASES = [(family, name) for family in CHECKPOINT_FAMILIES for name in OF_FAMILIES[family]]
CASES += [
    (family, name)
    for (place, name), (at, family) in product(enumerate(COMPUTED), enumerate(CHECKPOINT_FAMILIES))
    if (place + at) % 2
]


def save(family: str, settings: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Writes a checkpoint whose every weight matters: no norm is 1, no bias 0; returns the weights."""
    content = {"model_type": family, **SHAPE, **settings}
    content = {key: value for key, value in content.items() if value is not ABSENT}
    made = {
        key: value
        for key, value in content.items()
        if value is not None or key not in ("compression_config", "quantization_config")
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family].from_dict(json.loads(json.dumps(made))))
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, -0.5, 0.5)
            weight.data += float("norm" in name)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content))
    return model.state_dict()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize(("family", "name"), CASES)
def test_tokens_are_those_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    settings = (COMPUTED | OF_FAMILIES[family])[name]
    weights = save(family, settings, tmp_path)
    spec = spec_from_checkpoint(tmp_path)
    reference = AutoModelForCausalLM.from_config(read_config(tmp_path), attn_implementation="eager")
    reference.load_state_dict(weights)
    assert spec.weight_bytes == sum(weight.nbytes for weight in reference.parameters() if weight.dim() > 1)
    limits, kv = Limits(max_batch=3, max_tokens=16, max_request_tokens=48), KVSize(9, 16)
    prompts = [list(range(first, first + 38)) for first in (3, 30, 57)]
    requests = [Request(id_, 38, 8, prompt=prompt) for id_, prompt in enumerate(prompts)]
    Server(cpu.build(spec, limits, kv), limits, UnitCost(), kv).serve(SarathiServe(Fixed(13)), requests)
    outputs = [request.output for request in requests]
    with torch.inference_mode():  # each token is the likeliest after those before it: all of `generate` in one pass
        logits = reference(torch.tensor([prompts[row] + outputs[row] for row in range(3)])[:, :-1]).logits
    assert outputs == logits[:, 37:].argmax(dim=-1).tolist()
    assert len({token for output in outputs for token in output}) > 2


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"tie_word_embeddings": "false"}, "'tie_word_embeddings' expected bool, got str"),
    ("llama", {"hidden_size": 32.0}, "'hidden_size' expected int, got float"),
    ("llama", {"num_attention_heads": 0}, "ZeroDivisionError"),
    ("qwen2", {"num_attention_heads": 0}, "model.num_heads=0 must be a whole number of at least 1"),
    ("qwen2", {"num_key_value_heads": ABSENT}, "model.num_heads=8 must be a multiple of model.num_kv_heads=32"),
    ("mistral", {"num_key_value_heads": None}, "'num_key_value_heads' expected int, got NoneType"),
    ("qwen3", {"head_dim": None}, "'head_dim' expected int, got NoneType"),
    ("llama", {"quantization_config": {}}, "quantized checkpoints are not supported"),
    ("llama", {"compression_config": {"format": "dense"}}, "compression_config="),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config="),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("mistral", {"sliding_window": [8, None]}, "'sliding_window' with value"),
    ("mistral", {"sliding_window": 0}, "model.max_positions=0 must be"),
    ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types="),
    ("mistral", {"mlp_bias": True}, "mlp_bias=True"),
    ("qwen2", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types="),
    ("qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types="),
    ("qwen3", {"layer_types": ["full_attention"]}, "num_hidden_layers"),
    ("llama", {"per_layer_config": {"0": {"hidden_act": "gelu"}}}, "per_layer_config="),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved=True"),
    ("llama", {"rope_theta": None}, "rope_parameters.rope_theta=None"),
    ("llama", {"rope_theta": "1e6"}, "rope_parameters.rope_theta='1e6'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "Missing required keys"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_parameters.factor='4'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_parameters.rope_type='dynamic'"),
    ("qwen2", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 3]}}, "rope_parameters.mrope_section="),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "yarn", **FACTOR_4}}}, "rope_parameters.full_attention="),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "yarn", **FACTOR_4}}}, "full_attention|rope|float"),
    ("llama", {"dtype": "int4"}, "model.dtype='int4' is unknown"),
    ("llama", {"dtype": "int3"}, "model.dtype='int3' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "message"), REFUSED, ids=str)
def test_other_settings_are_refused_by_name(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = {"model_type": family, **SHAPE, **settings}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ABSENT}))
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_checkpoint(tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


WINDOW = {"use_sliding_window": True, "sliding_window": 48}
POSITIONS: list[tuple[str, dict[str, Any], int]] = [
    ("mistral", {"max_position_embeddings": 8192}, 4096),
    ("mistral", {"sliding_window": None}, 512),
    ("mistral", {"sliding_window": 48}, 48),
    ("qwen2", {**WINDOW, "max_window_layers": 1}, 48),
    ("qwen2", {**WINDOW, "max_window_layers": 2}, 512),
    ("qwen3", {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}, 48),
    ("qwen3", {**WINDOW, "use_sliding_window": False, "max_window_layers": 1}, 512),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 512),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
]


@pytest.mark.parametrize(("family", "settings", "positions"), POSITIONS, ids=str)
def test_positions_end_at_a_window_and_are_stretched_by_yarn(
    family: str, settings: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SHAPE, **settings}))
    spec = spec_from_checkpoint(tmp_path)
    assert spec.max_positions == positions
    with pytest.raises(ModelError, match=rf"max_positions=9999 exceeds the {positions} .*sliding window.*; lower it"):
        load_model(replace(spec, max_positions=9999), CPU)


@pytest.mark.parametrize("family", CHECKPOINT_FAMILIES)
def test_no_field_of_a_familys_class_is_ignored(family: str, tmp_path: Path) -> None:
    """Fields beside those of the table above: each is refused with any value but its default, or changes no token."""
    in_table = {key for settings in (SHAPE, *COMPUTED.values(), *OF_FAMILIES[family].values()) for key in settings}
    without_effect = {
        "dtype",
        "architectures",
        "transformers_version",
        "pretraining_tp",
        "attention_dropout",
        "bos_token_id",
    }
    without_effect |= {"pad_token_id", "id2label", "label2id", "problem_type"}
    for field in fields(CONFIG_MAPPING[family]):
        if field.name not in in_table | without_effect:
            other = True if field.default is False else not field.default and 1
            (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SHAPE, field.name: other}))
            with pytest.raises(ModelError, match=field.name):
                spec_from_checkpoint(tmp_path)
