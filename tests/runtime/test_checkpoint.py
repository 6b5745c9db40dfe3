"""Checkpoint folders: their shape without torch, their weights with it, and one line for each way of being broken."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CPU, LLAMA, QWEN3
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cbatch.errors import ModelError
from cbatch.model import ModelSpec
from cbatch.model.checkpoint import Vocabulary, spec_from_checkpoint, stop_tokens_of
from cbatch.runtime.weights import load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def save(spec: ModelSpec, folder: Path) -> Path:
    """A checkpoint as `save_pretrained` leaves it."""
    load_model(spec, CPU).save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    file = folder / name
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(LLAMA, tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_with_shape_and_weights(family: str, tied: bool, tmp_path: Path) -> None:
    spec = replace(LLAMA, name="saved", family=family, tied_embeddings=tied, rope_theta=5e5, seed=3)
    folder = save(spec, tmp_path / "saved")
    found = spec_from_checkpoint(folder)
    assert found == replace(spec, path=str(folder), seed=0)
    weights, loaded = (load_model(each, CPU).state_dict() for each in (spec, found))
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


def test_the_shape_is_read_without_torch(saved: Path) -> None:
    code = f"import sys; from cbatch.model.checkpoint import spec_from_checkpoint as read; print(read({str(saved)!r}).num_layers); "
    check = "assert not {'torch', 'transformers', 'hydra'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_defaults_are_those_of_the_families(folder: Path) -> None:
    edit(folder, lambda config: [config.pop(key) for key in ("head_dim", "num_key_value_heads", "dtype")])
    edit(folder, lambda config: config.update(rope_theta=7.0, rope_parameters=None, torch_dtype="bfloat16"))
    found = spec_from_checkpoint(folder)
    assert (found.head_dim, found.num_kv_heads, found.dtype, found.rope_theta) == (8, 4, "bfloat16", 7.0)


def test_a_sliding_window_bounds_the_positions(tmp_path: Path) -> None:
    """Up to the window, windowed attention is plain attention; beyond it nothing is computed."""
    folder = save(replace(LLAMA, family="mistral"), tmp_path)
    assert spec_from_checkpoint(folder).max_positions == LLAMA.max_positions
    edit(folder, lambda config: config.update(sliding_window=64))
    found = spec_from_checkpoint(folder)
    assert found.max_positions == 64
    with pytest.raises(ModelError, match=r"max_positions=512 exceeds the 64 .*sliding window.*; lower it"):
        load_model(replace(found, max_positions=512), CPU)


def test_qwen_windows_count_only_where_they_are_switched_on(tmp_path: Path) -> None:
    folder = save(QWEN3, tmp_path)
    edit(folder, lambda config: config.update(sliding_window=64))
    assert spec_from_checkpoint(folder).max_positions == QWEN3.max_positions
    edit(folder, lambda config: config.update(use_sliding_window=True))
    assert spec_from_checkpoint(folder).max_positions == 64


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json: No such file"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json: not JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), r"holds a list, not an object"),
    "another architecture": (
        lambda f: edit(f, lambda c: c.update(model_type="mamba")),
        r"'mamba' is not supported; use one of llama",
    ),
    "a size is missing": (lambda f: edit(f, lambda c: c.pop("hidden_size")), r"hidden_size is None"),
    "a size is 0": (lambda f: edit(f, lambda c: c.update(vocab_size=0)), r"vocab_size is 0"),
    "quantized": (
        lambda f: edit(f, lambda c: c.update(quantization_config={})),
        r"quantized checkpoints are not supported",
    ),
    "odd dtype": (lambda f: edit(f, lambda c: c.update(dtype="int4")), r"dtype 'int4' is not supported"),
    "dynamic rope": (
        lambda f: edit(f, lambda c: c.update(rope_scaling={"type": "dynamic"}, rope_parameters=None)),
        r"rope type 'dynamic'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_is_one_line_that_names_the_file(name: str, folder: Path) -> None:
    breaks, message = BROKEN[name]
    breaks(folder)
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model.path=.*nowhere is not a folder; give a checkpoint's folder, or null"):
        spec_from_checkpoint(tmp_path / "nowhere")


BROKEN_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda f: (f / "model.safetensors").unlink(),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:1000]),
    "rubbish": lambda f: (f / "model.safetensors").write_bytes(b"rubbish"),
    "too few layers": lambda f: edit(f, lambda c: c.update(num_hidden_layers=3)),
    "another width": lambda f: edit(f, lambda c: c.update(intermediate_size=80)),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_are_one_line_that_names_the_folder(name: str, folder: Path) -> None:
    BROKEN_WEIGHTS[name](folder)
    with pytest.raises(ModelError, match=f"model.path={folder}") as caught:
        load_model(spec_from_checkpoint(folder), CPU)
    assert "\n" not in str(caught.value)


def test_a_shape_at_odds_with_the_checkpoint_is_refused(saved: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model.num_layers=5, but .* holds a model with 2; leave the shape to the checkpoint"
    ):
        load_model(replace(LLAMA, num_layers=5, path=str(saved)), CPU)


def test_stop_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    edit(folder, lambda config: config.update(eos_token_id=5))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert stop_tokens_of(folder) == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stop_tokens_of(folder) == (7, 8)
    assert Vocabulary(spec_from_checkpoint(folder)).stop_tokens == (7, 8)


def test_text_goes_through_the_checkpoints_tokenizer(folder: Path) -> None:
    words = {word: id_ for id_, word in enumerate(["[UNK]", "a", "policy", "decides"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    vocabulary = Vocabulary(spec_from_checkpoint(folder))
    assert vocabulary.encode("a policy decides") == [1, 2, 3]
    assert vocabulary.decode([1, 2]) == "a policy"
    assert vocabulary.size == LLAMA.vocab_size


def test_without_a_tokenizer_text_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="tiny-llama has random weights and no tokenizer; give prompts as token ids"):
        Vocabulary(LLAMA).encode("hello")
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
        Vocabulary(spec_from_checkpoint(folder)).encode("hello")
    assert "\n" not in str(caught.value)
