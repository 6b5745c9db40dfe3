"""The cost model: against what was measured, its parts, what it estimates and what it extrapolates."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_cluster import LINKS, SPEC, make_cost, profile

from cbatch import BatchShape, Engine, Limits, Request
from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.results.summary import summarize
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import DecodeOnly, HostTime, Measured
from cbatch.sim.profile_file import PROFILES, load_profile
from cbatch.sim.roofline import Ceilings
from experiments.settings.presets import load_spec
from policies.orca import Orca

LLAMA = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
OTHER = ModelSpec("some-13b", "llama", 40, 5120, 40, 40, 128, 13312, 32000, 4096)

UNLIKE = replace(OTHER, dtype="float32")
"""No measured model has its format of numbers."""

MEASURED_MS = {1: 3.8, 128: 4.965, 192: 6.299, 256: 6.822, 384: 9.079, 512: 11.347, 768: 17.302, 1024: 22.562}
"""Duration of an iteration of llama-3.1-8b by tokens, one decode or a prompt's chunk: medians of 5 on another H200, 2026-11-23, at b0273604645b.

Graphs of exactly that size, for a batch of one: the lightest there are.
"""

CARDS = 1.03
"""How far that card may be from the profile's, whatever its speed: 2.9% was seen, at 1,024 tokens."""


@pytest.mark.parametrize("tokens", MEASURED_MS)
def test_iterations_measured_on_an_h200_lie_between_the_predictions(tokens: int) -> None:
    """Each was timed over some tens of milliseconds, in which the clock begins to fall.

    So it was no faster than at full clock, and no slower than in the steady state. The card's speed is that of its lightest
    iteration, a decode.
    """
    shape = BatchShape(((tokens, 0),)) if tokens > 1 else BatchShape((), 1, 1)
    cost = ProfileCost(load_profile("h200"), LLAMA, max_batch=1)
    seconds, lightest = MEASURED_MS[tokens] / 1e3, MEASURED_MS[1] / 1e3
    speed = cost.predict(BatchShape((), 1, 1)) / lightest if tokens > 1 else 1
    steady, full_clock = cost.predict(shape), cost.predict(shape) - cost.execute(shape).pace.gain
    assert full_clock / CARDS < seconds * speed < steady * CARDS


BANDWIDTHS = {"h100": 3.35e12, "h100-vllm": 3.35e12, "h200": 4.8e12, "h200-vllm": 4.8e12, "a6000-llama-13b": 768e9}
"""Bytes/s by the data sheets; the profiles' ceilings are of copies, and reading is faster."""


@pytest.mark.parametrize("name", BANDWIDTHS)
def test_no_iteration_is_faster_than_its_arithmetic_and_its_reading(name: str) -> None:
    """Random shapes, most of them outside the measured range, of measured models and of others."""
    draws, profile = np.random.default_rng(5), load_profile(name)
    for model in ("llama-3.1-8b", "llama-13b", "llama-2-7b", "qwen3-8b", "yi-34b"):
        spec = load_spec(model)
        weights = spec.num_layers * sum(inputs * outputs for inputs, outputs in spec.linear_shapes.values())
        heads, values = spec.num_heads * spec.head_dim, 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers
        cost = ProfileCost(profile, spec)
        for _ in range(500):
            pairs = 2 ** draws.uniform(0, 17, (draws.integers(3), 2))
            chunks = tuple((int(tokens), int(before)) for tokens, before in pairs)
            decodes = int(draws.integers(0 if chunks else 1, 257))
            shape = BatchShape(chunks, decodes, decodes * int(2 ** draws.uniform(0, 17)))
            scores = shape.decode_context + sum(tokens * (before + (tokens + 1) / 2) for tokens, before in chunks)
            operations = 2 * shape.num_tokens * weights + 4 * heads * scores * spec.num_layers
            read = 2 * (weights + values * (shape.decode_context + sum(before for _, before in chunks)))
            arithmetic, reading = operations / profile.ceilings.flops_per_second, read / BANDWIDTHS[name]
            assert cost.predict(shape) >= max(arithmetic, reading), shape


LONG = [(8_192, 0.207), (16_384, 0.454), (32_768, 1.15), (65_280, 3.08)]
"""Tokens of a prompt, and what it took alone and whole on an H100 other than the profile's."""


@pytest.mark.parametrize(("tokens", "whole"), LONG)
def test_long_prompts_take_what_they_took_on_another_h100(tokens: int, whole: float) -> None:
    cost = ProfileCost(load_profile("h100"), LLAMA)
    assert cost.predict(BatchShape(((tokens, 0),))) == pytest.approx(whole, rel=0.05)


TURNS = [
    (0, 48.0, 7.77),
    (1, 49.5, 8.39),
    (2, 51.0, 9.25),
    (3, 52.9, 10.34),
    (4, 54.5, 11.46),
    (5, 55.3, 12.56),
    (6, 57.1, 13.67),
    (7, 58.5, 14.76),
]
"""64 conversations in lockstep on another H100 (c3b8eb2): the turn, mean ms of its iterations of 2,048 tokens after the first, and of 64 decodes."""


@pytest.mark.parametrize(("turn", "mixed", "decodes"), TURNS)
def test_conversations_take_what_they_took_on_another_h100(turn: int, mixed: float, decodes: float) -> None:
    """All share 1,024 tokens; a turn has 256 more and an answer of 128, and half of the conversations decode while the others' prompts are computed."""
    cost, before = ProfileCost(load_profile("h100"), LLAMA, max_batch=64), 1024 + 384 * turn
    chunks = ((256, before),) * 7 + ((224, before),)
    assert cost.predict(BatchShape(chunks, 32, 32 * (before + 260), num_shared=31 * 1024)) == pytest.approx(
        mixed / 1e3, rel=0.08
    )
    assert cost.predict(BatchShape((), 64, 64 * (before + 316), num_shared=63 * 1024)) == pytest.approx(
        decodes / 1e3, rel=0.03
    )


@pytest.mark.parametrize(
    ("shape", "max_batch", "computed"),
    [
        (BatchShape(((385, 0),)), 128, 512),
        (BatchShape(((512, 0),)), 128, 512),
        (BatchShape(((380, 0),), 5, 50), 128, 512),
        (BatchShape(((100, 0),)), 18, 128),
        (BatchShape(((100, 0),)), 128, 192),  # a graph for 128 tokens would have no token per request to spare
        (BatchShape(((1025, 0),)), 18, 1152),
        (BatchShape(((2048, 0),)), 18, 2048),
        (BatchShape(((2049, 0),)), 18, 2049),
        (BatchShape((), 5, 50), 18, 8),
        (BatchShape((), 17, 170), 18, 18),
        (BatchShape((), 17, 170), 128, 32),
        (BatchShape((), 3, 30, 130), 18, 192),  # the plan pads decodes to 133, which only graphs with prompts hold
        (BatchShape(((100, 0),)), 0, 192),  # of the largest batch measured
        (BatchShape(((385, 0),), 2, 20, 7), None, 385 + 2 + 7),  # of a model without graphs
    ],
)
def test_an_iteration_is_padded_to_the_graph_that_holds_it(
    shape: BatchShape, max_batch: int | None, computed: int
) -> None:
    spec = UNLIKE if max_batch is None else LLAMA
    cost = ProfileCost(load_profile("h200"), spec, max_batch=max_batch)
    assert (cost.graph_tokens(shape) or shape.num_tokens) == computed


def test_a_prompt_of_385_tokens_that_costs_as_much_as_512_has_127_of_padding() -> None:
    cost = ProfileCost(load_profile("h200"), LLAMA, max_batch=4)
    limits = Limits(max_batch=4, max_tokens=512, max_request_tokens=512, tile=128)
    engine = Engine(Orca(), SimExecutor(cost), limits, cost, num_blocks=99, block_size=16)
    engine.submit([Request(0, 385, 1)])
    record = engine.run()
    assert [step.num_padding_tokens for step in record.steps] == [127]
    figures = summarize(record, num_blocks=99, max_batch=4)["iterations"]
    assert (figures["batch_tokens"], figures["padding_share"]) == (512, 127 / 512)


@pytest.mark.parametrize("launching", [0.02, 0.2])
def test_an_iteration_without_a_graph_keeps_the_host_while_the_device_computes(launching: float) -> None:
    """A prompt of 2,100 tokens, which fits no graph, while another request decodes, in 4 ms: its token is received late."""
    cost = ProfileCost(load_profile("h200"), LLAMA, max_batch=4)
    executor = SimExecutor(cost, HostTime(0.001, eager_seconds=launching))
    limits = Limits(max_batch=4, max_tokens=2304, max_request_tokens=2304, tile=128)
    engine = Engine(Orca(), executor, limits, cost, num_blocks=99, block_size=64)
    engine.submit([Request(0, 64, 6), Request(1, 2100, 1, arrival_time=0.012)])
    steps = engine.run().steps
    place = next(place for place, step in enumerate(steps) if step.num_prefill_tokens == 2100)
    decode, prompt = steps[place - 1], steps[place]
    assert prompt.launched_at - prompt.planned_at == pytest.approx(0.001 + launching)
    assert decode.ended < prompt.planned_at + 0.005 and decode.received_at == prompt.launched_at
    assert prompt.started == pytest.approx(max(decode.ended, prompt.planned_at + 0.001))
    assert (prompt.ended == prompt.launched_at) == (launching == 0.2)
    assert all(step.launched_at - step.planned_at == pytest.approx(0.001) for step in steps[:place])


@pytest.mark.parametrize("alone", [False, True])
def test_products_faster_than_the_data_sheet_are_refused(alone: bool) -> None:
    """8,192 tokens of the 8B model take an H100 116 ms at its peak; a simulator was found to take 32."""
    shipped = load_profile("h100")
    model = shipped.models[LLAMA.name]
    measured = model.tensor_parallel[1]
    assert measured.decode_only is not None
    wrong = PiecewiseLinear((128, 8192), (0.001, 0.032))
    only = replace(measured.decode_only, linear=wrong)
    tables = replace(measured, decode_only=only) if alone else replace(measured, linear=wrong)
    damaged = replace(shipped, models={LLAMA.name: replace(model, tensor_parallel={1: tables})})
    with pytest.raises(
        ProfileError, match=r"hardware=h100: products of llama-3.1-8b with 128 tokens reach 1787 TFLOP/s"
    ):
        ProfileCost(damaged, LLAMA)


def test_a_model_unlike_all_measured_ones_is_estimated_from_the_ceilings_and_marked() -> None:
    h200 = load_profile("h200")
    cost = ProfileCost(h200, UNLIKE)
    assert cost.estimated == ("linear", "head")
    assert ProfileCost(h200, LLAMA).estimated == ()
    others = "attention (assumed), other (assumed), head (fallback), linear (fallback)"
    assert cost.provenance()["not_measured"] == others.split(", ")
    layers = OTHER.num_layers * sum(k * n for k, n in OTHER.linear_shapes.values())
    one, many = cost.parts(BatchShape((), 1, 1)).linear, cost.parts(BatchShape(((4096, 0),))).linear
    assert one == pytest.approx(4 * layers / h200.ceilings.bandwidth_bytes_per_second, rel=0.01)
    assert many == pytest.approx(2 * layers * 4096 / 50.7e12, rel=0.01), "float32, as measured"


def test_a_compute_bound_prefill_in_float32_runs_at_that_rate() -> None:
    """By hand: 32 layers of 218,103,808 weights, 2 operations each for 8,192 tokens, at the 67 TFLOP/s of an H100's data sheet.

    Attention: 8,192 * 8,193 / 2 scores, 4 * 32 * 128 operations each. The tables are of bfloat16 and are not used.
    """
    h100, spec = load_profile("h100"), replace(LLAMA, dtype="float32")
    parts = ProfileCost(h100, spec).parts(BatchShape(((8192, 0),)))
    assert parts.linear == pytest.approx(1.7067, rel=1e-3)
    assert parts.attention == pytest.approx(32 * 33_558_528 * 16_384 / 67e12, rel=1e-3)
    assert {"linear", "attention"} <= set(ProfileCost(h100, spec).estimated)
    assert h100.origin("ceilings", "flops_per_second_by_dtype").startswith("assumed: data sheet of the H100")
    unstated = replace(h100, ceilings=replace(h100.ceilings, flops_per_second_by_dtype={}))
    with pytest.raises(ProfileError, match=r"hardware=h100: .* add ceilings\.flops_per_second_by_dtype\.float32"):
        ProfileCost(unstated, spec)
    nameless = {name: replace(model, shape={}) for name, model in h100.models.items()}
    assert replace(h100, models=nameless).measured_as(spec) == ""


def test_products_in_milliseconds_are_refused() -> None:
    h100 = load_profile("h100")
    model = h100.models["llama-3.1-8b"]
    tables = {1: model.tensor_parallel[1].scaled(linear=1e3)}
    slipped = replace(h100, models={"llama-3.1-8b": replace(model, tensor_parallel=tables)})
    with pytest.raises(ProfileError, match=r"h100: products of llama-3\.1-8b .* give the table of linear in seconds"):
        ProfileCost(slipped, LLAMA)


@pytest.mark.parametrize("tokens", [64, 384, 512])
def test_a_captured_row_less_is_taken_off_every_kernel(tokens: int) -> None:
    """What the rows of the largest batch cost was measured within products and small operations, in proportion."""
    shape, spec = BatchShape(((tokens, 0),)), replace(OTHER, intermediate_size=13824)
    few, many, none = (
        ProfileCost(load_profile("h200"), spec, max_batch=batch).parts(shape) for batch in (18, 128, None)
    )
    assert 0 < few.linear / many.linear < 1
    assert few.other / many.other == pytest.approx(few.linear / many.linear, rel=1e-3)  # the clock is in the products
    assert (few.attention, few.head) == (many.attention, many.head)
    assert (many.linear, many.other) == pytest.approx((none.linear, none.other)), "tables are of the largest batch"


def test_captured_rows_count_up_to_the_largest_graph() -> None:
    rows = BilinearGrid((16.0, 128.0), ((2.0, 64.0),) * 2, ((1e-3, 1e-3), (2e-3, 2e-3)))
    curve = PiecewiseLinear((1.0, 128.0), (1e-2, 1e-2))
    made = profile(measured={1: Measured(linear=curve, other=curve, captured_rows=rows)})
    made = replace(made, ceilings=Ceilings(1e8, 1e10, 4))
    few, many = (ProfileCost(made, SPEC, max_batch=batch) for batch in (16, 128))
    saved = [many.predict(shape) - few.predict(shape) for shape in (BatchShape(((64, 0),)), BatchShape(((65, 0),)))]
    assert saved == pytest.approx([1e-3, 0.0])


def test_the_parts_are_the_whole() -> None:
    shape = BatchShape(((16, 8),), 3, 60, 1)
    for topology in (Topology(), Topology(2)):
        cost = make_cost(topology)
        assert cost.predict(shape) == pytest.approx(cost.parts(shape).total)
    pipeline = make_cost(Topology(2, 4))
    times = pipeline.execute(shape)
    whole = 4 * (times.compute + times.communication) + times.embedding + times.head + sum(times.transfers)
    assert pipeline.parts(shape).total == pytest.approx(whole)
    assert pipeline.predict(shape) == times.compute + times.communication + times.head  # the last stage


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
    assert [topology.leaves_node(stage) for stage in range(3)] == [False, True, False]
    within, between, _ = make_cost(topology).execute(BatchShape(((10, 0),))).transfers
    assert (within, between) == (pytest.approx(1e-6 + 1280 / 1e9), pytest.approx(1e-5 + 1280 / 1e8))
    used = [{name for name in make_cost(each).origins() if "node" in name} for each in (topology, Topology(2, 2))]
    assert used == [{"within_node", "between_nodes"}, {"within_node"}]
    assert make_cost(topology).provenance()["gpus"] == 8


def outside(cost: ProfileCost, *shapes: BatchShape) -> list[int]:
    """The iterations counted as outside of what was measured, after each of the shapes."""
    return [cost.execute(shape) and cost.num_outside for shape in shapes]  # type: ignore[misc]


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
        ProfileError, match=r"hardware=made-up has no send times between nodes.*; add links.between_nodes, with"
    ):
        bare.links.to_next_stage(True, bare.name)


def test_an_all_reduce_is_estimated_from_the_nearest_number_of_gpus_and_marked() -> None:
    """A ring of 7 sends 12/7 of the bytes over each link, one of 8 sends 14/8, one of 4 6/4, one of 2 all of them."""
    links = Links({2: PiecewiseLinear((1, 2), (5.0, 5.0)), 8: PiecewiseLinear((1, 2), (7.0, 7.0))})
    found, estimated = links.all_reduce_of(7, "made-up")
    assert estimated and found.at(1) == pytest.approx(7.0 * (12 / 7) / (14 / 8))
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
