"""A recorded run with drafts can be replayed: a policy sees again all that it saw, survivals among it."""

from pathlib import Path
from typing import Any

import pytest
from contended import LinearCost
from test_drafts import Counting, Launched
from test_replay import Attentive, ask, record

from cbatch import Engine, Eviction, Limits, Plan, Request, StepResult, View
from experiments.replay import main as replay_command
from experiments.run import main as run_command
from policies.evictions import LRU


class Ticking(Counting):
    """An iteration ends a second after the previous one. Drafts are right but where the position is a multiple of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def num_accepted(self, newest: int, drafts: int) -> int:
        return next((place for place in range(drafts) if (newest + 1 + place) % 3 == 0), drafts)

    def wait(self, in_flight: Launched) -> StepResult:
        self.time += 1
        return super().wait(in_flight)._replace(started=self.time - 1, ended=self.time)

    def now(self) -> float:
        return self.time


class BySurvivals:
    """Asks for drafts where they are likelier right than wrong, and for one at least; with chunks of 3 tokens."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        likely = [1 + sum(share > 0.5 for share in view.drafts.survivals(request)) for request in view.decoding]
        plan.add_decodes(preempt_newest=True, drafts=dict(zip(view.decoding, likely, strict=True)))
        for request in (*view.prefilling, *view.waiting):
            plan.add(request, 3)
        return plan.build()


@pytest.mark.parametrize("eviction", [None, LRU])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_policy_that_drafts_sees_and_plans_the_same_again(
    asynchronous: bool, eviction: type[Eviction] | None
) -> None:
    """Real tokens, of which a drafter guesses some; prompts are chunked, and some requests are preempted or stop by themselves."""

    def asked() -> list[Request]:
        lengths = [(4 + id_ % 3, 8 + 5 * (id_ % 4)) for id_ in range(12)]
        stops: list[dict[str, Any]] = [{"stop_tokens": (24,)} if id_ % 4 == 3 else {} for id_ in range(12)]
        prompts = [list(range(10, 10 + length)) for length, _ in lengths]
        arrivals = [{"arrival_time": 0.5 * id_, "prompt": prompt} for id_, prompt in enumerate(prompts)]
        return [Request(id_, *lengths[id_], **stops[id_], **arrivals[id_]) for id_ in range(12)]

    first, again = Attentive(BySurvivals()), Attentive(BySurvivals())
    limits, cache = Limits(4, 30, 40, max_drafts=4), eviction and eviction()
    engine = Engine(
        first,
        Ticking(),
        limits,
        LinearCost(),
        num_blocks=13,
        block_size=3,
        asynchronous=asynchronous,
        prefix_cache=cache,
    )
    chosen = asked()
    recorded = record(engine, chosen)
    assert all(request.output == [*range(10 + request.num_prompt_tokens, 10 + request.num_known)] for request in chosen)
    steps = engine.record.steps
    assert sum(step.num_drafts for step in steps) > sum(step.num_accepted for step in steps) > 20
    assert sum(request.num_preemptions for request in chosen)
    heard = ask(again, recorded, asked(), eviction and eviction())
    assert [str(each.decided) for each in heard] == [str(each.recorded.decided) for each in heard]
    assert all(comparison.same for comparison in heard) and again.heard == first.heard


@pytest.mark.long
@pytest.mark.parametrize(
    "keys", ["drafter=glm_dspark prefix_cache=true", "drafter=model drafter.model=llama-3.2-1b drafter.alpha=0.6"]
)
def test_predictions_of_a_recorded_run_include_drafts(tmp_path: Path, keys: str) -> None:
    """`joint` chooses by the seconds of drafting, and by graphs of more rows than the batch."""
    words = f"policy=joint backend=sim hardware=h200 model=llama-3.1-8b batch=24 {keys}"
    work = f"workload=queued workload.num_requests=30 decisions=true output={tmp_path / 'run'}"
    assert run_command([*words.split(), *work.split()]) == 0
    assert replay_command([str(tmp_path / "run")]) == 0
