"""Lower bounds: goldens by hand, and on random tiny instances against the optimum of all schedules.

    python -m pytest tests/bounds/test_bounds.py --instances=1000

compares that many.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from random import Random

import numpy as np
import pytest
from optimum import Ask, Machine

from cbatch import BatchShape, ConfigError, Limits, Policy, Request, Server
from cbatch.bounds import Bounds, Minorant, minorants_of
from cbatch.bounds.machine import Floats, fewest_late
from cbatch.bounds.minorants import _hull
from cbatch.kv import KVSize
from cbatch.request_spec import SLO
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile_file import load_profile, make_profile, profile_content
from experiments.setup.presets import load_spec
from policies.chunking.fixed import Fixed
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe
from policies.vllm_v1 import VllmV1

UNIT = [Minorant(1.0)]
LINE = Minorant(1.0, per_token=0.25, per_score=0.02, per_context=0.05)


def bounds(asked: list[Ask], machine: Machine, minorants: list[Minorant] = UNIT) -> Bounds:
    requests = [
        Request(id_, ask.prompt, ask.output, arrival_time=ask.arrival, slo=SLO(total=ask.total))
        for id_, ask in enumerate(asked)
    ]
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


def test_of_requests_that_may_miss_their_objectives_the_heaviest_are_left_out() -> None:
    """One token per second: works of 2, 4, 6 and 8 s. Three of four requests have at least 2 + 4 + 6 s of work together."""
    requests = [Request(id_, 1, tokens, slo=SLO(total=9.0)) for id_, tokens in enumerate((2, 4, 6, 8))]

    def rate(share: float, requests: list[Request]) -> float:
        return Bounds(requests, UNIT, Limits(1, 1, 10), 1000).rate_attained(share)

    assert rate(1.0, requests) == pytest.approx(4 / 20)
    assert rate(0.75, requests) == rate(0.6, requests) == pytest.approx(4 / 12)
    assert rate(0.75, [*requests, Request(4, 1, 5)]) == pytest.approx(5 / 12), "without objectives: may wait for ever"
    firsts = [Request(id_, 3, tokens, slo=SLO(ttft=9.0)) for id_, tokens in enumerate((2, 4))]
    assert rate(1.0, firsts) == pytest.approx(2 / 6), "only the prompts are urgent"
    with pytest.raises(ConfigError, match="no request has an objective"):
        rate(1.0, [Request(0, 1, 1)])


def test_violations_by_hand() -> None:
    """Rounds of 1 s, one token each: 1 s of work for each token. Two of three equal jobs fit before 6.5 s; 7 tokens never do."""
    machine = Machine(1, 1, 1000)
    assert bounds([Ask(1, 3, total=6.5)] * 3, machine).violations == 1
    assert bounds([Ask(1, 3, total=6.5)] * 2 + [Ask(1, 7, total=6.5)], machine).violations == 1
    assert bounds([Ask(1, 3, total=6.5), Ask(1, 3), Ask(1, 3)], machine).violations == 0
    apart = [Ask(1, 3, total=3.5), Ask(1, 3, total=3.5), Ask(1, 5, total=5.5), Ask(1, 5, total=5.5)]
    assert bounds(apart, machine).violations == 2, "classes are bounded apart, and added"
    firsts = [Request(id_, 2, 1, slo=SLO(ttft=4.5)) for id_ in range(4)]
    assert Bounds(firsts, UNIT, Limits(1, 1, 10), 1000).violations == 2


def test_fewest_late_jobs_are_those_of_the_best_subset() -> None:
    draw = Random(5)
    for _ in range(300):
        jobs = sorted((draw.randint(0, 9), draw.randint(1, 5)) for _ in range(6))
        release, work = np.array(jobs, float).T
        due = np.sort(release + [draw.randint(1, 9) for _ in jobs])
        assert fewest_late(release, due, work) == _fewest_of_all_subsets(release, due, work)


def _fewest_of_all_subsets(release: Floats, due: Floats, work: Floats) -> int:
    def in_time(jobs: tuple[int, ...]) -> bool:
        end = 0.0
        for job in jobs:
            end = max(end, release[job]) + work[job]
            if end > due[job]:
                return False
        return True

    number = len(work)
    return next(late for late in range(number + 1) if any(map(in_time, combinations(range(number), number - late))))


# Against all schedules


Instances = Iterator[tuple[list[Ask], Machine, list[Minorant]]]


def unit_instances(number: int) -> Instances:
    """Four requests in rounds of 1 s and 10 tokens of KV cache."""
    draw = Random(number)
    for _ in range(number):
        due = draw.choice((4, 6, 8))
        yield (
            [Ask(draw.randint(1, 5), draw.randint(1, 5), draw.choice((0, 0, 1, 2, 3)), due) for _ in range(4)],
            Machine(4, 99, 10),
            UNIT,
        )


def line_instances(number: int) -> Instances:
    """Three requests on a machine whose iterations take what a minorant says, with chunks."""
    draw = Random(-number)
    for _ in range(number):
        line = Minorant(1.0, draw.random(), draw.random() / 4, draw.random() / 2)
        machine = Machine(draw.randint(1, 3), draw.randint(2, 4), draw.randint(6, 9), line.seconds, chunks=True)
        due = draw.choice((4, 6, 8))
        yield [Ask(draw.randint(1, 3), draw.randint(1, 3), 2 * draw.random(), due) for _ in range(3)], machine, [line]


@pytest.fixture
def num_instances(pytestconfig: pytest.Config) -> int:
    number: int = pytestconfig.getoption("--instances")
    return number


@pytest.mark.long
@pytest.mark.parametrize("instances", [unit_instances, line_instances])
def test_no_bound_exceeds_the_optimum(instances: Callable[[int], Instances], num_instances: int) -> None:
    shares = []
    for asked, machine, minorants in instances(num_instances):
        found = bounds(asked, machine, minorants)
        mean = machine.best(asked, "latency") / len(asked)
        assert found.violations <= machine.best(asked, "late")
        of_mean = [found.service.mean(), found.latency]
        shares.append([found.makespan / machine.best(asked, "makespan"), *(bound / mean for bound in of_mean)])
    average = dict(zip(("B2", "B1", "B6"), np.mean(shares, axis=0).round(3).tolist(), strict=True))
    assert np.max(shares) <= 1 + 1e-9, average
    assert average["B6"] > 0.8, average


# Profiles


CASES = [
    *(("h200", "llama-3.1-8b"), ("h200", "qwen3-8b"), ("h100", "llama-3.1-8b"), ("a6000-llama-13b", "nanogpt-13b")),
    ("h200, slower with many decodes", "llama-3.1-8b"),
]
LIMITS = Limits(64, 1024, 4096)


def cost_of(hardware: str, model: str) -> ProfileCost:
    """With many decodes a GPU may settle below its full clock, at which they then begin after a pause."""
    name, _, slower = hardware.partition(",")
    content = profile_content(load_profile(name))
    if slower:
        power = content["models"][model]["tensor_parallel"]["1"]["power"]
        power["decode_level"] = {"requests": [1, 4], "share": [1.0, 0.25]}
    return ProfileCost(make_profile(content), load_spec(model), max_batch=LIMITS.max_batch)


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
    prompt = BatchShape(((256, 0),))
    seconds = cost.predict(prompt) - cost.execute(prompt).pace.gain
    assert max(line.seconds(prompt) for line in lines) > 0.98 * seconds


def test_a_minorant_by_hand() -> None:
    """A chunk of 3 tokens after 4 and two decodes at 5: 1 s, 3 requests, 5 tokens, 3 * (4 + 2) scores, a context of 10."""
    line = Minorant(1.0, per_token=0.5, per_score=0.1, per_context=0.2, per_request=0.25)
    assert line.seconds(BatchShape(((3, 4),), 2, 10)) == pytest.approx(1 + 0.75 + 2.5 + 1.8 + 2.0)


def test_lines_below_points_by_hand() -> None:
    """Edges through (1, 2) and (2, 2.5), (2, 2.5) and (4, 4); below all: 2 throughout, and 1 a token."""
    assert _hull({1: 2.0, 2: 2.5, 3: 3.9, 4: 4.0}) == [(2.0, 0.0), (1.5, 0.5), (1.0, 0.75), (0.0, 1.0)]


def test_a_minorant_has_no_negative_part() -> None:
    with pytest.raises(ValueError, match="negative"):
        Minorant(-1.0)


@pytest.mark.parametrize(("hardware", "model"), CASES)
@pytest.mark.parametrize(
    "policy", [Orca(), SarathiServe(Fixed(256)), VllmV1(512)], ids=lambda policy: type(policy).__name__
)
def test_no_policy_beats_the_bounds(hardware: str, model: str, policy: Policy) -> None:
    """With a KV cache so small that requests are preempted, and the clock of the GPU as it moves."""
    cost, draw = cost_of(hardware, model), Random(3)
    asked = [Request(i, draw.randint(1, 900), draw.randint(1, 60), arrival_time=i * 0.025) for i in range(60)]
    found = Bounds(asked, minorants_of(cost, LIMITS), LIMITS, 8000)
    record = Server(SimExecutor(cost), LIMITS, cost, KVSize(500, 16), asynchronous=True).serve(policy, asked)
    ends, firsts = (np.array([getattr(each, at) for each in asked]) for at in ("finished_at", "first_token_at"))
    assert (found.prefill <= firsts - found.arrival).all() and (found.service <= ends - found.arrival).all()
    assert (found.ends <= np.sort(ends)).all()
    assert found.makespan <= record.steps[-1].ended
    latency = float((ends - found.arrival).mean())
    assert 0.25 * latency < found.latency <= latency
    alone = [Request(0, 700, 50)]
    Server(SimExecutor(cost), LIMITS, cost, KVSize(500, 16), asynchronous=True).serve(Orca(), alone)
    [service] = Bounds(alone, minorants_of(cost, LIMITS), LIMITS, 8000).service
    assert alone[0].finished_at is not None and 0.7 < service / alone[0].finished_at <= 1


# With a prefix cache
