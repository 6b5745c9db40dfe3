"""Predicted times and KV caches of several GPUs: shards, links, stages, and what was not measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_cluster import LINKS, SPEC, make_cost, profile
from test_sim_cost import LLAMA

from cbatch import BatchShape
from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import DecodeOnly, Measured
from cbatch.sim.profile_file import PROFILES, load_profile
from cbatch.sim.roofline import Affine
from experiments.setup.presets import load_spec


def test_two_gpus_that_were_not_measured_are_inferred_from_one(tmp_path: Path) -> None:
    """Errors against iterations measured on two GPUs are 5%; from rates of kernels, without any tables, 8 to 9%."""
    name = "llama-13b"
    spec, data = load_spec(name), json.loads((PROFILES / "h200.json").read_text())
    costs = [ProfileCost(load_profile("h200"), spec, Topology(2), max_batch=32)]
    for degree in ("2", "1"):
        del data["models"][name]["tensor_parallel"][degree]
        (tmp_path / f"{degree}.json").write_text(json.dumps(data))
        costs.append(ProfileCost(load_profile(str(tmp_path / f"{degree}.json")), spec, Topology(2), max_batch=32))
    shapes = [BatchShape((), number, number * 1280) for number in (1, 8, 16, 32, 64, 128)]
    shapes += [BatchShape(((tokens, 0),)) for tokens in (128, 256, 384, 512, 1024, 2048, 4096, 8192)]
    shapes += [BatchShape(((tokens, 0),), 31, 31000) for tokens in (225, 353, 481, 993)]
    measured, inferred, rates = ([cost.predict(shape) for shape in shapes] for cost in costs)
    errors = [np.mean(np.abs(np.divide(found, measured) - 1)) for found in (inferred, rates)]
    assert errors[0] < 0.055 < 0.08 < errors[1]
    assert set(costs[1].estimated) == {"linear", "attention", "other", "head"} and not costs[0].estimated
    assert costs[1].parts(shapes[3]).communication == costs[2].parts(shapes[3]).communication > 0


def test_gpus_that_share_a_key_value_head_each_read_it() -> None:
    """There are two key-value heads for four GPUs: each GPU has one of them, and a quarter of the products."""
    grid, curve = BilinearGrid((1.0,), ((1.0,),), ((4e-3,),)), PiecewiseLinear((1.0,), (8e-3,))
    alone = Measured(linear=curve, chunks=grid, decodes=grid, other=curve)
    cost = ProfileCost(profile(measured={1: alone}), SPEC, Topology(4))
    parts = cost.parts(BatchShape((), 1, 1))
    assert (parts.linear, parts.attention, parts.other) == pytest.approx((8 * 2e-3, 8 * 2e-3, 8 * 8e-3), rel=1e-4)


def test_a_gpu_of_two_does_half_the_products_and_pays_two_all_reduces_a_layer() -> None:
    shape = BatchShape(((16, 0),))
    one, two = make_cost(Topology()).parts(shape), make_cost(Topology(2)).parts(shape)
    assert two.attention == pytest.approx(one.attention / 2)
    assert two.linear < 0.6 * one.linear
    assert two.communication == pytest.approx(2 * 8 * LINKS.all_reduce[2].at(16 * 64 * 2))


def test_decodes_alone_have_their_own_tables_up_to_the_most_that_were_measured() -> None:
    fast, slow = (PiecewiseLinear((1.0, 2.0, 4.0), (seconds,) * 3) for seconds in (1e-3, 2e-3))
    measured = Measured(linear=slow, other=slow, decode_only=DecodeOnly(fast, fast, fast))
    cost = ProfileCost(profile(measured={1: measured}), SPEC)
    layers = [cost.parts(BatchShape((), number, number)).linear for number in (2, 3, 4, 5)]
    assert layers == pytest.approx([8e-3, 8e-3, 8e-3, 8 * 2e-3 * 5 / 4])  # beyond the tables, in proportion


def test_decodes_of_any_number_at_one_context_have_times_of_their_own() -> None:
    """The times of one decode are kept by its context; two whose contexts sum up to the same take longer or shorter."""
    shapes = [BatchShape((), 1, 9), BatchShape((), 2, 8)]
    for order in (shapes, shapes[::-1]):
        cost = make_cost(Topology())
        for following, times in (next(cost.execute_decodes(shape)) for shape in order):
            assert following.decode_context == 10 and times == make_cost(Topology()).execute(following)


def test_stages_on_different_nodes_are_linked_by_the_network() -> None:
    topology = Topology(tensor_parallel=2, pipeline_stages=4, gpus_per_node=4)
    for ranks, gpus in ((2, 4), (3, 8)):  # two GPUs of each node of eight are left
        placed = replace(topology, tensor_parallel=ranks, gpus_per_node=gpus)
        assert [placed.leaves_node(stage) for stage in range(3)] == [False, True, False]
    within, between, _ = make_cost(topology).execute(BatchShape(((10, 0),))).transfers
    assert (within, between) == (pytest.approx(1e-6 + 1280 / 1e9), pytest.approx(1e-5 + 1280 / 1e8))
    used = [{name for name in make_cost(each).origins() if "node" in name} for each in (topology, Topology(2, 2))]
    assert used == [{"within_node", "between_nodes"}, {"within_node"}]
    stated = make_cost(replace(topology, network=50.0))  # 50 GB/s, in place of the profile's table
    assert stated.execute(BatchShape(((10, 0),))).transfers[:2] == (within, pytest.approx(1280 / 50e9))
    assert "between_nodes (assumed)" in stated.provenance()["not_measured"]
    assert make_cost(topology).provenance()["gpus"] == 8


def test_kv_blocks_are_copied_in_times_of_their_own() -> None:
    """Within a node, where the profile has them: 0.2 ms and 2 GB/s; the network has one rate."""
    links = replace(LINKS, kv_blocks=Affine(2e-4, 1 / 2e9))
    cost, without = ProfileCost(profile(links=links), SPEC), make_cost(Topology())
    assert cost.link(False, blocks=True).at(2e6) == pytest.approx(1.2e-3)
    assert cost.link(False).at(2e6) == without.link(False, blocks=True).at(2e6) == pytest.approx(1e-6 + 2e-3)
    assert cost.link(True, blocks=True).at(2e6) == pytest.approx(1e-5 + 2e-2)
    assert {
        "kv_blocks",
        "within_node",
        "between_nodes",
    } <= cost.origins().keys() and "kv_blocks" not in without.origins()


def outside(cost: ProfileCost, *shapes: BatchShape) -> list[int]:
    """The iterations counted as outside of what was measured, after each of the shapes."""
    return [cost.execute(shape) and cost.num_outside for shape in shapes]  # type: ignore[misc]


def test_iterations_with_prompts_that_fit_no_graph_are_counted() -> None:
    """The largest graph of `h200` has 2,048 tokens, that of `h200-vllm` 512; decodes alone and predictions do not count."""
    shapes = [BatchShape(((prompt, 0),), 8, 800) for prompt in (504, 505, 2040, 2041)] + [BatchShape((), 8, 800)]
    for name, counts in (("h200", [0, 0, 0, 1, 1]), ("h200-vllm", [0, 1, 2, 3, 3])):
        cost = ProfileCost(load_profile(name), load_spec("llama-3.1-8b"), max_batch=48)
        assert [cost.execute(shape) and cost.num_eager for shape in shapes] == counts
        assert cost.predict(shapes[3]) and cost.num_eager == counts[-1]
    without = ProfileCost(profile(), SPEC)
    assert [without.execute(shape) and without.num_eager for shape in shapes] == [1, 2, 3, 4, 4], "no graph is known"


def test_shapes_outside_what_was_measured_are_counted() -> None:
    at_hand = profile(measured={1: Measured(linear=PiecewiseLinear((1, 64), (1e-6, 1e-5)))})
    marked = ProfileCost(at_hand, SPEC)
    inside, beyond = BatchShape(((64, 0),)), BatchShape(((65, 0),))
    assert outside(marked, inside, beyond) == [0, 1]
    assert marked.predict(beyond) > marked.predict(inside)
    assert marked.num_outside == marked.provenance()["iterations_outside_measured_range"] == 1, "not the prediction"
    # a token is 64 numbers of 2 bytes; the table ends at 1e6 bytes, that of the products of two GPUs at 10,000 tokens
    table = PiecewiseLinear((1.0, 1e4), (1e-6, 1e-3))
    two = ProfileCost(profile(measured={2: Measured(linear=table, other=table)}), SPEC, Topology(2))
    assert outside(two, BatchShape(((7812, 0),)), BatchShape(((7813, 0),))) == [0, 1]
    h200, measured, more = ProfileCost(load_profile("h200"), LLAMA), BatchShape((), 128, 128), BatchShape((), 256, 256)
    assert outside(h200, measured, more) == [0, 1]
    assert h200.predict(measured) < h200.predict(more) < 1.7 * h200.predict(measured), "as so many prompt tokens"


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        (Topology(3), "tensor_parallel=3 does not divide the 4 attention heads of model=small; choose one of 1, 2, 4"),
        (Topology(1, 3), "pipeline_stages=3 does not divide the 8 layers of model=small; choose one of 1, 2, 4, 8"),
    ],
)
def test_a_topology_that_does_not_divide_the_model_is_refused(topology: Topology, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_cost(topology)
    with pytest.raises(ConfigError, match="replicas=0: give a whole number from 1 to 10000"):
        Topology(replicas=0)
    with pytest.raises(ConfigError, match="tensor_parallel=4 exceeds gpus_per_node=2, and all-reduces are modelled"):
        Topology(4, gpus_per_node=2)


def test_key_value_heads_are_copied_where_there_are_fewer_than_gpus() -> None:
    assert Topology(4).share(SPEC).num_kv_heads == 1
    odd = ModelSpec("odd", "llama", 8, 64, 12, 3, 16, 144, 100, 64)
    with pytest.raises(ConfigError, match=r"does not divide the 3 key-value heads of model=odd; choose one of 1, 3"):
        Topology(2).share(odd)
    nine = ModelSpec("nine", "llama", 8, 576, 9, 3, 64, 1536, 100, 64)
    with pytest.raises(ConfigError, match=r"9 does not divide the 1536 columns .* of model=nine; choose one of 1, 3$"):
        Topology(9, gpus_per_node=9).share(nine)
    nine = replace(nine, intermediate_size=1152)
    assert ProfileCost(profile(links=LINKS), nine, Topology(9, gpus_per_node=9)).predict(BatchShape((), 1, 1)) > 0


def test_missing_links_are_named() -> None:
    bare = profile(links=Links())
    with pytest.raises(
        ProfileError,
        match=r"hardware=made-up has no all-reduce times, tensor_parallel=2 .*; add links.all_reduce.2, with",
    ):
        ProfileCost(bare, SPEC, Topology(2))
    with pytest.raises(
        ProfileError, match=r"hardware=made-up has no send times within a node.*; add links.within_node, with"
    ):
        ProfileCost(bare, SPEC, Topology(1, 2))
    with pytest.raises(
        ProfileError,
        match=r"hardware=made-up has no send times between nodes.*; give backend.network in GB/s, or add links.between_nodes",
    ):
        bare.links.to_next_stage(True, bare.name)


def test_an_all_reduce_is_estimated_from_the_nearest_number_of_gpus_and_marked() -> None:
    """A ring of 7 sends 12/7 of the bytes over each link, one of 8 sends 14/8, one of 4 6/4, one of 2 all of them."""
    links = Links({2: PiecewiseLinear((1, 2), (5.0, 5.0)), 8: PiecewiseLinear((1, 2), (7.0, 7.0))})
    found, estimated = links.all_reduce_of(7, "made-up")
    assert estimated and found.at(1) == pytest.approx(7.0 * (12 / 7) / (14 / 8))
    formula = Links({4: Affine(1e-5, 1e-9)})
    assert formula.all_reduce_of(4, "made-up")[0].at(1e4) == pytest.approx(2e-5)
    with pytest.raises(ProfileError, match=r"^hardware=made-up has a formula .* of 4 GPUs.*; add links.all_reduce.2$"):
        formula.all_reduce_of(2, "made-up")
    cost = make_cost(Topology(4, gpus_per_node=8))
    of_two, of_four = LINKS.all_reduce[2].at(1e6), cost.parts(BatchShape(((7813, 0),))).communication / 16
    assert "all_reduce" in cost.estimated and of_four == pytest.approx(of_two * 1.5, rel=0.01)
    named = [{name for name in made.origins() if "all_reduce" in name} for made in (cost, make_cost(Topology(2)))]
    assert named == [{"all_reduce"}, {"all_reduce.2"}], "the table of four does not exist"


def test_kv_cache_is_what_weights_and_activations_leave() -> None:
    h200 = load_profile("h200")
    tokens = h200.kv_tokens(LLAMA, 2048)
    values = 3 * 4096 + 2 * 6144 + 2 * 14336 + 14336  # of a token, each of 2 bytes
    beside = LLAMA.weight_bytes + 2048 * values * 2
    assert tokens * 131072 == pytest.approx(0.9 * h200.memory_bytes - beside, rel=1e-4)  # 128 KiB a token
    assert h200.kv_tokens(LLAMA, 2048, Topology(2, 4)) > 8 * tokens
    huge = ModelSpec("huge", "llama", 200, 16384, 128, 8, 128, 53248, 128256, 8192)
    with pytest.raises(
        ConfigError, match=r"model=huge does not fit: 1.* GB of weights per GPU.*, but hardware=h200 has"
    ):
        h200.kv_tokens(huge, 2048)
    curve, large = PiecewiseLinear((1, 2), (5.0, 5.0)), replace(huge, num_layers=30)
    for links, lacking in ((Links(), " and add links.all_reduce.2, with .*"), (Links({2: curve}), "")):
        with pytest.raises(ConfigError, match=rf"tensor_parallel=2{lacking}, or choose a smaller model$"):
            replace(h200, links=links).kv_tokens(large, 2048)
    for links, lacking in ((Links(), " and add links.within_node, with .*"), (Links(within_node=curve), "")):
        with pytest.raises(ConfigError, match=rf"with backend=sim{lacking}, or choose a smaller model$"):
            replace(h200, links=links).kv_tokens(huge, 2048, Topology(gpus_per_node=1))


@pytest.mark.parametrize(("gigabytes", "max_tokens", "printed"), [(23.58, 20000, 31232), (23.58, 29000, 23648)])
def test_kv_cache_is_near_the_size_that_vllm_prints(gigabytes: float, max_tokens: int, printed: int) -> None:
    """Llama-3.1-8B on an RTX 3090 (vllm-project/vllm issue 10517): prompts are computed whole, so the iteration decides."""
    card = replace(load_profile("h200"), memory_bytes=gigabytes * 2**30)
    assert card.kv_tokens(LLAMA, max_tokens) == pytest.approx(printed, rel=0.1)
