"""Checkpoint folders: their shape, their weights, and one line for each way of being broken."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file, save_file
from tiny_models import CPU, LLAMA
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cbatch.errors import ModelError
from cbatch.model import ModelSpec
from cbatch.model.checkpoint import MADE, Vocabulary, spec_from_checkpoint, stop_tokens_of
from cbatch.runtime.weights import load_model
from experiments.settings.compose import compose_run

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def save(spec: ModelSpec, folder: Path) -> Path:
    """A checkpoint as `save_pretrained` leaves it."""
    load_model(spec, CPU).save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def add_tensor(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(4)}, file, {"format": "pt"})


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


Change = Callable[[dict[str, Any]], object]
BROKEN: dict[str, Change] = {
    r"'mamba' is not supported; use one of llama": lambda config: config.update(model_type="mamba"),
    r"model.vocab_size=0 must be": lambda config: config.update(vocab_size=0),
}
BROKEN_FILES = {r"config.json: No such file": None, r"config.json: not JSON": "{", r"holds a list, not an object": "[]"}


@pytest.mark.parametrize("message", [*BROKEN, *BROKEN_FILES])
def test_a_broken_config_is_one_line_that_names_the_file(message: str, folder: Path) -> None:
    file = folder / "config.json"
    if message in BROKEN:
        edit(folder, BROKEN[message])
    elif (text := BROKEN_FILES[message]) is None:
        file.unlink()
    else:
        file.write_text(text)
    with pytest.raises(ModelError, match=message) as caught:
        spec_from_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_names_the_command_that_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the folder of `make model` does, with the home of the user."""
    assert f"MODEL := {MADE}\n".replace("~", "$(HOME)") in (ROOT / "Makefile").read_text()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, remedy in ((MADE.relative_to("~"), "run make model"), ("other", "give a checkpoint's folder, or null")):
        with pytest.raises(ModelError) as caught:
            compose_run(f"model.path='~/{name}'")
        assert str(caught.value) == f"model.path={tmp_path / name} is not a folder; {remedy}"


@pytest.mark.parametrize("stated", [None, "auto"])
def test_the_weights_tell_a_dtype_that_config_does_not(stated: str | None, folder: Path) -> None:
    """A missing one was float32, at twice the bytes of most weights."""
    edit(folder, lambda config: (config.pop("dtype"), config.update(torch_dtype=stated)))
    file = folder / "model.safetensors"
    weights = {name: tensor.bfloat16() if tensor.ndim == 2 else tensor for name, tensor in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    found = spec_from_checkpoint(folder)
    assert found.dtype == "bfloat16", "that of the matrices: norms are often float32"
    assert load_model(found, CPU).dtype == torch.bfloat16
    assert spec_from_checkpoint(folder, "float16").dtype == "float16"
    file.write_bytes(b"rubbish")
    with pytest.raises(ModelError, match=r"model\.safetensors: has no header"):
        spec_from_checkpoint(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"config\.json: states no dtype, .*; give \+model\.dtype=bfloat16"):
        spec_from_checkpoint(folder)
    assert compose_run(f"model.path={folder}", "+model.dtype=bfloat16").model.dtype == "bfloat16"


HARMLESS: dict[str, object] = {
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
    "max_sequence_length": 2048,
    "unsloth_version": "2024.9",
    "partial_rotary_factor": 1.0,
    "logits_scaling": 1.0,
}


@pytest.mark.parametrize("key", HARMLESS)
def test_keys_of_other_tools_and_neutral_factors_are_read(key: str, folder: Path) -> None:
    edit(folder, lambda config: config.update({key: HARMLESS[key]}))
    assert spec_from_checkpoint(folder) == replace(LLAMA, name=folder.name, path=str(folder))
    if HARMLESS[key] == 1.0 and not isinstance(HARMLESS[key], bool):
        edit(folder, lambda config: config.update({key: 0.5}))
        with pytest.raises(ModelError, match=f"{key}=0.5"):
            spec_from_checkpoint(folder)


BROKEN_WEIGHTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda f: (f / "model.safetensors").unlink(),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:1000]),
    "rubbish": lambda f: (f / "model.safetensors").write_bytes(b"rubbish"),
    "too few layers": lambda f: edit(f, lambda c: c.update(num_hidden_layers=3)),
    "a bias of nothing": lambda f: add_tensor(f, "model.layers.0.mlp.up_proj.bias"),
    "another width": lambda f: edit(f, lambda c: c.update(intermediate_size=80)),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_are_one_line_that_names_the_folder(name: str, folder: Path) -> None:
    BROKEN_WEIGHTS[name](folder)
    with pytest.raises(ModelError, match=f"model.path={folder}") as caught:
        load_model(spec_from_checkpoint(folder), CPU)
    assert "\n" not in str(caught.value)


def test_frequencies_that_old_checkpoints_store_are_left_out(folder: Path) -> None:
    add_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")
    load_model(spec_from_checkpoint(folder), CPU)


def test_a_shape_at_odds_with_the_checkpoint_is_refused(saved: Path) -> None:
    with pytest.raises(
        ModelError, match=r"model.num_layers=5, but .* holds a model with 2; leave the shape to the checkpoint"
    ):
        load_model(replace(LLAMA, num_layers=5, path=str(saved)), CPU)


def test_stop_tokens_come_from_both_configurations(folder: Path) -> None:
    edit(folder, lambda config: config.update(eos_token_id=5))
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert stop_tokens_of(folder) == (5,)
    edit(folder, lambda config: config.pop("eos_token_id"))
    assert stop_tokens_of(folder) == (2,), "Llama's default"
    edit(folder, lambda config: config.update(eos_token_id=None))
    assert stop_tokens_of(folder) == ()
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stop_tokens_of(folder) == (7, 8)
    edit(folder, lambda config: config.update(eos_token_id=[5, 7]))
    assert Vocabulary(spec_from_checkpoint(folder)).stop_tokens == (7, 8, 5)


def test_text_goes_through_the_checkpoints_tokenizer(folder: Path) -> None:
    words = {word: id_ for id_, word in enumerate(["[UNK]", "a", "policy", "decides"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    vocabulary = Vocabulary(spec_from_checkpoint(folder))
    assert vocabulary.encode("a policy decides") == [1, 2, 3]
    assert vocabulary.decode([1, 2]) == "a policy"
    assert vocabulary.size == LLAMA.vocab_size


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_tokenizer_text_is_refused(family: str, folder: Path) -> None:
    edit(folder, lambda config: config.update(model_type=family))
    with pytest.raises(ModelError, match="tiny-llama has random weights and no tokenizer; give prompts as token ids"):
        Vocabulary(LLAMA).encode("hello")
    with pytest.raises(ModelError, match="its tokenizer cannot be loaded") as caught:
        Vocabulary(spec_from_checkpoint(folder)).encode("hello")
    assert "\n" not in str(caught.value)
