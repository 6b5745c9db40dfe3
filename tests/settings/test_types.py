"""Values of a wrong type on the command line."""

import re

import pytest

from cbatch import CbatchError
from experiments.settings.compose import compose_run


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("policy=vtc policy.lift={a:1}", "policy.lift={'a': 1}: give true or false"),
        ("policy=vtc policy.weights=0", "policy.weights=0: give null or values by name"),
        ("policy=atlas policy.thresholds=''", "policy.thresholds=: give a list"),
        ("policy=past_future policy.history=3", "policy.history=3: give a list"),
        ("policy=ltr predictor=noisy predictor.seed={a:1}", "policy.predictor.seed={'a': 1}: give a whole number"),
        ("prefix_cache=true eviction=soft_ttl eviction.ttl=true", "eviction.ttl=True: give a number"),
        ("chunking=pd_aware chunking.pd_ratio={a:1}", "policy.chunking.pd_ratio={'a': 1}: give a number or null"),
        ("workload.sampling.top_p=true", "workload.sampling.top_p=True: give a number above 0, at most 1"),
        ("workload=open_loop workload.arrivals.cv=true", "workload.arrivals.cv=True: give a number from 0.001"),
        ("workload=clients workload.clients.ann.cv=true", "workload.clients.ann.cv=True: give a number from 0"),
        ("workload.stagger=true", "workload.stagger=True: give 0, even, or a number"),
        ("model.rope_theta=true", "model.rope_theta=True must be a number"),
        ("model.rope_theta=0", "model.rope_theta=0 must be above 0"),
        ("+model.seed=true", "model.seed=True must be a whole number"),
        ("policy=ltr predictor=ranks predictor.sigma=-1", "predictor.sigma=-1 must be at least 0"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(words: str, refusal: str) -> None:
    """Python takes true for 1, a text for a sequence and any mapping for true."""
    with pytest.raises(CbatchError, match=f"^{re.escape(refusal)}"):
        compose_run("backend=sim", *words.split()).policy()


@pytest.mark.parametrize(
    "words",
    [
        "policy=vtc policy.weights={a:2}",
        "policy=atlas policy.thresholds=[1,2]",
        "policy=past_future policy.history=[]",
        "prefix_cache=true eviction=soft_ttl eviction.ttl=3",
    ],
)
def test_a_value_of_its_type_is_taken(words: str) -> None:
    compose_run("backend=sim", *words.split()).policy()
