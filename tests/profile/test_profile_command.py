"""`experiments.profile` on a small model's CPU runtime, and the arithmetic that takes iterations apart."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cbatch import BatchShape, Limits, Server, Step, StepResult
from cbatch.cost import NO_COST
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import HostTime, HostTimes, Measured, MeasuredModel
from cbatch.sim.power import GpuClock, PowerLimit
from cbatch.sim.profile import Profile
from cbatch.sim.profile_file import load_profile, make_profile, profile_content, profile_text
from cbatch.sim.provenance import NOT_COMPARED, Compared
from cbatch.sim.roofline import Ceilings
from experiments.profile import host, laboratory, machine
from experiments.profile.__main__ import main
from experiments.profile.kernels import KernelShares, shares
from experiments.profile.laboratory import Laboratory
from experiments.profile.measure import drafted_attention, drafted_bases, measure, mixed_bases
from experiments.profile.tables import (
    captured_rows,
    drafted_only,
    model_tables,
    put_drafted,
    put_links,
    put_model,
    raise_ceiling,
)
from experiments.setup.presets import load_spec

LIMITS = Limits(8, 4096, 2048, tile=64)
SIZES, CAPTURED = (1, 2, 4, 8), (64, 128, 256)
GRAPHS = (*CAPTURED, 512, 1024, 2048)
"""Graphs for more tokens, where nothing is padded."""
ROWS = (*SIZES, 128)
"""Rows of the graphs of eight requests with up to 15 drafts."""
SPEC = ModelSpec("made-up", "llama", 4, 64, 4, 2, 16, 160, 512, 4096)


class Clockwork:
    """An executor whose iterations take a known time: padded to captured sizes, chunks and decodes each at a price.

    With `rows`, each row of a captured mixed iteration has its price too, whether a request takes it or not.
    """

    num_stages = 1
    needs_tokens = True
    row_seconds = 1e-5

    def __init__(self, rows: int = LIMITS.max_batch, power: PowerLimit | None = None) -> None:
        self.rows = rows
        self.clock = self.ended = 0.0
        self.power = power
        self.gpu_clock = None if power is None else GpuClock(power)

    def launch(self, step: Step) -> StepResult:
        started, shape = self.clock, step.shape()
        self.clock += self.seconds(shape) - self.saved(shape)
        self.ended = self.clock
        return StepResult(None, started, self.clock)

    def ready_at(self) -> float:
        return 0.0

    def saved(self, shape: BatchShape) -> float:
        """What the iteration takes less, after those before it."""
        if self.power is None or self.gpu_clock is None:
            return 0.0
        self.gpu_clock.rest(self.clock - self.ended)
        seconds = self.seconds(shape)
        if shape.chunks:
            return self.gpu_clock.run(self.power.of_prompts(shape.num_tokens, seconds - self.attention(shape)))
        return self.gpu_clock.run(self.power.of_decodes(shape.num_decodes)(seconds))

    def wait(self, in_flight: StepResult) -> StepResult:
        return in_flight

    def restart(self) -> None:
        pass

    def now(self) -> float:
        return self.clock

    def sleep_until(self, time: float) -> None:
        self.clock = max(self.clock, time)

    def attention(self, shape: BatchShape) -> float:
        """Linear in what it reads, so that tables can hold it exactly."""
        chunks = sum(1e-9 * tokens * (context + (tokens + 1) / 2) for tokens, context in shape.chunks)
        return chunks + 2e-7 * shape.decode_context

    def seconds(self, shape: BatchShape) -> float:
        """Returns the seconds of an iteration in the steady state."""
        if not shape.chunks:
            size = next(size for size in SIZES if size >= shape.num_decodes)
            return 4e-3 + 1e-4 * size + self.attention(shape)
        size = next((size for size in CAPTURED if size >= shape.num_tokens), shape.num_tokens)
        idle = self.rows * self.row_seconds if size in CAPTURED else 0.0
        return 5e-3 + 2e-5 * size + idle + self.attention(shape)


class DraftingClockwork(Clockwork):
    """Rows of a request are read eight at a time, and each takes a tenth longer than without a drafter."""

    def seconds(self, shape: BatchShape) -> float:
        reads = shape.read_together(8)
        size = next(size for size in ROWS if size >= shape.num_decodes)
        return 4.5e-3 + 1e-5 * size + self.attention(reads) * (1 + 0.1 * shape.num_decodes / reads.num_decodes)


def server(executor: Clockwork, num_blocks: int = LIMITS.max_batch * 32) -> Server:
    return Server(executor, LIMITS, NO_COST, KVSize(num_blocks, 64))  # type: ignore[type-var]


def lab_of(executor: Clockwork) -> Laboratory:
    return Laboratory(server(executor), 512)


def share(size: float) -> KernelShares:
    return shares([("nvjet", 7.0), ("_add_norm_kernel", 1.0), ("nvjet", 2.0)])


def tables_of(lab: Laboratory) -> Measured:
    """The tables of what is measured on the clockwork, and of graphs for two requests."""
    found = measure(lab, SIZES, CAPTURED, lambda text: None)
    power = lab.executor.power
    small = mixed_bases(lab_of(Clockwork(2, power)), [2, 64, 65, 128, 129, 256], found.chunks)
    tables = model_tables(found, share, share, 8)
    return replace(tables, captured_rows=captured_rows({2: small, 8: found.mixed}))


def profile_of(lab: Laboratory) -> Profile:
    """A profile measured on the clockwork, written and read again."""
    profile = Profile(
        name="x",
        hardware="x",
        source="x",
        error="x",
        memory_bytes=1e9,
        ceilings=Ceilings(1e12, 1e15, 64),
        models={SPEC.name: MeasuredModel(num_layers=SPEC.num_layers, tensor_parallel={1: tables_of(lab)})},
    )
    return rewritten(profile)


def rewritten(profile: Profile) -> Profile:
    read = make_profile(json.loads(profile_text(profile)))
    assert read == profile
    return read


def with_model(profile: Profile, origin: str, tables: Measured, host_times: HostTimes | None, degree: int) -> Profile:
    content = profile_content(profile)
    put_model(content, SPEC, origin, tables, host_times, degree)
    return rewritten(make_profile(content))


POWER = PowerLimit(
    gain=PiecewiseLinear((100, 300, 1000), (0.02, 0.1, 0.1)),
    loss=PiecewiseLinear((100, 300, 1000), (0.03, 0.0, 0.0)),
    reserve_seconds=0.004,
    decode_loss=PiecewiseLinear(SIZES, (0.0, 0.02, 0.1, 0.05)),
    rise_seconds=PiecewiseLinear(SIZES, (0.01, 0.02, 0.03, 0.06)),
    idle_rise_seconds=0.015,
    decode_level=PiecewiseLinear(SIZES, (1.0, 1.0, 0.8, 0.4)),
)


@pytest.mark.parametrize(("power", "error"), [(None, 2e-4), (POWER, 0.01)])
def test_the_parts_add_up_to_every_iteration_that_was_measured(power: PowerLimit | None, error: float) -> None:
    lab = lab_of(Clockwork(power=power))
    cost = ProfileCost(profile_of(lab), SPEC)
    assert cost.estimated == ()
    for batch, seconds in lab.measured.items():
        assert cost.predict(batch.shape()) == pytest.approx(seconds, rel=error), batch
        assert cost.parts(batch.shape()).total == pytest.approx(seconds, rel=error)
        cost.execute(batch.shape())
    assert cost.num_outside == 0
    parts = cost.parts(BatchShape((), 8, 8))
    assert (parts.linear / parts.total, parts.head / parts.total) == pytest.approx((0.7, 0.2), rel=1e-3)


def test_batches_in_between_are_put_together_from_the_parts() -> None:
    profile = profile_of(lab_of(Clockwork()))
    for shape in (
        BatchShape((), 3, 2100),
        BatchShape(((100, 500),), 2, 600),
        BatchShape(((60, 0), (90, 900)), 3, 90),
        BatchShape(((1500, 0), (900, 100)), 5, 5000),
    ):
        assert ProfileCost(profile, SPEC).predict(shape) == pytest.approx(Clockwork().seconds(shape), rel=0.005)
    for tokens, rows in ((100, 4), (2000, 0)):  # captured, and too large for a graph
        large, small = (
            ProfileCost(profile, SPEC, max_batch=batch).predict(BatchShape(((tokens, 0),))) for batch in (8, 4)
        )
        assert large - small == pytest.approx(rows * Clockwork.row_seconds, abs=1e-7)


def test_decodes_with_drafts_take_what_was_measured() -> None:
    """With one and two reads of a request, filled and not, between the measured numbers and contexts, padded to a graph."""
    kv, limits = KVSize(LIMITS.max_batch * 32, 64), replace(LIMITS, max_drafts=15)
    lab = Laboratory(Server(DraftingClockwork(), limits, NO_COST, kv), 512)  # type: ignore[type-var]
    base = PiecewiseLinear.through((size, lab.seconds(batch)) for size, batch in drafted_bases(lab, ROWS).items())
    content = profile_content(profile_of(lab_of(Clockwork())))
    put_drafted(content, SPEC, "x", drafted_only(base, share, *drafted_attention(lab, base, SIZES, 8)))
    content["models"][SPEC.name]["tensor_parallel"]["1"]["captured_graphs"] = {
        "requests": SIZES,
        "tokens": CAPTURED,
        "fewest": (0, 0, 0),
    }
    cost = ProfileCost(make_profile(json.loads(json.dumps(content))), SPEC, max_batch=8)
    cost.max_rows = 128
    settings = (3, 1, 100), (1, 6, 40), (8, 7, 700), (5, 3, 1500), (8, 15, 600), (2, 11, 333), (3, 0, 700), (8, 0, 1500)
    for number, k, context in settings:
        shape = BatchShape((), number, number * context).with_drafts(number * k)
        assert cost.predict(shape) == pytest.approx(DraftingClockwork().seconds(shape), rel=0.005), shape
    cost.max_rows = 8  # without a drafter
    assert cost.predict(alone := BatchShape((), 3, 2100)) == pytest.approx(Clockwork().seconds(alone), rel=0.005)


class Launching(Clockwork):
    """After decodes or a pause the device waits for iterations that have no graph, as their operations are launched one by one."""

    decoded = False

    def seconds(self, shape: BatchShape) -> float:
        return super().seconds(shape) + 0.03 * (self.decoded and shape.num_tokens > GRAPHS[-1])

    def launch(self, step: Step) -> StepResult:
        self.decoded |= self.clock > self.ended
        result = super().launch(step)
        self.decoded = not step.shape().chunks
        return result


@pytest.mark.parametrize("executor", [Clockwork, Launching])
def test_the_clock_is_seen_to_follow_the_power(executor: type[Clockwork], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory, "LIGHT_ROWS", 2)  # more lower the clock
    found = measure(lab_of(executor(power=POWER)), SIZES, GRAPHS, lambda text: None).power
    assert found is not None
    assert found.reserve_seconds == pytest.approx(POWER.reserve_seconds, rel=0.05)
    assert [found.gain.at(size) for size in (64, 512, 1024)] == pytest.approx([0.02, 0.1, 0.1], rel=0.1)
    assert [found.loss.at(size) for size in (64, 512, 1024)] == pytest.approx([0.03, 0.0, 0.0], rel=0.1, abs=0.002)
    assert found.decode_loss.seconds == pytest.approx(POWER.decode_loss.seconds, rel=0.03, abs=0.002)
    assert found.rise_seconds.seconds == pytest.approx(POWER.rise_seconds.seconds, rel=0.1)
    assert found.decode_level and POWER.decode_level
    assert found.decode_level.seconds == pytest.approx(POWER.decode_level.seconds, rel=0.03)
    assert found.idle_rise_seconds == pytest.approx(POWER.idle_rise_seconds, rel=0.1)
    steady = measure(lab_of(Clockwork()), SIZES, GRAPHS, lambda text: None).power
    assert steady is not None and steady.reserve_seconds == pytest.approx(0.0, abs=1e-9)
    worst = [max(curve.seconds) for curve in (steady.gain, steady.loss, steady.decode_loss)]
    assert worst == pytest.approx([0.0] * 3, abs=1e-9)


def test_a_degree_is_measured_with_its_exchanges_beside_the_other_degrees() -> None:
    """On two GPUs the clockwork is as fast as on one: nothing is halved, and no all-reduce is added."""
    lab = lab_of(Clockwork())
    single = replace(profile_of(lab), origins={("models", SPEC.name): "measured first"})
    host_times: HostTimes = {"sync": HostTime(0.1), "async": HostTime(0.2)}
    profile = with_model(single, "measured on two", tables_of(lab), None, 2)
    two = ProfileCost(profile, SPEC, Topology(2))
    for batch, seconds in lab.measured.items():
        assert two.predict(batch.shape()) == pytest.approx(seconds, rel=2e-4), batch
        assert ProfileCost(profile, SPEC).predict(batch.shape()) == ProfileCost(single, SPEC).predict(batch.shape())
    assert two.parts(BatchShape((), 8, 8)).communication == 0 and two.estimated == ()
    assert linear_origins(profile) == ["measured first", "measured on two"]
    assert "all_reduce.2" not in two.origins() and two.origins()["exchange"] == "measured within linear and other"
    assert (profile.error, profile.host) == ("x", None)
    again = with_model(profile, "measured again", tables_of(lab), host_times, 1)
    assert linear_origins(again) == ["measured again", "measured on two"]
    assert (again.error, again.compared, again.host_time(True).seconds) == (NOT_COMPARED, {}, 0.2)
    assert again.origin("host") == f"fallback: of {SPEC.name}, for models without their own"


def linear_origins(profile: Profile) -> list[str]:
    return [ProfileCost(profile, SPEC, Topology(degree)).origins()["linear"] for degree in (1, 2)]


def test_links_are_put_beside_those_of_other_numbers_of_gpus() -> None:
    curve, other = PiecewiseLinear((1.0,), (1e-6,)), PiecewiseLinear((1.0,), (2e-6,))
    content = profile_content(replace(load_profile("h200"), links=Links(), origins={}))
    put_links(content, "measured first", Links({2: curve, 4: curve}, within_node=curve))
    put_links(content, "measured again", Links({2: other}))
    profile = make_profile(content)
    assert profile.links == Links({2: other, 4: curve}, within_node=curve)
    places = [("all_reduce", "2"), ("all_reduce", "4"), ("within_node",)]
    origins = [profile.origin("links", *place).removeprefix("measured ") for place in places]
    assert origins == ["again", "first", "first"]


def test_what_launching_without_a_graph_adds_is_measured() -> None:
    class Launching(Clockwork):
        host = 0.0

        def launch(self, step: Step) -> StepResult:
            shape = step.shape()
            self.host += 0.002 + 0.001 * bool(shape.chunks) + 0.02 * (shape.num_tokens > CAPTURED[-1])
            return super().launch(step)

        def now(self) -> float:
            return self.host

    lab = lab_of(Launching())
    assert host.eager_seconds(lab, CAPTURED[-1]) == pytest.approx(0.021)  # beyond a decode's launch
    assert host.eager_seconds(lab, LIMITS.max_tokens) == 0  # nothing runs without a graph


def test_the_host_s_time_for_prompts_in_the_cache_is_measured_at_their_launch() -> None:
    class Admitting(Clockwork):
        def launch(self, step: Step) -> StepResult:
            self.clock += 0.001 + 0.003 * len(step.found) + 2e-6 * sum(step.found)
            return StepResult(None, self.clock, self.clock)

    assert host.found_seconds(server(Admitting()), 512) == pytest.approx((0.003, 2e-6))


def test_host_times_are_a_line_and_measured_again_where_other_work_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    line, falls = {1: 1.1, 4: 1.4, 16: 2.6}, {1: 3.0, 4: 2.0, 16: 1.0}
    busy, quiet = {1: 1.0, 4: 5.0}, {1: 1.0, 4: 1.0}
    lab = lab_of(Clockwork())
    for measured, seconds, per_request in (
        ([line, line], 1.0, 0.1),
        ([falls, falls], 2.0, 0.0),
        ([busy, busy, quiet, quiet], 1.0, 0.0),
        ([busy] * 10, 1.0, 0.0),
    ):
        medians = iter(measured)
        monkeypatch.setattr(host, "_medians", lambda *_, medians=medians: next(medians))
        for times in host.host_times(server(Clockwork()), lab, 512, 0).values():
            assert (times.seconds, times.seconds_per_request) == pytest.approx((seconds, per_request))
        assert not [*medians]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_command_measures_a_model_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WARM_UP_SECONDS", "SETTLED_SECONDS", "MOST_SECONDS"):
        monkeypatch.setattr(laboratory, name, 0.0)
    monkeypatch.setattr(host, "NEW", 8)
    path = tmp_path / "mine.json"
    before = replace(
        profile_of(lab_of(Clockwork())),
        compared={"sync": Compared((SPEC.name,), 1, {"TTFT mean": 0.1}, 1, 1, "2026-01-01", "a page")},
    )
    path.write_text(profile_text(before))
    assert main(["model=tiny", "backend=cpu", "batch=2,4", "max_tokens=64", "longest=128", f"output={path}"]) == 0
    printed = capsys.readouterr().out
    assert "between: " in printed and re.search(
        r"batches of this measurement: [\d.]+% off \(median\), [\d.]+% at most\n", printed
    )
    profile = load_profile(str(path))
    assert profile.models[SPEC.name] == before.models[SPEC.name] and set(profile.models) == {SPEC.name, "tiny"}
    assert profile.error == NOT_COMPARED and not profile.compared
    assert profile.host == profile.models["tiny"].host and profile.origin("host").startswith("fallback: of tiny")
    assert all(profile.host_time(asynchronous).seconds > 0 for asynchronous in (False, True))
    origin = profile.origin("models", "tiny")
    assert origin.startswith("measured by python -m experiments.profile model=tiny backend=cpu batch=2,4 max_tokens=64")
    assert re.search(r"; \d{4}-\d\d-\d\d; [^;]* cores; commit [0-9a-f]{40}", origin)
    assert ProfileCost(profile, load_spec("tiny")).predict(BatchShape(((32, 0),), 2, 100)) > 0


def test_a_ceiling_of_a_cpu_is_the_same_while_other_processes_run() -> None:
    """An operation that waits 0.2 s, as for its turn on the CPU."""
    assert 0 < machine._once(lambda: time.sleep(0.2), on_gpu=False) < 0.1


def test_products_that_were_measured_were_possible() -> None:
    """Two layers of 64 x 64 weights for q, k, v and output, and three of 64 x 128: 2 * 2 * 40,960 operations for each token."""
    spec = ModelSpec("small", "llama", 2, 64, 4, 4, 16, 128, 9, 64)
    linear = PiecewiseLinear((8, 16), (1.0, 1.0))
    for ceiling, expected in ((1e6, 16 * 163_840), (1e9, 1e9)):
        content = {"ceilings": {"flops_per_second": ceiling}}
        raise_ceiling(content, linear, spec)
        assert content["ceilings"]["flops_per_second"] == expected
