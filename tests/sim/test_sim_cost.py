"""The cost model: against what was measured, its parts, what it estimates and what it extrapolates."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from small_cluster import SPEC, make_cost, profile

from cbatch import BatchShape, Engine, Limits, Request
from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.results.summary import summarize
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import BilinearGrid, PiecewiseLinear
from cbatch.sim.measured import HostTime, Measured
from cbatch.sim.profile import Card
from cbatch.sim.profile_file import load_profile
from cbatch.sim.roofline import Ceilings
from experiments.setup.presets import load_spec
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


@pytest.mark.parametrize(
    ("name", "last", "step"),
    [("h100-vllm", 240, 8 * (9.6685 - 8.9752) / 64), ("h200-vllm", 232, 8 * (7.3382 - 7.0758) / 64)],
)
def test_decodes_beyond_the_measured_ones_take_longer_by_what_tokens_beside_prompts_add(
    name: str, last: int, step: float
) -> None:
    """vLLM has graphs of decodes up to 512 tokens. Beside prompts 192 and 256 tokens take these milliseconds."""
    cost = ProfileCost(load_profile(name), LLAMA, max_batch=256)
    at_last, next_graph, largest = (
        1e3 * cost.predict(BatchShape((), number, 0)) for number in (last, last + 1, last + 8)
    )
    assert next_graph == pytest.approx(at_last + step, rel=2e-4) and largest == pytest.approx(next_graph, rel=1e-4)


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


@pytest.mark.parametrize("receives", [False, True])
@pytest.mark.parametrize(("launching", "ranks"), [(0.02, 1), (0.2, 1), (0.2, 2)])
def test_an_iteration_without_a_graph_keeps_the_host_while_the_device_computes(
    launching: float, ranks: int, receives: bool
) -> None:
    """A prompt of 2,100 tokens, which fits no graph, while another request decodes, in 4 ms: its token is received late, or during the launch.

    One thread launches the operations of both ranks. The next plan waits for that, and sees the request that arrives meanwhile.
    """
    cost = ProfileCost(load_profile("h200"), LLAMA, Topology(ranks), max_batch=4)
    executor = SimExecutor(cost, HostTime(0.001, eager_seconds=launching / ranks, receives_in_launch=receives))
    limits = Limits(max_batch=4, max_tokens=2304, max_request_tokens=2304, tile=128)
    engine = Engine(Orca(), executor, limits, cost, num_blocks=99, block_size=64)
    engine.submit([Request(0, 64, 6), Request(1, 2100, 1, arrival_time=0.012), Request(2, 9, 1, arrival_time=0.031)])
    steps = engine.run().steps
    place = next(place for place, step in enumerate(steps) if step.num_prefill_tokens == 2100)
    decode, prompt, following = steps[place - 1 : place + 2]
    launched = prompt.planned_at + 0.001 + launching
    assert prompt.launched_at == pytest.approx(prompt.planned_at + 0.001 if receives else launched)
    assert decode.ended < prompt.planned_at + 0.005
    assert decode.received_at == (decode.ended if receives else prompt.launched_at)
    assert prompt.started == pytest.approx(max(decode.ended, prompt.planned_at + 0.001))
    assert (prompt.ended == pytest.approx(launched)) == (launching > 0.02)
    assert following.planned_at == pytest.approx(launched) and following.num_prefill_tokens == 9
    assert all(step.launched_at - step.planned_at == pytest.approx(0.001) for step in steps[:place])


def test_a_pipeline_whose_oldest_iteration_ends_during_a_launch_plans_a_request_that_arrives_after_it() -> None:
    cost = ProfileCost(load_profile("h200"), LLAMA, Topology(1, 2), max_batch=4)
    executor = SimExecutor(cost, HostTime(0.001, eager_seconds=0.2, receives_in_launch=True))
    limits = Limits(max_batch=4, max_tokens=2304, max_request_tokens=2304, tile=128, num_stages=2)
    engine = Engine(Orca(), executor, limits, cost, num_blocks=99, block_size=64)
    engine.submit([Request(0, 64, 9), Request(1, 2100, 1, arrival_time=0.012), Request(2, 9, 1, arrival_time=0.1)])
    steps = engine.run().steps
    place = next(place for place, step in enumerate(steps) if step.num_prefill_tokens == 2100)
    before, prompt, following = steps[place - 1 : place + 2]
    assert before.ended < 0.1 < prompt.launched_at + 0.2 == pytest.approx(following.planned_at)
    assert following.num_prefill_tokens == 9


def test_the_card_s_factor_of_launches_lengthens_those_without_a_graph_alone() -> None:
    """Prompts of 300 tokens and decodes have graphs, the prompt of 2,100 has none: h200's 23.44 ms become 35.16 on the slower host."""
    launches = []
    for factor in (1.0, 1.5):
        slower = replace(load_profile("h200"), card=Card("slow host", launches=factor))
        cost = ProfileCost(slower, LLAMA, max_batch=4)
        executor = SimExecutor(cost, slower.host_time(True, LLAMA))
        limits = Limits(max_batch=4, max_tokens=2304, max_request_tokens=2304, tile=128)
        engine = Engine(Orca(), executor, limits, cost, num_blocks=99, block_size=64)
        engine.submit([Request(0, 300, 9), Request(1, 2100, 4, arrival_time=0.02)])
        steps = engine.run().steps
        launches.append(
            {step.num_prefill_tokens: after.planned_at - step.launched_at for step, after in pairwise(steps)}
        )
    longer = {tokens: launches[1][tokens] - usual for tokens, usual in launches[0].items()}
    assert longer.keys() == {300, 2100, 0} and longer[2100] == pytest.approx(0.01172) and longer[300] == 0


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
    """The tables are of one layer, the model has eight."""
    rows = BilinearGrid((16.0, 128.0), ((2.0, 64.0),) * 2, ((1e-3, 1e-3), (2e-3, 2e-3)))
    curve = PiecewiseLinear((1.0, 128.0), (1e-2, 1e-2))
    made = profile(measured={1: Measured(linear=curve, other=curve, captured_rows=rows)})
    made = replace(made, ceilings=Ceilings(1e8, 1e10, 4))
    few, many = (ProfileCost(made, SPEC, max_batch=batch) for batch in (16, 128))
    saved = [many.predict(shape) - few.predict(shape) for shape in (BatchShape(((64, 0),)), BatchShape(((65, 0),)))]
    assert saved == pytest.approx([8e-3, 0.0])


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
