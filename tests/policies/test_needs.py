"""What a policy, an eviction or a router depends on, and a run does not have, stands in the notes of its results."""

import pytest

from cbatch import ConfigError, Plan, View
from experiments.report.notes import notes_of
from experiments.serve import serve
from experiments.settings.compose import compose_run
from policies.orca import Orca

NEEDS = {
    "policy=qoserve": ("objectives", ["chunking=slack", "slo.total=9"]),
    "policy=lars": ("ttft", ["slo.ttft=9"]),
    "policy=slai": ("tbt", ["slo.tbt=9"]),
    "policy=mlfq": ("places", ["max_running=9"]),
    "policy=ltr": ("places", ["max_running=9"]),
    "policy=past_future": ("hidden_lengths", ["max_new_tokens=999"]),
    "policy=priority": ("priorities", ["tiers={a: {share: 0.5, priority: 1}, b: {share: 0.5}}"]),
    "policy=prefix_order": ("prefix_cache", ["prefix_cache=true"]),
    "policy=vtc": ("clients", []),
    "backend.router=lmetric": ("prefix_cache", ["backend.replicas=2", "prefix_cache=true"]),
    "backend.router=bounded_loads": ("replicas", ["backend.replicas=2"]),
}
"""By what needs it: a name, and the settings that give it."""


def lacks(*arguments: str) -> list[str]:
    chats = ("workload=chat", "workload.num_requests=12", "workload.turns=3", "workload.lengths.pd_ratio=20")
    settings = ("backend=sim", "batch=4", *chats, *arguments)
    about = serve(compose_run(*settings), log=lambda _: None, bar=False).about
    names: list[str] = about["lacks"]
    assert len(notes_of([about])) >= len(names)
    return names


@pytest.mark.long
@pytest.mark.parametrize("needs", NEEDS)
def test_a_run_says_what_its_policy_or_router_needs(needs: str) -> None:
    name, remedy = NEEDS[needs]
    of_workload = ("slo.", "tiers", "max_new")
    given = [
        f"+workload.{text}" if text.startswith("slo.") else f"workload.{text}" if text.startswith(of_workload) else text
        for text in remedy
    ]
    assert name in lacks(needs)
    if remedy:
        assert lacks(needs, *given) == []


class Drafting(Orca):
    """Asks for drafts, whether or not there is a drafter."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes(drafts=lambda request: 2)
        for request in view.waiting:
            plan.add(request)
        return plan.build()


@pytest.mark.long
def test_a_run_says_that_it_has_no_drafter() -> None:
    assert lacks(f"policy={__name__}.Drafting") == ["drafter"]
    assert lacks(f"policy={__name__}.Drafting", "drafter=glm_mtp") == []


@pytest.mark.long
def test_a_run_says_what_its_eviction_needs() -> None:
    alone = ("prefix_cache=true", "workload.turns=1")
    assert lacks("drafter=glm_mtp") == ["drafts"] and lacks("drafter=glm_mtp", "drafting=fixed") == []
    assert lacks("drafter=glm_mtp", "drafting=fixed", "drafting.k=8") == ["max_drafts"], "of 7"
    assert lacks("eviction=tlru", *alone) == ["turns"] and lacks("eviction=tlru", "prefix_cache=true") == []
    assert lacks("eviction=soft_ttl", "prefix_cache=true") == []
    assert lacks("eviction=belady", "prefix_cache=true") == ["future"]
    assert lacks("eviction=belady", "prefix_cache=true", "workload.closed=false") == []
    assert lacks("eviction=belady", "prefix_cache=true", "workload.closed=false", "backend.replicas=2") == ["future"]
    sessionless = ("workload=open_loop", "workload.num_requests=4", "prefix_cache=true")
    settings = compose_run("backend=sim", "eviction=soft_ttl", *sessionless)
    assert serve(settings, log=lambda _: None, bar=False).about["lacks"] == ["sessions"]
    assert lacks("policy=past_future", "policy.admission=optimum") == [], "which is given true lengths"


@pytest.mark.long
def test_a_run_says_that_replicas_are_too_few_and_that_nothing_leaves_a_node() -> None:
    """Two replicas of one GPU send nothing; two stages on nodes of one GPU do."""
    assert lacks("backend.replicas=2", "autoscale=fixed(replicas=3)") == ["more_replicas"]
    assert lacks("backend.replicas=2", "autoscale=fixed(replicas=2)") == []
    assert lacks("backend.replicas=2", "backend.network=50") == ["between_nodes"]
    assert lacks("backend.pipeline_stages=2", "backend.gpus_per_node=1", "backend.network=50") == []


@pytest.mark.parametrize(
    ("depends_on", "problem"),
    [
        ("clients", r"depends_on is a str; make it a tuple, as in \("),
        (5, "depends_on is a int; make it a tuple"),
        (("clints",), "depends_on names 'clints'; did you mean clients"),
    ],
)
def test_what_a_policy_needs_is_refused_before_the_run_if_it_names_nothing(
    depends_on: object, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Orca, "depends_on", depends_on, raising=False)
    monkeypatch.setattr(Orca, "plan", None, raising=False)
    with pytest.raises(ConfigError, match=f"^Orca: {problem}"):
        lacks("policy=orca")
