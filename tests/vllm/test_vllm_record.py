"""What vLLM decided is recorded, and followed without it: the policy sees the same views, and would decide the same."""

import random
from pathlib import Path
from typing import Any

import contended
import pytest
from contended import LinearCost, decisions_of
from fuzz_policy import FuzzPolicy
from test_vllm_fuzz import STOP, Clients
from test_vllm_plans import BLOCK, BLOCKS, LIMITS, requests, run_vllm

from cbatch import Limits, Request
from cbatch.replay.counterfactual import Comparison, Recorded
from cbatch.replay.decisions import Decision, StepEnd
from cbatch.replay.follow import follow
from cbatch.request import RequestSpec
from experiments.replay import main as replay


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

    def follow(self, policy: Any) -> list[Comparison]:
        found: list[Comparison] = []
        recorded = self.recorded._replace(events=self.events)
        follow(recorded, [Request.from_spec(spec) for spec in self.requests], policy, LinearCost(), found.append)
        return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kv", BLOCKS)
@pytest.mark.parametrize("name", contended.POLICIES)
def test_a_policy_repeats_its_plans_at_the_views_that_it_saw_in_vllm(
    name: str, kv: str, asynchronous: bool, vllm_rig: Any
) -> None:
    from cbatch.vllm import Adapter

    make, kept = contended.POLICIES[name], Kept()
    adapter = Adapter(make(), cost=LinearCost(), tile=LIMITS.tile, batch=LIMITS.max_batch, recorder=kept)
    rig = vllm_rig.Rig(adapter, LIMITS, BLOCKS[kv], BLOCK, asynchronous=asynchronous)
    run_vllm(rig, decisions_of(make(), requests(), BLOCKS[kv], asynchronous))
    found = kept.follow(make())
    assert len(found) > 20
    for comparison in found:
        assert comparison.same, comparison
    assert kept.lengths == {request.id: request.max_new_tokens for request in requests()}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decisions_of_vllm_itself_are_followed_to_the_end(asynchronous: bool, vllm_rig: Any) -> None:
    """With a prefix cache, stop tokens, aborts and a KV cache so small that vLLM preempts."""
    from cbatch.vllm import Adapter

    num_preempted = 0
    for seed in range(10):
        numbers, kept = random.Random(seed), Kept()
        limits = Limits(4, 40, 60)
        rig = vllm_rig.Rig(
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
        found = kept.follow(policy)
        assert len(found) == sum(isinstance(event, Decision) for event in kept.events)
        assert len(finished) == len(set(finished)) >= len(kept.requests) - 1  # nothing follows the last abort
        num_preempted += sum(len(comparison.recorded.decided.preempt) for comparison in found)
    assert num_preempted


def test_a_recording_in_a_folder_is_replayed_and_served_again(
    vllm_rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.vllm import PolicyScheduler

    folder = tmp_path / "recorded"
    monkeypatch.setenv("CBATCH", f"policy=sarathi_serve chunking=fixed chunk=8 vllm.record={folder}")
    rig = vllm_rig.Rig(None, Limits(8, 64, 60), 60, 4, asynchronous=True)
    rig.scheduler = rig.make(PolicyScheduler)
    for number in range(6):
        rig.scheduler.add_request(rig.request(Request(number, 20, 5 + number), client="ab"[number % 2]))
    while rig.in_flight or rig.scheduler.has_requests():
        rig.step()
    rig.scheduler._planner.close()
    assert replay([str(folder)]) == 0
    assert "SarathiServe makes the same" in capsys.readouterr().out
    assert replay([str(folder), "policy=orca"]) == 1
    assert "Orca decides otherwise" in capsys.readouterr().out
