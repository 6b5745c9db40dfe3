"""vLLM's speculation under policies: plans set the drafts of each request, and every token is that without drafts.

`Worker` stands for vLLM's workers. It keeps its own count of each request's tokens, proposes drafts, right or wrong, and verifies them.

    python -m pytest tests/vllm/test_vllm_drafts.py --vllm=FOLDER --runs=1000

draws that many runs.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest
from test_vllm_fuzz import STOP, Checked, Clients, check_nothing_is_lost, check_population
from test_vllm_plans import Kept
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm_rig import Rig

from cbatch import BatchShape, Limits, Plan, PlanError, Request, StepRecord, View
from cbatch.cost import CostFunction
from cbatch.vllm import Adapter
from experiments.setup.presets import load_spec
from policies.chunking import Fixed as FixedChunks
from policies.drafting import Adaptive, DraftingRule, Ema, Fixed, Goodput, Table, ThroughputAware, WithDrafts
from policies.joint import Joint
from policies.sarathi_serve import SarathiServe
from reproduction.bench.in_vllm import drafts as bench
from reproduction.bench.in_vllm.turns import TurnsScheduler

Proposal = Callable[[str, Sequence[int]], list[int]]
"""Returns the drafts of a request, by its vLLM id and its tokens."""

WRONG = -5
COST = CostFunction(lambda shape: 1e-2 + 1e-4 * shape.num_tokens)


def target(id_: str, place: int) -> int:
    """The model's token at a place of a request: without drafts, exactly these tokens are the output."""
    drawn = random.Random(f"{id_} {place}").random()
    return STOP if drawn < 0.02 else 100 + int(drawn * 1e6)


class Worker:
    """known: each request's tokens. computed: how many of them are in the KV cache. drafts: of the latest iteration's requests.

    num_lost: requests whose drafts were scheduled after the iteration that could use them.
    """

    def __init__(self, propose: Proposal, asynchronous: bool) -> None:
        self.propose, self.asynchronous = propose, asynchronous
        self.known, self.computed, self.drafts = dict[str, list[int]](), dict[str, int](), dict[str, list[int]]()
        self.num_lost = 0

    def run(self, output: Any) -> ModelRunnerOutput:
        cached = output.scheduled_cached_reqs
        newcomers = {new.req_id for new in output.scheduled_new_reqs} | cached.resumed_req_ids
        for new in output.scheduled_new_reqs:
            self.known[new.req_id], self.computed[new.req_id] = list(new.prompt_token_ids), new.num_computed_tokens
        for id_, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if id_ in cached.resumed_req_ids:
                self.computed[id_] = computed
            assert computed >= self.computed[id_] and (self.asynchronous or computed == self.computed[id_])
        drafts = output.scheduled_spec_decode_tokens
        counts = output.num_scheduled_tokens
        if self.asynchronous:  # vLLM 0.33 by its own rule pads newcomers with blank drafts
            self.num_lost += len(drafts.keys() - self.drafts.keys() - newcomers)
        tokens = [self.verify(id_, count, drafts.get(id_, ())) for id_, count in counts.items()]
        sampling = [id_ for id_, sampled in zip(counts, tokens, strict=True) if sampled]
        self.drafts = {id_: self.propose(id_, self.known[id_]) for id_ in sampling}
        return ModelRunnerOutput([*counts], {id_: place for place, id_ in enumerate(counts)}, tokens)

    def verify(self, id_: str, count: int, scheduled: Sequence[int]) -> list[int]:
        known = self.known[id_]
        end = self.computed[id_] + count - len(scheduled)
        assert end <= len(known), f"{id_} computes tokens that it has not"
        drafts = list(scheduled)
        if self.asynchronous and scheduled:
            drafts = self.drafts.get(id_, [WRONG] * len(scheduled))[: len(scheduled)]
        if end < len(known):
            assert not drafts
            self.computed[id_] = end
            return []
        right = [target(id_, len(known) + after) for after in range(len(drafts) + 1)]
        num_equal = next((place for place, token in enumerate(drafts) if token != right[place]), len(drafts))
        known.extend(right[: num_equal + 1])
        self.computed[id_] = end + num_equal
        return right[: num_equal + 1]


class DraftingRig(Rig):
    """vLLM's engine core with speculation."""

    worker: Worker

    def update(self) -> dict[int, Any]:
        output, _ = self.in_flight.popleft()
        outputs: dict[int, Any] = self.scheduler.update_from_output(output, self.worker.run(output))
        if not self.asynchronous and output.num_scheduled_tokens:
            drafts = self.worker.drafts
            self.scheduler.update_draft_token_ids(DraftTokenIds([*drafts], [[*each] for each in drafts.values()]))
        return outputs


def rig_of(
    policy: Any, limits: Limits, propose: Proposal, num_blocks: int = 60, mode: Any = "strict", **given: Any
) -> Any:
    adapter = Adapter(policy, mode, COST, recorder=given.pop("recorder", None))
    rig = DraftingRig(adapter, limits, num_blocks, 4, **given)
    rig.worker = Worker(propose, rig.asynchronous)
    return rig


def guess(id_: str, known: Sequence[int], num_right: int, most: int) -> list[int]:
    """Drafts of which so many are right."""
    return [target(id_, len(known) + place) if place < num_right else WRONG for place in range(most)]


class Asks:
    """Whole prompts, and as many drafts as vLLM proposes, or `k`. left_out: ids at iterations that compute nothing of them."""

    def __init__(self, k: int, left_out: Sequence[tuple[int, int]] = ()) -> None:
        self.k, self.left_out = k, left_out
        self.received: list[list[int]] = []
        self.steps: list[StepRecord] = []
        self.counters: list[dict[int, tuple[int, int]]] = []
        self.shapes: list[list[BatchShape]] = []

    def plan(self, view: View) -> Plan:
        self.counters.append({request.id: (request.num_computed, request.num_tokens) for request in view.running})
        self.shapes.append([launched.shape() for launched in view.in_flight])  # type: ignore[attr-defined]
        plan = view.plan()
        for request in view.decoding:
            if (view.iteration, request.id) not in self.left_out:
                plan.draft(request, self.k)
        for request in view.waiting:
            plan.add(request)
        return plan.build()

    def on_tokens(self, requests: Sequence[Request]) -> None:
        self.received.append([request.id for request in requests])

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)


def serve(rig: Any, *requests: Request) -> list[dict[str, int]]:
    """Returns the tokens of each iteration, by request."""
    scheduled: list[dict[str, int]] = []
    schedule = rig.scheduler.schedule

    def note() -> Any:
        output = schedule()
        scheduled.append(dict(output.num_scheduled_tokens))
        return output

    rig.scheduler.schedule = note
    for request in requests:
        rig.scheduler.add_request(rig.request(request))
    for _ in range(100):
        if rig.scheduler.has_requests() or rig.in_flight:
            rig.step()
    assert not rig.scheduler.has_requests()
    return [counts for counts in scheduled if counts]


def test_drafts_accepted_none_one_and_all_worked_out_by_hand() -> None:
    """Request 0 has none of its drafts accepted, request 1 one, request 2 all; in iteration 3 vLLM proposes one draft to request 0.

    Iteration 1 has 2 drafts each; then requests 0, 1 and 2 have 6, 6 and 6 tokens of at most 10, 8 and 6. In iteration 2 request 1 has
    place for one draft. Request 0 goes on alone: with 7 tokens it gets the one proposed, with 8 one by its length, with 9 none.
    """
    policy = Asks(2)

    def propose(id_: str, known: Sequence[int]) -> list[int]:
        return guess(id_, known, int(id_), 1 if (id_, len(known)) == ("0", 7) else 3)

    rig = rig_of(policy, Limits(4, 64, 60, max_drafts=3), propose)
    requests = Request(0, 4, 6), Request(1, 3, 5), Request(2, 2, 4)
    assert serve(rig, *requests) == [
        {"0": 4, "1": 3, "2": 2},
        {"0": 3, "1": 3, "2": 3},
        {"0": 3, "1": 2},
        {"0": 2},
        {"0": 2},
        {"0": 1},
    ]
    assert policy.received == [[0, 1, 2], [0, 1, 1, 2, 2, 2], [0, 1, 1], [0], [0], [0]]
    assert policy.counters[2] == {0: (5, 6), 1: (5, 6)}, "what was rejected is taken back"
    drafted = [(step.num_drafted, step.num_drafts, step.num_accepted, step.most_drafts) for step in policy.steps]
    assert drafted == [(0, 0, 0, 0), (3, 6, 3, 2), (2, 3, 1, 2), (1, 1, 0, 1), (1, 1, 0, 1), (0, 0, 0, 0)]
    assert [(step.num_prefill_tokens, step.num_decode_tokens, step.num_sampled) for step in policy.steps[:3]] == [
        (9, 0, 3),
        (0, 9, 6),
        (0, 5, 3),
    ]
    counts, drafts = rig.scheduler.counts, rig.scheduler._planner.view.drafts
    assert (counts.drafts, counts.accepted_drafts, counts.lacking_drafts, counts.short) == (11, 4, 1, 0)
    assert "11 drafts, 4 accepted, 1 drafts asked for that vLLM had not proposed" in str(counts)
    # without the last drafts of requests 1 and 2, which ended: at place 1 rejected, accepted, rejected three times; at place 2 rejected
    assert drafts.counts.tolist() == [[1, 0, 0], [5, 1, 0]]


@pytest.mark.parametrize("num_ahead", [0, 2], ids=["ngram_gpu", "eagle"])
def test_drafts_in_flight_worked_out_by_hand(num_ahead: int) -> None:
    """Asynchronous: counters hold the drafts in flight, and at most 12 tokens, the model's longest length.

    Request 0 has no draft accepted: planned with 5, 8, 9, 9, 10, 10 and 11 tokens, it has place for 2, 2, 1, 1, 0, 0 and 0 drafts, and
    receives 1 token each time. Request 1 has all accepted: planned with 5, 8 and 11 tokens, it has place for 2, 2 and 0, and receives 3, 3 and 1.
    """
    policy = Asks(2)
    rig = rig_of(
        policy,
        Limits(4, 64, 12, max_drafts=2),
        lambda id_, known: guess(id_, known, 2 * int(id_), 2),
        asynchronous=True,
        num_ahead=num_ahead,
    )
    scheduled = serve(rig, Request(0, 4, 8), Request(1, 4, 8))
    assert [counts.get("0", 0) for counts in scheduled] == [4, 3, 3, 2, 2, 1, 1, 1]
    assert [counts.get("1", 0) for counts in scheduled] == [4, 3, 3, 1, 0, 0, 0, 0]
    assert policy.received == [[0, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1], [0], [0], [0], [0]]
    one = BatchShape((), 2, 10)  # with 4 tokens each before
    assert policy.shapes[:3] == [[], [BatchShape(((4, 0), (4, 0)))], [one.with_drafts(4)]]
    assert policy.counters[2:4] == [{0: (7, 8), 1: (7, 8)}, {0: (8, 9), 1: (10, 11)}]
    counts = rig.scheduler.counts
    assert (counts.drafts, counts.accepted_drafts, counts.lacking_drafts, counts.short) == (10, 4, 0, 0)


@pytest.mark.parametrize(("asynchronous", "after"), [(False, 3), (True, 1)], ids=["sync", "async"])
def test_a_request_left_out_keeps_its_drafts_only_where_the_scheduler_has_them(asynchronous: bool, after: int) -> None:
    """The workers keep the drafts of the latest iteration; in the synchronous loop the scheduler has them, too."""
    rig = rig_of(
        Asks(2, left_out=[(2, 0)]),
        Limits(4, 64, 60, max_drafts=2),
        lambda id_, known: guess(id_, known, 0, 2),
        asynchronous=asynchronous,
    )
    scheduled = serve(rig, Request(0, 4, 20), Request(1, 4, 20))
    assert [counts.get("0", 0) for counts in scheduled[:5]] == [4, 3, 0, after, 3]
    assert rig.scheduler.counts.lacking_drafts == (2 if asynchronous else 0) and not rig.worker.num_lost


def test_lookahead_tokens_have_blocks() -> None:
    """EAGLE writes 2 tokens ahead: with a prompt of 7, the next token needs 3 blocks of 4 tokens: for 8 and 2."""
    policy = Asks(0)
    rig = rig_of(policy, Limits(4, 64, 60, max_drafts=2), lambda *_: [], num_blocks=5, num_ahead=2)
    rig.scheduler.add_request(rig.request(Request(0, 7, 4)))
    rig.step()
    view = rig.scheduler._planner.view
    request = next(iter(view.running))
    assert view.kv.num_tokens == 18 and view.kv.num_lacking(request, 8) == view.num_lacking_a_block([request])
    assert view.kv.num_held(request) + view.kv.num_lacking(request, 8) == 3
    rig.scheduler.add_request(rig.request(newcomer := Request(1, 3, 1)))
    [waiting], plan = view.waiting, view.plan()
    before = plan.free_blocks
    assert (plan.add(waiting), before - plan.free_blocks) == (newcomer.num_prompt_tokens, 2), "3 tokens and 2 ahead"
    plan.reject(waiting, "")
    assert plan.free_blocks == before


def test_survivals_are_each_requests_own_whatever_row_it_has() -> None:
    """Request 0 has no draft accepted, request 1 all; request 2 comes when request 0 has ended, and has half of its drafts accepted.

    Of its 4 tokens request 0 has 2, 1 and 0 drafts verified after the first: outcomes of the second and third iteration, of the first place only.
    Each takes an eighth off: (7/8)^2 = 49/64. Request 1 tries both places in iterations 2 to 4. Each count of the run begins as 1.
    """
    rig = rig_of(Asks(2), Limits(4, 64, 60, max_drafts=2), lambda id_, known: guess(id_, known, (0, 2, 1)[int(id_)], 2))
    first, second, third = Request(0, 4, 4), Request(1, 4, 40), Request(2, 4, 40)
    survivals = rig.scheduler._planner.view.drafts.survivals
    by_id = rig.scheduler._planner.population.by_id
    for request in (first, second):
        rig.scheduler.add_request(rig.request(request))
    for _ in range(3):
        rig.step()
    assert survivals(by_id["0"]) == [49 / 64, 49 / 64] and survivals(by_id["1"]) == [1, 1]
    rig.step()
    assert [*by_id] == ["1"]
    rig.scheduler.add_request(rig.request(third))
    assert by_id["2"]._row == 0, "that of request 0"
    assert survivals(by_id["2"]) == pytest.approx([4 / 6, 4 / 6 * 4 / 4]), "those of the run"
    rig.step()
    rig.step()  # when request 1 has tried four times, request 2 tries for the first time
    assert survivals(by_id["1"]) == [1, 1]
    one = 5 / 7 + (1 - 5 / 7) / 8
    assert survivals(by_id["2"]) == pytest.approx([one, one * 7 / 8])


def test_a_request_that_leaves_with_drafts_in_flight_has_none_accepted() -> None:
    policy = Asks(2)
    rig = rig_of(policy, Limits(4, 64, 60, max_drafts=2), lambda id_, known: guess(id_, known, 2, 2))
    for id_ in (0, 1):
        rig.scheduler.add_request(rig.request(Request(id_, 4, 20)))
    rig.step()
    rig.schedule()
    rig.scheduler.finish_requests("0", RequestStatus.FINISHED_ABORTED)
    rig.update()
    counts, step = rig.scheduler.counts, policy.steps[-1]
    assert (counts.drafts, counts.accepted_drafts) == (4, 2)
    assert (step.num_drafted, step.num_drafts, step.num_accepted, step.num_sampled) == (1, 4, 2, 3)
    assert rig.scheduler._planner.view.drafts.counts.tolist() == [[1, 1], [1, 1]]


class Greedy:
    """Asks for 3 drafts of each decode, proposed or not."""

    def plan(self, view: View) -> Plan:
        return Plan(
            (request, request.num_ready + 3 * (request in view.decoding)) for request in [*view.running, *view.waiting]
        )


def test_drafts_that_vllm_has_not_proposed_are_illegal() -> None:
    rig = rig_of(Greedy(), Limits(4, 64, 60, max_drafts=3), lambda id_, known: guess(id_, known, 0, 2))
    with pytest.raises(PlanError, match="4 planned, 1 ready, with at most 2 of 3 drafts"):
        serve(rig, Request(0, 4, 8))


class Truthful(Checked):
    """A random policy that compares its view with the worker's own count. fails: probability of an error; num_failed: errors so far."""

    rig: Any
    fails, num_failed = 0.0, 0

    def plan(self, view: View) -> Plan:
        worker, in_flight = self.rig.worker, [output for output, _ in self.rig.in_flight]
        for request in view.running:
            id_ = request.vllm_id  # type: ignore[attr-defined]
            of_request = [output for output in in_flight if id_ in output.num_scheduled_tokens]
            drafts = sum(len(output.scheduled_spec_decode_tokens.get(id_, ())) for output in of_request)
            computed = sum(output.num_scheduled_tokens[id_] for output in of_request)
            assert request.num_drafts == drafts  # type: ignore[attr-defined]
            if id_ in worker.computed and not any(
                new.req_id == id_ for each in of_request for new in each.scheduled_new_reqs
            ):
                resumed = any(id_ in output.scheduled_cached_reqs.resumed_req_ids for output in of_request)
                assert resumed or request.num_computed == worker.computed[id_] + computed
                sampling = bool(of_request) and request in view.decoding
                assert request.num_tokens == len(worker.known[id_]) + sampling + drafts
        if self._random.random() < self.fails:
            self.num_failed += 1
            raise ValueError("the dice say so")
        return super().plan(view)


def random_run(seed: int, policy: Any, mode: Any = "strict", **given: Any) -> Any:
    """Serves random clients to the end, with drafts accepted at random; checks tokens, requests and blocks."""
    numbers = random.Random(seed)
    most, asynchronous, chance = numbers.randint(1, 4), numbers.random() < 0.6, numbers.choice((0.3, 0.7, 0.95))

    def propose(id_: str, known: Sequence[int]) -> list[int]:
        num_right = next((place for place in range(most) if numbers.random() > chance), most)
        return guess(id_, known, num_right, most if asynchronous else numbers.randint(0, most))

    limits = Limits(numbers.randint(2, 6), numbers.randint(8, 64), 60, max_drafts=most)
    flags = {
        "asynchronous": asynchronous,
        "prefix_cache": numbers.random() < 0.5,
        "num_ahead": numbers.choice((0, most)),
        **given,
    }
    rig = rig_of(policy, limits, propose, numbers.randint(17, 40), mode, **flags)
    policy.rig = rig
    clients = Clients(numbers)
    for _ in clients.turns(rig):
        clients.take(rig.step())
        check_population(rig)
    check_nothing_is_lost(rig, clients)
    for id_, reason in clients.finished.items():
        request, output = clients.asked[id_], clients.outputs[id_]
        expected = [target(id_, request.num_prompt_tokens + place) for place in range(request.max_new_tokens)]
        whole = [*expected[: expected.index(STOP)], STOP] if STOP in expected else expected
        assert output == (whole[: len(output)] if reason == "abort" else whole), f"seed {seed}"
    assert mode == "shadow" or not rig.worker.num_lost
    return rig


@pytest.mark.parametrize("mode", ["strict", "fallback", "shadow"])
def test_no_token_no_request_and_no_block_is_lost_with_drafts(mode: Any, num_runs: int, draw: int) -> None:
    """Outputs are the tokens of `target`, as without drafts; so is what the policy sees of requests, beside the drafts in flight."""
    total = Counter[str]()
    for seed in range(draw, draw + num_runs):
        numbers = random.Random(-1 - seed)
        policy = Truthful(seed, preempts=numbers.choice((0, 0.05, 0.2)), rejects=numbers.choice((0, 0.02)))
        policy.fails = 0.1 if mode == "fallback" else 0.0
        rig = random_run(seed, policy, mode)
        counts = rig.scheduler.counts
        assert counts.fallbacks == policy.num_failed, f"seed {seed}"
        assert mode != "strict" or rig.prefix_cache or not (counts.short or counts.unplanned), f"seed {seed}"
        total += Counter(asdict(counts))
    assert 0 < total["accepted_drafts"] < total["drafts"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["ngram", "ngram_gpu"])
def test_one_engine_takes_turns_between_vllms_rule_and_policies_with_drafts(asynchronous: bool) -> None:
    """The sides of the benchmark `vllm_drafts`, in a KV cache that makes each preempt."""
    limits = Limits(4, bench.BUDGET, bench.LONGEST, max_drafts=bench.DRAFTS)
    rig = DraftingRig(None, limits, 60, 16, asynchronous=asynchronous)
    rig.scheduler, planned = rig.make(TurnsScheduler), list[Any]()
    schedule = rig.scheduler.schedule
    rig.scheduler.schedule = lambda: planned.append(schedule()) or planned[-1]
    for side in bench.SIDES:
        numbers, clients = random.Random(0), Clients(random.Random(0), leave=0.0)
        clients.num_left = 0
        rig.worker = Worker(
            lambda id_, known, numbers=numbers: guess(id_, known, numbers.randrange(4), 3), asynchronous
        )
        planned.clear()
        requests = bench.draw(10, load_spec("tiny"))
        for request in requests:
            rig.scheduler.add_request(rig.request(request, cbatch=side))
        for _ in clients.turns(rig):
            clients.take(rig.step())
        for each in requests:
            places = range(each.num_prompt_tokens, each.max_tokens)
            assert clients.outputs[str(each.id)] == [target(str(each.id), place) for place in places], side
        assert any(output.preempted_req_ids for output in planned), side
        assert any(output.scheduled_spec_decode_tokens for output in planned) == (side != bench.SIDES[1]), side
        assert rig.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == rig.num_blocks, side


RULES: dict[str, Callable[[], DraftingRule]] = {
    "fixed": lambda: Fixed(1),
    "table": lambda: Table([[1, 2, 3], [3, 9, 1]]),
    "ema": lambda: Ema([0, 1, 3]),
    "goodput": Goodput,
    "adaptive": Adaptive,
    "throughput_aware": ThroughputAware,
}


@pytest.mark.parametrize("rule", [*RULES, "none"])
def test_a_drafting_rule_decides_how_many_of_vllms_drafts_are_verified(rule: str, num_runs: int, draw: int) -> None:
    steps: list[StepRecord] = []

    class Noted(SarathiServe):
        def on_step(self, record: StepRecord) -> None:
            steps.append(record)

    for seed in range(draw, draw + num_runs):
        policy = Noted(FixedChunks(8))
        random_run(seed, policy if rule == "none" else WithDrafts(policy, RULES[rule]()))
    most = max(step.most_drafts for step in steps)
    assert most == {"none": 0, "fixed": 1}.get(rule, most) and (most or rule == "none")
    if rule == "table":
        assert {step.most_drafts for step in steps if step.num_drafted > 2} <= {0, 1}


def test_a_policy_that_plans_chunks_and_drafts_together_runs_in_vllm(num_runs: int, draw: int) -> None:
    counts = [random_run(seed, Joint(tbt=0.05)).scheduler.counts for seed in range(draw, draw + num_runs)]
    assert sum(each.drafts for each in counts)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_recorded_run_with_drafts_is_replayed(asynchronous: bool, num_runs: int, draw: int) -> None:
    def make() -> WithDrafts:
        return WithDrafts(SarathiServe(FixedChunks(8)), Goodput())

    for seed in range(draw, draw + num_runs):
        kept = Kept()
        random_run(seed, make(), recorder=kept, asynchronous=asynchronous, prefix_cache=False)
        different = [comparison for comparison in kept.replay(make(), COST) if not comparison.same]
        assert not different, f"seed {seed}: {different[0]}"
