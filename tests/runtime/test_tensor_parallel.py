"""Ranks that share every layer: what each has, that they stay equal, and the tokens of the whole model; errors, one line each."""

from dataclasses import replace

import pytest
import torch
from races import check_races
from schedules import UnitCost
from test_runtime_pipeline import GPUs, gpus  # noqa: F401 - a fixture
from tiny_models import (
    CPU,
    LLAMA,
    LONGEST_OUTPUT,
    QWEN3,
    Reference,
    greedy_references,
    paged_weights,
    sampled_references,
    stage_models,
)

from cbatch import Limits, Server
from cbatch.errors import CapacityError, ConfigError
from cbatch.kv import KVSize
from cbatch.model import ModelSpec, Rank, split_layers
from cbatch.model.topology import share_of, split_ranks
from cbatch.runtime import cpu
from cbatch.runtime.attention import ReferenceAttention
from cbatch.runtime.batch import Bounds, Shape, device_views
from cbatch.runtime.gpu.devices import check_number, choose_devices
from cbatch.runtime.gpu.memory import SPARE, check_memory, kv_tokens_that_fit, needs
from cbatch.runtime.gpu.ranks import Steps, finish, lockstep
from cbatch.runtime.gpu.shards import draw_shard, shard
from cbatch.runtime.options import Options
from policies.chunking import Fixed
from policies.sarathi_serve import SarathiServe

NANOGPT = ModelSpec("tiny-nanogpt", "nanogpt", 2, 32, 4, 4, 8, 128, 96, 512, "float64")
QWEN2 = ModelSpec("tiny-qwen2", "qwen2", 2, 32, 4, 2, 8, 64, 97, 512, "float64", tied_embeddings=True)


def serve(spec: ModelSpec, references: list[Reference], num_ranks: int, num_stages: int = 1) -> list[list[int]]:
    limits = Limits(max_batch=3, max_tokens=64, max_request_tokens=64, num_stages=num_stages)
    executor = check_races(cpu.build(spec, limits, KVSize(80, 8), Options(tensor_parallel=num_ranks)))
    requests = [reference.request(id_, LONGEST_OUTPUT) for id_, reference in enumerate(references)]
    server = Server(executor, limits, UnitCost(), KVSize(80, 8))
    server.serve(SarathiServe(Fixed(9)), requests)
    server.close()
    return [request.output for request in requests]


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


@pytest.mark.parametrize(("spec", "num_ranks", "num_stages"), [(NANOGPT, 2, 1), (QWEN2, 4, 2)])
def test_every_family_has_the_tokens_of_the_whole_model(spec: ModelSpec, num_ranks: int, num_stages: int) -> None:
    """Biases, tied embeddings, a vocabulary that the ranks do not divide; Llama and Qwen3 are in the random schedules."""
    chosen = greedy_references(spec)[::4]
    assert serve(spec, chosen, num_ranks, num_stages) == [reference.output for reference in chosen]


def test_tokens_are_drawn_from_the_whole_vocabulary() -> None:
    chosen = sampled_references(LLAMA)[:8]
    assert serve(LLAMA, chosen, 2) == [reference.output for reference in chosen]


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
        lockstep(
            [model.steps(tokens, batch, Bounds(16, 16, 1), out) for model, out in zip(models, leaving, strict=True)],
            leaving,
        )
    assert leaving[0].any() and all(torch.equal(leaving[0], other) for other in leaving[1:])


def test_of_equally_likely_tokens_the_lowest_is_chosen_whoever_has_it() -> None:
    [models] = stage_models(LLAMA, KVSize(4, 16), ReferenceAttention(), num_ranks=4)
    logits = torch.zeros(4, 96)
    logits[0, [30, 50, 90]] = logits[1, [95, 72]] = logits[2, [24, 23]] = 1.0
    out = [torch.zeros(4, dtype=torch.int32) for _ in models]
    parts = [logits[:, Rank(index, 4).share(96)] for index in range(4)]
    lockstep([model.choose(*pair) for model, *pair in zip(models, parts, out, strict=True)], out)
    assert [tokens.tolist() for tokens in out] == [[30, 72, 23, 0]] * 4


def test_ranks_that_meet_a_different_number_of_times_are_an_error() -> None:
    def steps(number: int) -> Steps[int]:
        for _ in range(number):
            yield
        return number

    place = torch.zeros(1)
    assert lockstep([steps(2), steps(2)], [place, place]) == [2, 2] and finish(steps(5)) == 5
    with pytest.raises(RuntimeError, match="1 of 2 ranks have ended while the others wait for them"):
        lockstep([steps(2), steps(1)], [place, place])


# -- what cannot be shared out ----------------------------------------------------------------------------------------


def test_heads_that_ranks_do_not_divide_are_one_line_with_the_remedy() -> None:
    problem = "tensor_parallel=3 does not divide the 4 attention heads of model=tiny-llama; choose one of 1, 2, 4"
    with pytest.raises(ConfigError, match=f"^{problem}$"):
        split_ranks(LLAMA, 3)
    assert split_ranks(LLAMA, 2) == [Rank(0, 2), Rank(1, 2)]


def test_each_rank_of_each_stage_takes_a_gpu(gpus: GPUs) -> None:  # noqa: F811
    """Ranks reach those of their stage, and their own successor: (0, 1) and (2, 3) are stages of two ranks."""
    gpus(4, unconnected=((0, 3), (3, 0), (1, 2), (2, 1)))
    found = choose_devices(2, 2)
    assert [[device.index for device in group] for group in found] == [[0, 1], [2, 3]]
    with pytest.raises(
        ConfigError, match=r"^backend\.tensor_parallel=4 backend.pipeline_stages=2 needs 8 GPUs, and PyTorch finds 4;"
    ):
        choose_devices(2, 4)
    with pytest.raises(ConfigError, match=r"^backend\.tensor_parallel=2 backend\.replicas=3 needs 6 GPUs, and PyTorch"):
        check_number(1, 2, 3)
    gpus(2, unconnected=((1, 0),))
    problem = r"GPU 1 cannot access the memory of GPU 0, as backend.tensor_parallel=2 needs; choose GPUs that NVLink"
    with pytest.raises(ConfigError, match=problem):
        choose_devices(1, 2)


def test_all_replicas_share_a_machines_memory() -> None:
    limits, kv = Limits(4, 1024, 64), KVSize(1000, 16)
    cpu.check_fits(LLAMA, limits, kv, 2)
    with pytest.raises(
        CapacityError, match=r"^1000000 replicas of model tiny-llama need .*; lower backend\.replicas, "
    ):
        cpu.check_fits(LLAMA, limits, kv, 1_000_000)


def test_each_rank_needs_the_memory_of_its_share() -> None:
    """Two bytes a parameter; half of every matrix and of the head, all of the embedding; boxes for the other rank's parts."""
    spec, limits, [layers] = replace(LLAMA, dtype="bfloat16"), Limits(4, 1024, 64), split_layers(LLAMA, 1)
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 64
    half = needs(spec, limits, 100, layers, 2)
    assert half.weights == 2 * (2 * layer // 2 + 96 * 32 + 48 * 32)
    tied = needs(replace(spec, tied_embeddings=True), limits, 100, layers, 2)
    assert tied.weights == half.weights  # the embedding, and a copy of the part that is the head
    assert half.kv_cache == needs(spec, limits, 100, layers).kv_cache // 2
    assert needs(spec, limits, 100, layers, 4).kv_cache == half.kv_cache  # as many heads: they are shared
    boxes = 2 * 1024 * 32 * 2
    assert half.activations > boxes
    beside = half.weights + half.activations + int(SPARE)
    free = [beside + 300 * half.kv_cache // 100]
    assert kv_tokens_that_fit(replace(spec, path="x"), limits, [layers], free, 2) == 300
    with pytest.raises(CapacityError, match=r"^each rank of model tiny-llama needs .*; lower kv_tokens to 300$"):
        check_memory(spec, limits, 400, [layers], free, 2)
