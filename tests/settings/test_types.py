"""Values of a wrong type on the command line."""

import re

import pytest

from cbatch import CbatchError
from experiments.settings.compose import compose_run
from policies.predictors import Predictor
from policies.vtc import VTC


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("workload.sampling.top_p=true", "workload.sampling.top_p=True: give a number above 0, at most 1"),
        ("workload=open_loop workload.arrivals.cv=true", "workload.arrivals.cv=True: give a number from 0.001"),
        ("workload=clients workload.clients.ann.cv=true", "workload.clients.ann.cv=True: give a number from 0"),
        ("+workload.tiers={a:{share:true}}", "workload.tiers.a.share=True: give a number above 0, at most 1"),
        ("workload.stagger=true", "workload.stagger=True: give 0, even, or a number"),
        ("workload=chat workload.steady=maybe", "workload.steady=maybe: give true or false"),
        ("model.rope_theta=true", "model.rope_theta=True must be a number"),
        ("model.rope_theta=0", "model.rope_theta=0 must be above 0"),
        ("+model.seed=true", "model.seed=True must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(words: str, refusal: str) -> None:
    """Python takes true for 1."""
    with pytest.raises(CbatchError, match=f"^{re.escape(refusal)}"):
        compose_run("backend=sim", *words.split())


def test_a_weight_of_python_is_a_number() -> None:
    """Settings are compared with the types of the class; an object from Python has checked them itself."""
    with pytest.raises(CbatchError, match="weights must be finite"):
        VTC(Predictor(), weights={"ann": True})
