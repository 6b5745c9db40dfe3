"""Simulated speculation: what is accepted, how long drafting takes, and rules in a whole run."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from acceptance import acceptance_length, conditional_rates, survivals_of
from every_policy import EVERY_POLICY
from guesses import Speculating

from cbatch import BatchShape, ConfigError, CostFunction, KVSize, Limits, Policy, Request, RunRecord, Server, Step
from cbatch.cluster import Role
from cbatch.drafts import ModelDrafter, Shares
from cbatch.model.topology import Topology
from cbatch.request import Ints
from cbatch.runtime.fast.graph_shapes import decode_sizes
from cbatch.sim import ProfileCost, SimExecutor, load_profile
from cbatch.sim.drafter import DraftPasses, SurvivalsDrafter, uniforms
from experiments.report.text import figures_text
from experiments.serve import serve
from experiments.settings.compose import compose_run
from experiments.setup.assemble import assemble
from experiments.setup.moves import moves_of
from experiments.setup.presets import load_spec
from policies.chunking import Fixed as FixedChunk
from policies.drafting import Adaptive, DraftingRule, Ema, Fixed, Goodput, Table, ThroughputAware
from policies.drafting.part import WithDrafts
from policies.joint import Joint
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe
from policies.vllm_v1 import VllmV1

KIMI = [0.83, 0.60, 0.45, 0.36, 0.22, 0.16, 0.09, 0.06]
POLICIES = [Orca(), VllmV1(32), SarathiServe(FixedChunk(16)), Joint(tbt=0.02, most=32)]
RULES = [Fixed(0), Fixed(1), Fixed(8), Table(), Adaptive(), Ema(), ThroughputAware((1, 3)), Goodput()]


class Noted(SurvivalsDrafter):
    """Notes each decision: by request and position of the draft, whether it was accepted."""

    def draw(self, step: Step, rejected: Ints) -> Ints:
        assert step.drafts is not None
        accepted = super().draw(step, rejected)
        self.decided = vars(self).get("decided", {})
        self.drawn = [*vars(self).get("drawn", ()), *accepted[step.drafts == len(self.survivals)].tolist()]
        for request, start, drafts, number in zip(
            step.requests, (step.start - rejected).tolist(), step.drafts.tolist(), accepted.tolist(), strict=True
        ):
            for place in range(1, min(number + 1, drafts) + 1):
                assert (request.id, start + place) not in self.decided
                self.decided[request.id, start + place] = place <= number
        return accepted


def milliseconds(shape: BatchShape) -> float:
    """Reads weights for 10 ms, and computes 20 tokens per ms."""
    return 0.01 + shape.num_tokens / 20_000


def run(
    policy: Policy,
    drafter: SurvivalsDrafter | None,
    lengths: Sequence[tuple[int, int]] = ((30, 60), (5, 90), (50, 7), (9, 40), (20, 1)) * 6,
    batch: int = 8,
    num_blocks: int = 1000,
    asynchronous: bool = True,
) -> RunRecord:
    cost = CostFunction(milliseconds)
    limits = Limits(batch, 64, 400, max_drafts=0 if drafter is None else len(drafter.survivals))
    executor = SimExecutor(cost, host=0.001, drafter=drafter)
    requests = (Request(number, prompt, output) for number, (prompt, output) in enumerate(lengths))
    kv = KVSize(num_blocks, 4)
    server = Server(executor, limits, cost, kv, asynchronous=asynchronous)
    return server.engine(policy, requests).run()


class ByRequest(Fixed):
    def num_drafts(self, view, plan, decodes):  # type: ignore[no-untyped-def]
        return [(3, 1, 0)[request.id] for request in decodes]


def with_rule(rule: DraftingRule) -> Policy:
    return WithDrafts(SarathiServe(FixedChunk(16)), rule)


@pytest.mark.parametrize(("policy", "rule"), [*zip(cycle(POLICIES), RULES + RULES[1:], strict=False)], ids=repr)
def test_lengths_are_those_without_drafts(policy: Policy, rule: DraftingRule) -> None:
    """A KV cache of 50 blocks forces preemptions while drafts are in flight."""
    record = run(WithDrafts(policy, rule), SurvivalsDrafter(KIMI), num_blocks=50)
    lengths = sorted((request.id, request.num_output_tokens) for request in record.requests)
    assert lengths == [(number, (60, 90, 7, 40, 1)[number % 5]) for number in range(30)]
    assert sum(step.num_sampled for step in record.steps) == 6 * (60 + 90 + 7 + 40 + 1)
    check_computed(record)


def check_computed(record: RunRecord) -> None:
    """What was computed is each request's tokens but the last one, what was computed again, and the rejected drafts."""
    computed = sum(step.num_prefill_tokens + step.num_decode_tokens for step in record.steps)
    rejected = sum(step.num_drafts - step.num_accepted for step in record.steps)
    needed = sum(each.num_prompt_tokens + each.num_output_tokens - 1 for each in record.requests)
    assert computed == needed + rejected + sum(each.num_recomputed_tokens for each in record.requests)
    assert all(each.num_lost_tokens >= each.num_recomputed_tokens for each in record.requests)


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_POLICY)
def test_policies_meet_waiting_requests_with_drafts_in_flight(name: str) -> None:
    """In a pipeline a request can be preempted while two iterations hold its drafts; until their outcome is known, it has 0 tokens ready."""
    cost = ProfileCost(load_profile("h100"), load_spec("tiny"), Topology(1, 2))
    executor = SimExecutor(cost, host=1e-4, drafter=SurvivalsDrafter(KIMI[:3]))
    server = Server(executor, Limits(4, 64, 60, num_stages=2, tile=8, max_drafts=3), cost, KVSize(24, 4))
    lengths = ((13, 20), (5, 37), (30, 7), (9, 28), (20, 1)) * 3
    requests = [Request(number, prompt, output) for number, (prompt, output) in enumerate(lengths)]
    check_computed(server.serve(Speculating(EVERY_POLICY[name](8)), requests))
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in requests] == [*lengths]


def test_no_drafts_is_the_run_without_a_rule() -> None:
    plain, zero = run(SarathiServe(FixedChunk(16)), None), run(with_rule(Fixed(0)), SurvivalsDrafter(KIMI))
    assert plain.steps == zero.steps


def test_policies_meet_the_same_draws() -> None:
    """With equal rates at all places, what happens to a draft depends on its request and position alone."""
    decided = []
    for policy in (with_rule(Fixed(2)), with_rule(Fixed(5)), Joint(tbt=1.0, most=64)):
        drafter = Noted(survivals_of(0.7, 5), seed=3)
        run(policy, drafter)
        decided.append(drafter.decided)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        both = decided[one].keys() & decided[other].keys()
        assert len(both) > 500
        assert all(decided[one][key] == decided[other][key] for key in both)
    other_seed = Noted(survivals_of(0.7, 5), seed=4)
    run(with_rule(Fixed(5)), other_seed)
    assert any(other_seed.decided[key] != decided[1][key] for key in other_seed.decided.keys() & decided[1].keys())


def test_mean_acceptance_is_the_closed_form() -> None:
    """All 8 drafts for 40 requests of 300 tokens: 1 + the sum of survivals, within three standard errors."""
    drafter = Noted(KIMI, seed=1)
    run(with_rule(Fixed(8)), drafter, [(8, 300)] * 40)
    accepted = np.array(drafter.drawn)
    assert len(accepted) > 2_500
    assert abs(accepted.mean() + 1 - acceptance_length(KIMI)) < 3 * accepted.std() / len(accepted) ** 0.5
    shares = [(accepted >= place).mean() for place in range(1, 9)]
    assert shares == pytest.approx(KIMI, abs=0.03)
    assert conditional_rates(KIMI)[0] == KIMI[0]


def test_drafting_takes_time_before_each_iteration() -> None:
    """One request, 3 drafts of 2 ms that are always accepted: 1 + 4 x 2 = 9 tokens in three iterations.

    The prompt of 16 tokens takes 1 ms of the host and 10.8 ms; each further iteration 1 ms, 6 ms for drafts, and 10.2 ms for 4 tokens.
    """
    drafter = SurvivalsDrafter([1.0] * 3, seconds_per_pass=0.002)
    record = run(with_rule(Fixed(3)), drafter, [(16, 9)], asynchronous=False)
    assert [step.num_sampled for step in record.steps] == [1, 4, 4]
    assert record.requests[0].finished_at == pytest.approx(0.0118 + 2 * 0.0172)
    assert [(step.num_drafts, step.num_accepted) for step in record.steps] == [(0, 0), (3, 3), (3, 3)]


def test_a_draft_models_passes_precede_each_iteration() -> None:
    """Three requests with 3, 1 and 0 drafts take the passes of 3."""

    class Passes:
        def seconds(self, shape: BatchShape, most: int) -> float:
            return 0.001 * (1 + most)

    drafter = SurvivalsDrafter([0.0] * 3, model=load_spec("tiny"))
    drafter._of_model = Passes()  # type: ignore[assignment]
    record = run(with_rule(ByRequest()), drafter, [(4, 9)] * 3, asynchronous=False)
    took = [step.ended - step.started for step in record.steps]
    assert took[:2] == pytest.approx([0.01 + 12 / 20_000 + 0.001, 0.01 + 7 / 20_000 + 0.004])


def test_a_draft_model_is_priced_as_the_runtime_computes_it() -> None:
    """Graphs hold 1, 4, 8, 16, 32, 64, 128 or 256 rows, or 128, 192, 256, 384, 512 tokens with prompts.

    A pass has a row for each request that could have as many drafts, or if there are more requests, for each row, up to the batch of 64.
    """
    cost, small = ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b"), max_batch=64), load_spec("llama-3.2-1b")
    cost.max_rows = 256
    passes, alone = DraftPasses(cost, small, 3), ProfileCost(cost.profile, small, max_batch=64)

    def one(rows: int, context: int) -> float:
        return alone.predict(BatchShape((), rows, context))

    def head(rows: int) -> float:
        return alone.parts(BatchShape((), rows)).head

    five, many = BatchShape((), 5, 5 * 600), BatchShape((), 60, 60 * 600)
    assert passes.seconds(five) == pytest.approx(one(8, 3000) - head(8))
    assert passes.seconds(five.with_drafts(15)) == pytest.approx(4 * one(8, 3000) - head(8))
    assert passes.seconds(five.with_drafts(4)) == pytest.approx(2 * one(8, 3000) - head(8))
    assert passes.seconds(five.with_drafts(4), 3) == pytest.approx(4 * one(16, 3000) - head(16))
    assert passes.seconds(many.with_drafts(120)) == pytest.approx(3 * one(64, 36_000) - head(64))
    for shape in (five, five.with_drafts(15)):
        shape, extra = shape._replace(chunks=((300, 0),)), shape.num_drafts > 0
        alone.max_rows = 256
        later = extra * (3 * one(64, 3000) - head(64))
        assert passes.seconds(shape) == pytest.approx(alone.predict(shape) + later)
    unpadded = five.with_drafts(5)._replace(chunks=((3000, 0),))
    assert passes.seconds(unpadded) == pytest.approx(alone.predict(unpadded) + one(6, 3000) - head(6))


def test_a_draft_model_is_part_of_each_prediction_and_takes_memory() -> None:
    """It is whole on each GPU, in simulation and where tokens are real."""
    words = ("model=llama-3.1-8b", "drafter=model", "drafter.model=llama-3.2-1b", "drafter.max_drafts=2")
    simulated = compose_run(
        "backend=sim", "hardware=h100", "backend.tensor_parallel=2", "batch=64", "drafter.alpha=0.5", *words
    )
    [setup] = assemble(simulated).setups
    small, shape = load_spec("llama-3.2-1b"), BatchShape((), 64, 64 * 512).with_drafts(64)
    cost, seconds = simulated.backend.cost("h100", simulated.model, 64), setup.cost.predict(shape)
    cost.max_rows = setup.limits.max_rows
    assert seconds == pytest.approx(cost.predict(shape) + DraftPasses(cost, small, 2).seconds(shape))
    assert simulated.drafter.seconds(64, 2) == ModelDrafter(small).seconds(64, 2) == 0.0
    free = [cost.profile.kv_tokens(simulated.model, 4096, cost.topology, draft) for draft in (None, small)]
    share = cost.topology.share(simulated.model)
    taken = small.weight_bytes + 4096 * small.activation_bytes_per_token
    per_token = share.kv_bytes_per_token, share.kv_bytes_per_token + small.kv_bytes_per_token
    assert free[1] * per_token[1] == pytest.approx(free[0] * per_token[0] - taken, abs=2 * per_token[1])


def test_a_draft_models_keys_and_values_are_copied_with_the_models() -> None:
    """To host memory, and from one replica to another; half of the model's are on each of two GPUs, and all of the draft model's."""
    drafter = ("drafter=model", "drafter.model=llama-3.2-1b", "drafter.alpha=0.5")
    pools = "backend.pools={a: {role: prefill}, b: {role: decode}}"
    words = ("model=llama-3.1-8b", "hardware=h200", "backend=sim", "prefix_cache=true", "workload.num_requests=1")
    small, model = 2 * 16 * 8 * 64 * 2, 2 * 32 * 8 * 128 * 2
    for degree in (1, 2):
        both = (*words, f"backend.tensor_parallel={degree}")
        [setup] = assemble(compose_run(*both, *drafter, "kv.host_tokens=4096")).setups
        assert setup.cost.kv_bytes == model // degree + small
        settings = compose_run(*both, *drafter, pools)
        moves = moves_of(settings, assemble(settings).setups, [Role.PREFILL, Role.DECODE])
        assert moves is not None and (moves.gpus, moves.block_bytes) == (degree, 128 * (model + degree * small))


def test_few_long_drafts_cost_their_own_passes() -> None:
    """Requests with 3, 1 and 0 drafts: one pass for two requests and two passes for one."""

    class Priced(SurvivalsDrafter):
        def seconds(self, number: int, k: int) -> float:
            return 0.001 * k * (1 + number)

    record = run(with_rule(ByRequest()), Priced([0.0] * 3), [(4, 9)] * 3, asynchronous=False)
    took = [step.ended - step.started for step in record.steps]
    assert took[1] == pytest.approx(0.01 + 7 / 20_000 + 0.003 + 2 * 0.002)


def test_a_verification_reads_its_context_once() -> None:
    """A decode at position 20 with 3 drafts: rows that read 21 to 24 tokens, of which 3 x 21 are those of the first."""
    shapes: list[BatchShape] = []
    cost = CostFunction(lambda shape: shapes.append(shape) or 0.01)  # type: ignore[func-returns-value]
    limits = Limits(4, 64, 400, max_drafts=3)
    drafter, policy = SurvivalsDrafter([0.0] * 3), WithDrafts(Orca(), Fixed(3))
    kv = KVSize(99, 4)
    server = Server(SimExecutor(cost, drafter=drafter), limits, cost, kv, asynchronous=False)
    server.engine(policy, [Request(0, 20, 5)]).run()
    assert shapes[1] == BatchShape((), 4, 21 + 22 + 23 + 24, 0, 63, 3)
    assert shapes[1].num_kv_reads == 21 + 1 + 2 + 3
    assert BatchShape(((5, 0),), 2, 60, 0, 10).with_drafts(6) == BatchShape(((5, 0),), 8, 240, 0, 190, 6)


@pytest.mark.parametrize(("drafts", "reads"), [(0, 8), (3, 8), (4, 16), (7, 16), (15, 32)])
def test_a_read_of_a_context_serves_four_rows_of_llama(drafts: int, reads: int) -> None:
    """Four query heads per KV head, of 16 that the decode kernel computes together; eight decodes at 500 tokens, without tables of drafts."""
    cost = ProfileCost(load_profile("h100"), load_spec("llama-3.1-8b"), max_batch=128)
    alone = BatchShape((), 8, 8 * 500)
    attention = cost.parts(alone.with_drafts(8 * drafts)).attention
    assert attention == pytest.approx(cost.parts(BatchShape((), reads, reads * 500, 0, (reads - 8) * 500)).attention)
    assert BatchShape((), 8, 4000, 0, 700).with_drafts(56).read_together(4) == BatchShape((), 16, 8000, 0, 4700)


@pytest.mark.parametrize(("batch", "drafts"), [(128, 7), (48, 3), (96, 1)])
def test_drafts_have_the_graphs_of_the_runtime(batch: int, drafts: int) -> None:
    cost = ProfileCost(load_profile("h200"), load_spec("llama-3.1-8b"), max_batch=batch)
    cost.max_rows = batch * (1 + drafts)
    sizes = decode_sizes(batch, cost.max_rows)
    for rows in range(batch + 1, cost.max_rows + 1):
        shape = BatchShape((), batch, 500 * batch).with_drafts(rows - batch)
        padded = next(size for size in sizes if size >= rows)
        assert cost.graph_tokens(shape) == padded
        if padded > 128:  # the largest that iterations without prompts were measured at
            assert cost.parts(shape).linear == cost.parts(shape.with_drafts(padded - rows)).linear
    graph = cost.graph_tokens(mixed := BatchShape(((600, 0),), 1, 9))
    plain = ProfileCost(cost.profile, cost.spec, max_batch=batch)
    assert graph == 640 and cost.parts(mixed).head == plain.parts(BatchShape((), min(cost.max_rows, 639), 9)).head


def test_uniforms_are_uniform_and_independent() -> None:
    drawn = uniforms(7, np.arange(300), np.arange(400) + np.zeros((300, 1), np.int64))
    assert np.histogram(drawn, 10, (0, 1))[0] == pytest.approx(np.full(10, 12_000), rel=0.04)
    for one, other in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.01


def test_layers_and_passes_are_priced_on_the_hardware() -> None:
    """A drafter of one layer costs what a model of one layer does: three decodes in turn, or one pass with three rows per request."""
    settings = compose_run("drafter=survivals", "drafter.alpha=0.5", "backend=sim", "hardware=h100", "batch=64")
    cost = settings.backend.cost("h100", settings.model, 64)
    small = ProfileCost(cost.profile, replace(settings.model, num_layers=1), max_batch=64)
    decode = small.predict(BatchShape((), 64, 64 * 512))
    assert SurvivalsDrafter(alpha=0.5, layers=1).on(cost).seconds(64, 3) == pytest.approx(3 * decode)
    together = small.predict(BatchShape((), 192, 192 * 512, 0, 128 * 512, 128))
    for parallel in (SurvivalsDrafter(alpha=0.5, layers=1, parallel=True, seconds_per_pass=0.001).on(cost),):
        assert parallel.seconds(64, 3) == pytest.approx(0.001 + together)
        assert parallel.seconds(64, 0) == parallel.seconds(0, 3) == 0.0
    assert settings.drafter.max_drafts == 8


@pytest.mark.parametrize(
    ("name", "k", "length"),
    [("glm_dspark", 7, 3.537), ("glm_mtp", 7, 3.91), ("kimi_eagle3", 8, 3.77), ("dsv4_mtp", 6, 2.55)],
)
def test_published_drafters(name: str, k: int, length: float) -> None:
    """Acceptance lengths of the sources; DSpark's is of its first 7 of 16 drafts."""
    drafter = compose_run(f"drafter={name}", "backend=sim").drafter
    assert isinstance(drafter, SurvivalsDrafter) and drafter.max_drafts == k
    assert acceptance_length(drafter.survivals[:k]) == pytest.approx(length)


def test_ngrams_are_simulated_as_drafts_that_take_no_time_of_their_own() -> None:
    """But for the arguments of the search, as survivals of this many drafts without layers."""
    load = ("backend=sim", "workload.num_requests=30", "drafting=fixed", "drafting.k=2", "drafter.alpha=0.6")
    drafter = ("drafter=survivals", "drafter.layers=0", "drafter.max_drafts=3")
    first, second = (serve(compose_run(*load, *keys), None).summary for keys in (("drafter=ngram",), drafter))
    assert first["drafts"]["accepted"] > 0 and figures_text(first) == figures_text(second)


@pytest.mark.long
def test_survivals_of_a_recorded_run(tmp_path: Path) -> None:
    """A rule that gives most requests fewer drafts than there are places leaves the survivals as drawn, here within 3 standard errors."""
    drafting = ("drafting=table", "drafting.ranges=[[1,60,4],[61,512,1]]", "drafter=glm_mtp")
    load = ("policy=sarathi_serve", "workload=queued", "workload.num_requests=200", "batch=64", "chunk=2048")
    folder = tmp_path / "day_batch=64,_drafting=table"
    run = serve(compose_run("backend=sim", "hardware=h100", *load, *drafting), folder, log=str)
    drafter = compose_run("backend=sim", "drafter=survivals", f"drafter.survivals={folder}").drafter
    assert isinstance(drafter, SurvivalsDrafter) and run.summary["drafts"]["drafts"] > 10_000
    assert drafter.survivals[0] == pytest.approx(0.84, abs=0.01)
    assert drafter.survivals[1:] == pytest.approx([0.66, 0.49, 0.34], abs=0.04) and drafter.max_drafts == 4
    assert [*run.summary["drafts"]["survivals"].values()] == drafter.survivals
    with pytest.raises(ConfigError, match="no survivals in its summary"):
        compose_run("backend=sim", "drafter=survivals", f"drafter.survivals={tmp_path}")


def test_a_draft_counts_if_its_predecessors_were_accepted() -> None:
    """1 of 3, 3 of 3, 1 of 1 and 0 of 1 drafts are accepted: the first place was tried 4 times, the second twice, the third once."""
    shares = Shares(3)
    shares.note(np.arange(4), np.arange(4), np.array([3, 3, 1, 1]), np.array([1, 3, 1, 0]))
    assert shares.counts.tolist() == [[3, 1, 1], [4, 2, 1]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("drafter=survivals", "give either drafter.survivals"),
        ("drafter=survivals drafter.survivals=[0.5,0.6]", "drafter.survivals="),
        (
            "drafter=survivals drafter.survivals=[.8,abc]",
            "drafter.survivals=[0.8, 'abc']: give shares from 1 to 0 in brackets",
        ),
        ("drafter=survivals drafter.survivals=.8", "drafter.survivals=0.8: give shares"),
        ("drafter=survivals drafter.survivals=[]", "drafter.survivals=[]: give shares"),
        ("drafter=survivals drafter.survivals=[[.5]]", "drafter.survivals=[[0.5]]: give shares"),
        ("drafter=survivals drafter.survivals=.8,.6", "give one, a list in brackets"),
        ("drafter=survivals drafter.alpha=1.2", "drafter.alpha=1.2: give a share from 0 to 1"),
        ("drafter=glm_mtp drafter.max_drafts=8", "drafter.max_drafts=8: give at most 7"),
        ("drafter=glm_mtp drafter.max_drafts=0", "drafter.max_drafts=0: give at least 1"),
        ("drafter=glm_mtp drafter.max_drafts=-1", "drafter.max_drafts=-1: give at least 1"),
        ("drafter=glm_mtp drafter.layers=-1", "drafter.layers=-1: give at least 0"),
        ("drafting=ema", "drafting: drafter=none makes no drafts"),
        ("policy=orca(drafting=ema)", "drafting: drafter=none makes no drafts"),
        ("drafter=glm_mtp drafter.parallel=x", "drafter.parallel=x: give true or false"),
        ("drafter=ngram drafter.max_drafts=2.5 backend=cpu model=tiny", "drafter.max_drafts=2.5: give a whole number"),
        ("drafter=glm_mtp drafting=fixed drafting.k=-2", "drafting.k=-2: give a whole number, at least 0"),
        ("drafter=glm_mtp drafting=fixed drafting.k=x", "drafting.k=x: give a whole number, at least 0"),
        ("drafter=glm_mtp drafting=fixed drafting.k=[2]", "drafting.k=[2]: give a whole number, at least 0"),
        ("drafter=glm_mtp drafting=ema drafting.start=x", "drafting.start=x: give a whole number"),
        (
            "drafter=glm_mtp drafting=ema drafting.candidates=3",
            "drafting.candidates=3: give numbers of drafts, ascending",
        ),
        ("drafter=glm_mtp drafting=table drafting.ranges=[1,4,3]", "drafting.ranges: 1 is not [fewest, most, drafts]"),
        ("drafter=glm_mtp drafting=table drafting.ranges=3", "drafting.ranges: 3 is not [fewest, most, drafts]"),
        (
            "drafter=cbatch.drafts.Drafter",
            "drafter=cbatch.drafts.Drafter: makes no drafts, as max_drafts is 0; set max_drafts",
        ),
        (
            "drafter=fractions.Fraction",
            "the object has no max_drafts, so it is not a drafter; subclass cbatch.drafts.Drafter",
        ),
        ("drafter=glm_mtp drafting=fractions.Fraction", "not a drafting; subclass policies.drafting.DraftingRule"),
        ("draftng=fixed", "draftng: no such key; did you mean drafting?"),
        ("drafter=glm_mtp backend=cpu model=tiny", "drafter=glm_mtp: its drafts are no tokens"),
        ("drafter=cbatch.drafts.NgramDrafter", "tokens, which a simulation does not have; give backend=cpu or cuda"),
        (
            "drafter=ngram",
            "drafter=ngram: a simulation has no tokens, and draws which drafts are accepted; give drafter.",
        ),
        ("drafter=ngram drafter.alpha=.8 backend=cpu model=tiny", "real drafts are compared, not drawn"),
        ("drafter=model", "drafter=model: give drafter.path=FOLDER, a checkpoint, or drafter.model=NAME"),
        ("drafter=model drafter.path=/nowhere", "drafter.path=/nowhere is not a folder; give a checkpoint's folder"),
        ("drafter=model drafter.model=lama", "drafter.model=lama: no such model; did you mean llama-13b?"),
        (
            "drafter=model drafter.model=tiny model=tiny",
            "a simulation has no tokens, and draws which drafts are accepted",
        ),
        (
            "drafter=model drafter.model=llama-3.2-1b drafter.alpha=.8 model=tiny",
            "the vocabulary of llama-3.2-1b has 128256 tokens, but model=tiny has 512; choose",
        ),
        (
            "drafter=model drafter.model=tiny drafter.alpha=.8 backend=cpu model=tiny",
            "real drafts are compared, not drawn",
        ),
        ("drafter=model drafter.model=tiny drafter.max_drafts=0 backend=cpu model=tiny", "must be at least 1"),
    ],
)
def test_settings_without_effect_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        assemble(compose_run("backend=sim", "workload.num_requests=1", *words.split()))
