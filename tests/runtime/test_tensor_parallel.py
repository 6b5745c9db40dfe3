"""Ranks that share every layer: what each has, and that they stay equal. Their tokens are in `test_tokens` and the random schedules."""

import pytest
import torch
from tiny_models import CPU, LLAMA, QWEN3, paged_weights, stage_models

from cbatch.errors import ConfigError
from cbatch.kv import KVSize
from cbatch.model import ModelSpec, Rank, split_layers
from cbatch.model.topology import share_of, split_ranks
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Extents, Shape, device_views
from cbatch.runtime.gpu.ranks import Steps, finish, lockstep
from cbatch.runtime.gpu.shards import draw_shard, shard

NANOGPT = ModelSpec("tiny-nanogpt", "nanogpt", 2, 32, 4, 4, 8, 128, 96, 512, "float64")
QWEN2 = ModelSpec("tiny-qwen2", "qwen2", 2, 32, 4, 2, 8, 64, 97, 512, "float64", tied_embeddings=True)


# -- what a rank has --------------------------------------------------------------------------------------------------


def test_shares_are_in_order_and_as_equal_as_can_be() -> None:
    shares = [Rank(index, 4).share(10) for index in range(4)]
    assert [(share.start, share.stop) for share in shares] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert [Rank(index, 4).kv_heads(8) for index in range(4)] == [slice(first, first + 2) for first in (0, 2, 4, 6)]
    assert [Rank(index, 4).kv_heads(2) for index in range(4)] == [slice(head, head + 1) for head in (0, 0, 1, 1)]


def test_a_rank_has_its_share_of_every_matrix() -> None:
    """tiny-llama: 4 heads and 2 key-value heads of 8, 64 columns, 96 tokens; with 4 ranks a key-value head is shared by two."""
    whole = paged_weights(LLAMA)
    part = shard(whole, LLAMA, Rank(3, 4), split_layers(LLAMA, 1), [CPU])
    mine, all_ = dict(part.named_parameters()), dict(whole.named_parameters())
    name = "model.layers.1.{}.weight".format
    expected = {
        name("self_attn.q_proj"): all_[name("self_attn.q_proj")][24:32],
        name("self_attn.k_proj"): all_[name("self_attn.k_proj")][8:16],
        name("self_attn.v_proj"): all_[name("self_attn.v_proj")][8:16],
        name("self_attn.o_proj"): all_[name("self_attn.o_proj")][:, 24:32],
        name("mlp.gate_proj"): all_[name("mlp.gate_proj")][48:],
        name("mlp.up_proj"): all_[name("mlp.up_proj")][48:],
        name("mlp.down_proj"): all_[name("mlp.down_proj")][:, 48:],
        name("input_layernorm"): all_[name("input_layernorm")],
        "lm_head.weight": all_["lm_head.weight"][72:],
        "model.embed_tokens.weight": all_["model.embed_tokens.weight"],
    }
    for key, weight in expected.items():
        assert torch.equal(mine[key], weight) and mine[key].is_contiguous(), key
        assert mine[key].data_ptr() != all_[key].data_ptr()
    share = share_of(LLAMA, Rank(3, 4))
    assert (share.num_heads, share.num_kv_heads, share.intermediate_size, share.vocab_size) == (1, 1, 16, 24)
    assert [share_of(QWEN2, Rank(index, 2)).vocab_size for index in range(2)] == [48, 49]


def test_a_bias_of_what_is_added_up_is_added_once() -> None:
    whole, layers = paged_weights(NANOGPT), split_layers(NANOGPT, 1)
    first, second = (shard(whole, NANOGPT, Rank(index, 2), layers, [CPU]) for index in range(2))
    for name in ("attention.dense", "mlp.dense_4h_to_h"):
        assert first.get_submodule(f"gpt_neox.layers.0.{name}").bias is not None
        assert second.get_submodule(f"gpt_neox.layers.0.{name}").bias is None
    assert len(second.get_submodule("gpt_neox.layers.0.mlp.dense_h_to_4h").bias) == 64


@pytest.mark.parametrize("spec", [QWEN2, NANOGPT], ids=lambda spec: spec.name)
def test_weights_that_are_drawn_where_they_are_kept_are_the_same_whatever_the_split(spec: ModelSpec) -> None:
    """The shares of the model drawn whole; matrices differ, of the scale that `transformers` gives them."""
    layers = split_layers(spec, 1)
    whole = draw_shard(spec, Rank(), layers, [CPU])
    matrices = [weight for name, weight in whole.named_parameters() if weight.dim() > 1]
    assert all(float(weight.std()) == pytest.approx(spec.hidden_size**-0.5, rel=0.1) for weight in matrices)
    assert len({float(weight.flatten()[0]) for weight in matrices}) == len(matrices) - spec.tied_embeddings
    tokens = torch.arange(12)[None]
    whole.set_attn_implementation("eager")
    expected = paged_weights(spec)
    assert {name: weight.shape for name, weight in whole.named_parameters()} == {
        name: weight.shape for name, weight in expected.named_parameters(remove_duplicate=False)
    }
    assert whole(tokens).logits.isfinite().all()
    for index in range(2):
        rank = Rank(index, 2)
        drawn, cut = draw_shard(spec, rank, layers, [CPU]), shard(whole, spec, rank, layers, [CPU])
        mine, other = dict(drawn.named_parameters()), dict(cut.named_parameters())
        assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)
        assert torch.equal(drawn.base_model.rotary_emb.inv_freq, expected.base_model.rotary_emb.inv_freq)


# -- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LLAMA, QWEN3], ids=lambda spec: spec.name)
def test_hidden_states_are_the_same_bits_on_all_ranks(spec: ModelSpec) -> None:
    """In float32, where the order of the sum matters: the first of two stages."""
    [models, _] = stage_models(spec, KVSize(4, 16), ReferenceAttention(), 2, num_ranks=4)
    shape = Shape(16, 1, 1)
    batch = device_views(torch.zeros(shape.size, dtype=torch.int32), shape)
    batch.query_starts[1] = batch.context_lens[0] = 16
    batch.positions.copy_(torch.arange(16))
    batch.kv_indices.copy_(torch.arange(16))
    tokens, leaving = torch.arange(16, dtype=torch.int32), [torch.zeros(16, spec.hidden_size) for _ in models]
    with torch.inference_mode():
        of_ranks = [
            model.steps(tokens, batch, Extents(16, 16, 1), out) for model, out in zip(models, leaving, strict=True)
        ]
        finish(lockstep(of_ranks, leaving))
    assert leaving[0].any() and all(torch.equal(leaving[0], other) for other in leaving[1:])


def test_of_equally_likely_tokens_the_lowest_is_chosen_whoever_has_it() -> None:
    [models] = stage_models(LLAMA, KVSize(4, 16), ReferenceAttention(), num_ranks=4)
    logits = torch.zeros(4, 96)
    logits[0, [30, 50, 90]] = logits[1, [95, 72]] = logits[2, [24, 23]] = 1.0
    out = [torch.zeros(4, dtype=torch.int32) for _ in models]
    parts = [logits[:, Rank(index, 4).share(96)] for index in range(4)]
    finish(lockstep([model.choose(*pair) for model, *pair in zip(models, parts, out, strict=True)], out))
    assert [tokens.tolist() for tokens in out] == [[30, 72, 23, 0]] * 4


def test_ranks_that_meet_a_different_number_of_times_are_an_error() -> None:
    def steps(number: int) -> Steps[int]:
        for _ in range(number):
            yield
        return number

    place = torch.zeros(1)
    assert finish(lockstep([steps(2), steps(2)], [place, place])) == [2, 2] and finish(steps(5)) == 5
    with pytest.raises(RuntimeError, match="1 of 2 ranks have ended while the others wait for them"):
        finish(lockstep([steps(2), steps(1)], [place, place]))


# -- what cannot be shared out ----------------------------------------------------------------------------------------


def test_heads_that_ranks_do_not_divide_are_one_line_with_the_remedy() -> None:
    problem = "tensor_parallel=3 does not divide the 4 attention heads of model=tiny-llama; choose one of 1, 2, 4"
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        split_ranks(LLAMA, 3)
    assert split_ranks(LLAMA, 2) == [Rank(0, 2), Rank(1, 2)]
