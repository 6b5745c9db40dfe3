"""Profiles damaged at random: each is refused in one line of the framework's own, or gives finite times; nothing else happens."""

import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from spoiled_inputs import spoiled_json

from cbatch import BatchShape
from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import PROFILES, load_profile

LLAMA = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
WIDER = replace(LLAMA, name="wider", hidden_size=6144, num_kv_heads=16)
"""A model without tables, to which those of the other are fitted."""

SHAPES = (BatchShape((), 1, 1), BatchShape(((64, 0),)), BatchShape(((100, 1000), (1, 0)), 128, 128 * 4000, 29))


def times_or_refusal(path: Path, spec: ModelSpec, topology: Topology) -> None:
    """Predict with a profile. Fails on an error that is not a user's, and on a time that is none."""
    seconds, refusal = [], ""
    try:
        cost = ProfileCost(load_profile(str(path)), spec, topology, max_batch=64)
        seconds = [cost.parts(shape).total for shape in SHAPES]
        seconds += [times.compute - times.pace.gain for times in map(cost.execute, SHAPES)]
        cost.profile.kv_tokens(spec, 64, topology)
    except (ProfileError, ConfigError) as error:
        refusal = str(error)
    assert "\n" not in refusal and len(refusal) < 400, refusal
    assert all(math.isfinite(value) and value >= 0 for value in seconds), seconds


def shorten(node: Any) -> Any:
    """At most three numbers of each table."""
    if isinstance(node, dict):
        return {key: shorten(value) for key, value in node.items()}
    return [shorten(value) for value in node[:3]] if isinstance(node, list) else node


def small_profile() -> Any:
    """A profile with every kind of table."""
    data = shorten(json.loads((PROFILES / "h200.json").read_text()))
    model = data["models"][LLAMA.name]
    model["tensor_parallel"] = {"2": model["tensor_parallel"]["2"]}
    return {**data, "models": {LLAMA.name: model}}


@pytest.mark.long
@given(spoiled_json(small_profile()))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_mutated_profile_file_is_refused_or_gives_finite_times(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.json"
        path.write_text(json.dumps(data))
        for spec in (LLAMA, WIDER):
            times_or_refusal(path, spec, Topology(2, 2))
