"""A policy plans the same in this package's engine and in vLLM's real scheduler: every view and plan, iteration by iteration.

What vLLM decided is recorded, and followed without it: the policy sees the same views, and would decide the same.
"""

import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import contended
import pytest
import vllm
from contended import BLOCK, LIMITS, LinearCost, decisions_of
from fuzz_policy import FuzzPolicy
from schedules import Wrapped
from test_vllm_fuzz import STOP, Clients
from vllm_rig import Rig

from cbatch import SLO, CostModel, Limits, Plan, Policy, Request, View
from cbatch.replay.decisions import Decided, Decision, Recorded, Seen, StepEnd, look, read
from cbatch.replay.replay import ReplayComparison, replay
from cbatch.request_spec import RequestSpec
from cbatch.vllm import Adapter
from cbatch.vllm.request import ServedRequest
from cbatch.vllm.view import VllmKVView
from experiments.replay import main as replay_command
from experiments.store.decisions_file import read_decisions
from experiments.store.run_folder import DECISIONS
from experiments.vllm import PolicyScheduler
from policies.priority import Priority
from policies.vllm_v1 import VllmV1

Events = list[Decision | StepEnd]
BLOCKS = {"ample": 200, "tight": contended.NUM_BLOCKS}


def requests() -> list[Request]:
    """Those of `contended`, of several clients and with objectives."""
    tiers = ({"slo": SLO(ttft=0.02, tbt=0.01)}, {"slo": SLO(total=0.3)}, {})
    return [
        Request(
            each.id,
            each.num_prompt_tokens,
            each.max_new_tokens,
            arrival_time=each.arrival_time,
            client="ab"[each.id % 2],
            priority=each.id % 3,
            predicted_new_tokens=1 + each.max_new_tokens // 2,
            **tiers[each.id % 3],
        )
        for each in contended.requests()
    ]


class Looking(Wrapped):
    """A policy of which each view and plan is kept."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.seen: list[tuple[Seen, Decided]] = []

    def plan(self, view: View) -> Plan:
        seen = look(view)
        plan = self.policy.plan(view)
        self.seen.append((seen, read(plan)))
        return plan


def run_vllm(rig: Any, events: Events) -> None:
    """Serves the requests with vLLM's scheduler, by the clock of a recorded run."""
    arriving = sorted(requests(), key=lambda request: request.arrival_time)
    for event in events:
        if isinstance(event, StepEnd):
            rig.now = event.record.ended
            rig.update()
            continue
        while arriving and arriving[0].arrival_time <= event.seen.now:
            rig.now = arriving[0].arrival_time
            rig.scheduler.add_request(rig.request(arriving.pop(0)))
        rig.now = event.seen.now
        if not rig.schedule().total_num_scheduled_tokens:
            rig.in_flight.pop()


class Kept:
    """Keeps a recording in memory."""

    def __init__(self) -> None:
        self.requests: list[RequestSpec] = []
        self.events: list[Decision | StepEnd] = []
        self.lengths: dict[int, int] = {}

    def begin(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def request(self, spec: RequestSpec) -> None:
        self.requests.append(spec)

    def event(self, event: Decision | StepEnd) -> None:
        self.events.append(event)

    def finish(self, id_: int, num_output_tokens: int) -> None:
        self.lengths[id_] = num_output_tokens

    def close(self) -> None: ...

    def replay(self, policy: Any, cost: CostModel | None = None) -> list[ReplayComparison]:
        found: list[ReplayComparison] = []
        recorded = self.recorded._replace(events=self.events)
        replay(
            recorded, [Request.from_spec(spec) for spec in self.requests], policy, cost or LinearCost(), found.append
        )
        return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kv", BLOCKS)
@pytest.mark.parametrize("name", contended.POLICIES)
def test_a_policy_plans_in_vllm_as_in_the_engine_and_again_at_the_recorded_views(
    name: str, kv: str, asynchronous: bool
) -> None:
    make, kept = contended.POLICIES[name], Kept()
    events = decisions_of(make(), requests(), BLOCKS[kv], asynchronous)
    decisions = [
        event for event in events if isinstance(event, Decision) and (event.seen.waiting or event.seen.running)
    ]
    looking = Looking(make())
    adapter = Adapter(looking, cost=LinearCost(), tile=LIMITS.tile, batch=LIMITS.max_batch, recorder=kept)
    rig = Rig(adapter, LIMITS, BLOCKS[kv], BLOCK, asynchronous=asynchronous)
    run_vllm(rig, events)
    for found, expected in zip(looking.seen, decisions, strict=False):
        assert found == (expected.seen, expected.decided), f"iteration {expected.iteration}"
    assert len(looking.seen) == len(decisions) > 20
    assert not rig.scheduler.requests
    assert rig.scheduler.counts.short == rig.scheduler.counts.unplanned == 0
    followed = kept.replay(make())
    assert len(followed) > 20
    for comparison in followed:
        assert comparison.same, comparison
    assert kept.lengths == {request.id: request.max_new_tokens for request in requests()}


@pytest.mark.parametrize("long_prefill", [0, 7])
@pytest.mark.parametrize("kind", [VllmV1, Priority])
@pytest.mark.parametrize(("asynchronous", "num_blocks"), [(False, 200), (False, 18), (True, 200)])
def test_vllms_policies_decide_as_this_version_of_vllm(
    asynchronous: bool, num_blocks: int, kind: type[VllmV1], long_prefill: int, num_runs: int
) -> None:
    """Also where it preempts, in the synchronous loop; in the asynchronous one it waits for blocks that are about to come free."""
    num_preempted = 0
    for seed in range(num_runs):
        numbers, kept = random.Random(seed), Kept()
        policy, limits = kind(30, long_prefill, version=vllm.__version__), Limits(numbers.randint(2, 6), 30, 60)
        change = partial(narrow, limits.max_batch, "fcfs" if kind is VllmV1 else "priority", long_prefill)
        rig = Rig(
            Adapter(policy, "shadow", recorder=kept), limits, num_blocks, 4, asynchronous=asynchronous, change=change
        )
        for _ in Clients(numbers, leave=0.1).turns(rig):
            rig.step()
        assert rig.scheduler.counts.different == 0 < rig.scheduler.counts.iterations, f"seed {seed}"
        num_preempted += sum(len(event.decided.preempt) for event in kept.events if isinstance(event, Decision))
    assert (num_preempted > 0) == (num_blocks < 200)


def narrow(batch: int, policy: str, long_prefill: int, config: Any) -> None:
    """vLLM admits what an iteration holds, and a prompt whose first chunk fits."""
    config.scheduler_config.max_num_seqs, config.scheduler_config.scheduler_reserve_full_isl = batch, False
    config.scheduler_config.policy, config.scheduler_config.long_prefill_token_threshold = policy, long_prefill


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decisions_of_vllm_itself_are_followed_to_the_end(asynchronous: bool) -> None:
    """With a prefix cache, stop tokens, aborts and a KV cache so small that vLLM preempts."""
    num_preempted = 0
    for seed in range(10):
        numbers, kept = random.Random(seed), Kept()
        limits = Limits(4, 40, 60)
        rig = Rig(
            Adapter(FuzzPolicy(seed), "shadow", recorder=kept),
            limits,
            16,
            4,
            asynchronous=asynchronous,
            prefix_cache=True,
        )
        rig.sample = lambda id_: STOP if numbers.random() < 0.03 else 7  # noqa: B023 - of this run
        for _ in Clients(numbers).turns(rig):
            rig.step()
        finished: list[int] = []
        policy = FuzzPolicy(seed)
        policy.on_finish = lambda request: finished.append(request.id)  # type: ignore[attr-defined] # noqa: B023
        found = kept.replay(policy)
        assert len(found) == sum(isinstance(event, Decision) for event in kept.events)
        assert len(finished) == len(set(finished)) >= len(kept.requests) - 1  # nothing follows the last abort
        num_preempted += sum(len(comparison.recorded.decided.preempt) for comparison in found)
    assert num_preempted


def test_a_recording_in_a_folder_is_replayed_and_served_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recorded"
    monkeypatch.setenv("CBATCH", f"policy=sarathi_serve chunking=fixed chunk=8 vllm.record={folder}")
    rig = Rig(None, Limits(8, 64, 60), 60, 4, asynchronous=True)
    rig.scheduler = rig.make(PolicyScheduler)
    for number in range(6):
        request = rig.request(Request(number, 20, 5 + number), client="ab"[number % 2])
        request.arrival_time = time.time() - number
        rig.scheduler.add_request(request)
    while rig.in_flight or rig.scheduler.has_requests():
        rig.step()
    rig.scheduler._planner.close()
    recorded = read_decisions(folder / DECISIONS)[0].requests
    assert [request.extra["waited"] for request in recorded] == pytest.approx([*range(6)], abs=0.5)
    assert replay_command([str(folder)]) == 0
    assert "SarathiServe makes the same" in capsys.readouterr().out
    assert replay_command([str(folder), "policy=orca"]) == 1
    assert "Orca decides differently" in capsys.readouterr().out


@pytest.mark.parametrize(("in_flight", "freed"), [(False, (2, 0)), (True, (0, 2))])
def test_a_preemption_frees_the_blocks_that_no_other_request_holds(in_flight: bool, freed: tuple[int, int]) -> None:
    """Two requests hold the first of three blocks, a cached prefix."""
    request = ServedRequest.from_spec(RequestSpec(0, 9, 4))
    request.vllm_id = "a"
    manager = SimpleNamespace(req_to_blocks={"a": [SimpleNamespace(ref_cnt=holders) for holders in (2, 1, 1)]})
    coordinator = SimpleNamespace(single_type_managers=[manager])
    scheduler = SimpleNamespace(
        block_size=4,
        num_lookahead_tokens=0,
        kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=9), coordinator=coordinator),
    )
    view: Any = SimpleNamespace(is_in_flight=lambda _: in_flight)
    kv = VllmKVView(scheduler, view)
    assert (kv.num_held(request), kv.freed_by_preempting(request)) == (3, freed)
