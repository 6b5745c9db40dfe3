"""Lower bounds: goldens by hand, and on random tiny instances against the optimum of all schedules.

    python -m pytest tests/test_bounds.py --instances=1000

compares that many.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from optimum import Ask, Machine

from cbatch import BatchShape, ConfigError, Limits, Policy, Request, Server
from cbatch.bounds import Bounds, Minorant, minorants_of
from cbatch.errors import ProfileError
from cbatch.kv import KVSize
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile
from experiments.config.presets import load_spec
from policies.chunking.fixed import Fixed
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe
from policies.vllm_v1 import VllmV1

UNIT = [Minorant(1.0)]
LINE = Minorant(1.0, per_token=0.25, per_score=0.02, per_context=0.05)


def bounds(asked: list[Ask], machine: Machine, minorants: list[Minorant] = UNIT) -> Bounds:
    requests = [Request(id_, ask.prompt, ask.output, arrival_time=ask.arrival) for id_, ask in enumerate(asked)]
    return Bounds(requests, minorants, Limits(machine.batch, machine.tokens, 1000), machine.memory)


def test_published_instance_has_its_bounds_by_hand() -> None:
    """MC-SF (arXiv 2502.07115) counts a token of KV cache more: its A 3/2, B 4/3, C 4/5, D 2/3 have prompts of 4, 5, 5, 3."""
    machine = Machine(4, 1000, 10)
    asked = [Ask(4, 2), Ask(5, 3), Ask(5, 5), Ask(3, 3)]
    areas = [(4 + 5) / 10, (5 + 6 + 7) / 10, (5 + 6 + 7 + 8 + 9) / 10, (3 + 4 + 5) / 10]  # 0.9, 1.8, 3.5, 1.2
    found = bounds(asked, machine)
    assert found.prefill.tolist() == [1, 1, 1, 1] and found.service.tolist() == [2, 3, 5, 3]
    assert found.makespan == pytest.approx(7.4)
    assert found.rate == pytest.approx(4 / sum(areas))
    assert found.srpt_latency == pytest.approx((0.9 + 2.1 + 3.9 + 7.4) / 4)
    assert found.ends == pytest.approx([2, 3, 3.9, 7.4])
    assert found.latency == pytest.approx((2 + 3 + 3.9 + 7.4) / 4)
    assert np.ceil(found.ends).sum() == 17, "in whole rounds"
    assert machine.best(asked, "latency") == 20


def test_a_prompt_takes_as_many_iterations_as_it_needs_alone() -> None:
    """5 tokens at 2 an iteration: 3 iterations, and a decode, or 3 again for 6 tokens; the machine does 5 + 1 tokens in 3."""
    found = bounds([Ask(5, 2)], Machine(4, 2, 1000))
    assert found.prefill.tolist() == [3] and found.service.tolist() == [4]
    assert found.rate == pytest.approx(1 / 3)
    [last] = bounds([Ask(5, 2, arrival=7.0)], Machine(4, 2, 1000), [LINE]).service
    assert last == pytest.approx(4 * 1.0 + 6 * 0.25 + (1 + 2 + 3 + 4 + 5) * 0.02 + 6 * 0.05)


def test_a_recomputation_may_be_cheaper_than_the_decode_it_replaces() -> None:
    """A decode at 3 tokens of context costs 1 + 3; after losing its KV cache the request computes 3 tokens at 1 + 0.01 * 6."""
    steep = Minorant(1.0, per_score=0.01, per_context=1.0)
    [service] = bounds([Ask(2, 2)], Machine(1, 100, 100), [steep]).service
    assert service == pytest.approx((1 + 0.01 * 3) + (1 + 0.01 * 6))


def test_requests_whose_arrival_depends_on_the_schedule_have_no_bounds() -> None:
    with pytest.raises(
        ConfigError, match="lower bounds: a request arrives by iteration; give requests with arrival times"
    ):
        Bounds([Request(0, 1, 1, arrival_iteration=1)], UNIT, Limits(1, 1, 10), 10)
    with pytest.raises(ConfigError, match="no requests"):
        Bounds([], UNIT, Limits(1, 1, 10), 10)


# Against all schedules


def unit_instances(number: int) -> Iterator[tuple[list[Ask], Machine, list[Minorant]]]:
    """Four requests in rounds of 1 s and 10 tokens of KV cache."""
    draw = Random(number)
    for _ in range(number):
        yield (
            [Ask(draw.randint(1, 5), draw.randint(1, 5), draw.choice((0, 0, 1, 2, 3))) for _ in range(4)],
            Machine(4, 99, 10),
            UNIT,
        )


def line_instances(number: int) -> Iterator[tuple[list[Ask], Machine, list[Minorant]]]:
    """Three requests on a machine whose iterations take what a minorant says, with chunks."""
    draw = Random(-number)
    for _ in range(number):
        line = Minorant(1.0, draw.random(), draw.random() / 4, draw.random() / 2)
        machine = Machine(draw.randint(1, 3), draw.randint(2, 4), draw.randint(6, 9), line.seconds, chunks=True)
        yield [Ask(draw.randint(1, 3), draw.randint(1, 3), 2 * draw.random()) for _ in range(3)], machine, [line]


@pytest.fixture
def num_instances(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--instances")
    return number


@pytest.mark.parametrize("instances", [unit_instances, line_instances])
def test_no_bound_exceeds_the_optimum(
    instances: Callable[[int], Iterator[tuple[list[Ask], Machine, list[Minorant]]]], num_instances: int
) -> None:
    shares = []
    for asked, machine, minorants in instances(num_instances):
        found = bounds(asked, machine, minorants)
        mean = machine.best(asked, "latency") / len(asked)
        assert found.srpt_latency <= found.latency
        of_mean = [found.service.mean(), found.srpt_latency, found.latency, found.decode_latency]
        shares.append([found.makespan / machine.best(asked, "makespan"), *(bound / mean for bound in of_mean)])
    average = dict(zip(("B2", "B1", "B5", "B6", "B7"), np.mean(shares, axis=0).round(3).tolist(), strict=True))
    assert np.max(shares) <= 1 + 1e-9, average
    assert average["B6"] > 0.8, average


# Profiles


CASES = [("h200", "llama-3.1-8b"), ("h200", "llama-13b"), ("h200", "qwen3-8b"), ("a6000-llama-13b", "nanogpt-13b")]
LIMITS = Limits(64, 1024, 4096)


def cost_of(hardware: str, model: str) -> ProfileCost:
    return ProfileCost(load_profile(hardware), load_spec(model), max_batch=LIMITS.max_batch)


def shapes(number: int) -> Iterator[BatchShape]:
    draw = Random(number)
    for _ in range(number):
        decodes = draw.choice((0, 1, draw.randint(1, 32), 60))
        chunks = draw.choice(([], [1024 - decodes], [draw.randint(2, 300) for _ in range(draw.randint(0, 3))]))
        contexts = [draw.randint(1, draw.choice((3, 300, 4096))) for _ in range(decodes)]
        if chunks or decodes:
            before = [draw.randint(0, draw.choice((1, 3000))) for _ in chunks]
            yield BatchShape(tuple(zip(chunks, before, strict=True)), decodes, sum(contexts))


@pytest.mark.parametrize(("hardware", "model"), CASES)
def test_minorants_lie_below_every_iteration_at_full_clock(hardware: str, model: str) -> None:
    cost = cost_of(hardware, model)
    lines = minorants_of(cost, LIMITS)
    closest = 0.0
    for shape in shapes(300):
        seconds = cost.predict(shape) - cost.execute(shape).pace.gain
        best = max(line.seconds(shape) for line in lines)
        assert best <= seconds * (1 + 1e-9), shape
        closest = max(closest, best / seconds)
    assert closest > 0.9, "some iteration is nearly as fast as the lines say"


def test_a_minorant_above_the_cost_model_is_refused() -> None:
    cost = cost_of("h200", "llama-3.1-8b")
    flat, *_ = minorants_of(cost, LIMITS)
    with pytest.raises(
        ProfileError, match=r"minorant: .* s for 1 tokens in 1 requests, above the cost model's .* s; lower the"
    ):
        replace(flat, fixed=2 * flat.fixed).check(cost, LIMITS)
    with pytest.raises(ProfileError, match="above the cost model"):
        replace(flat, per_context=1e-6).check(cost, LIMITS)
    with pytest.raises(ValueError, match="negative"):
        Minorant(-1.0)


@pytest.mark.parametrize(("hardware", "model"), CASES)
@pytest.mark.parametrize(
    "policy", [Orca(), SarathiServe(Fixed(256)), VllmV1(512)], ids=lambda policy: type(policy).__name__
)
def test_no_policy_beats_the_bounds(hardware: str, model: str, policy: Policy) -> None:
    """With a KV cache so small that requests are preempted, and the clock of the GPU as it moves."""
    cost, draw = cost_of(hardware, model), Random(3)
    asked = [Request(i, draw.randint(1, 900), draw.randint(1, 60), arrival_time=i * 0.02) for i in range(60)]
    found = Bounds(asked, minorants_of(cost, LIMITS), LIMITS, 8000)
    record = Server(SimExecutor(cost), LIMITS, cost, KVSize(500, 16), asynchronous=True).serve(policy, asked)
    ends, firsts = (np.array([getattr(each, at) for each in asked]) for at in ("finished_at", "first_token_at"))
    assert (found.prefill <= firsts - found.arrival).all() and (found.service <= ends - found.arrival).all()
    assert (found.ends <= np.sort(ends)).all()
    assert found.makespan <= record.steps[-1].ended
    latency, ttft = float((ends - found.arrival).mean()), float((firsts - found.arrival).mean())
    assert 0.25 * latency < found.latency <= latency
    assert found.decode_latency <= latency and found.ttft <= ttft


@pytest.mark.parametrize(("hardware", "model"), CASES)
def test_a_request_alone_takes_hardly_longer_than_its_bound(hardware: str, model: str) -> None:
    cost, asked = cost_of(hardware, model), [Request(0, 700, 50)]
    Server(SimExecutor(cost), LIMITS, cost, KVSize(500, 16), asynchronous=True).serve(Orca(), asked)
    [service] = Bounds(asked, minorants_of(cost, LIMITS), LIMITS, 8000).service
    assert asked[0].finished_at is not None and 0.7 < service / asked[0].finished_at <= 1
