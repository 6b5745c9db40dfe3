"""Profiles damaged at random: each is refused in one line of the framework's own, or gives finite times; nothing else happens."""

import json
import math
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbatch import BatchShape
from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import PROFILES, load_profile

LLAMA = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
SHAPES = (BatchShape((), 1, 1), BatchShape(((64, 0),)), BatchShape(((100, 1000), (1, 0)), 128, 128 * 4000, 29))


def times_or_refusal(path: Path, spec: ModelSpec, topology: Topology) -> None:
    """Predict with a profile. Fails on an error that is not a user's, and on a time that is none."""
    seconds, refusal = [], ""
    try:
        cost = ProfileCost(load_profile(str(path)), spec, topology, max_batch=64)
        seconds = [cost.parts(shape).total for shape in SHAPES]
        seconds += [times.compute - times.pace.gain for times in map(cost.execute, SHAPES)]
        cost.profile.kv_tokens(spec, topology)
    except (ProfileError, ConfigError) as error:
        refusal = str(error)
    assert "\n" not in refusal and len(refusal) < 400, refusal
    assert all(math.isfinite(value) and value >= 0 for value in seconds), seconds


JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 0.5, 1e308, math.nan, math.inf, 10**400, "", "1", "nan", [], [1, 2], [[1.0]], {}]
).map(deepcopy)  # of one object, the second may land inside the first: itself


def places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON tree."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    return [place for key in keys for place in ((node, key), *places(node[key]))]


def damage(data: Any, draw: st.DataObject) -> None:
    """Change one place of the tree; a list may also lose its order or an end."""
    container, key = draw.draw(st.sampled_from(places(data)), label="place")
    match draw.draw(st.sampled_from(["junk", "junk", "delete", "rename", "reverse", "repeat"])):
        case "delete":
            del container[key]
        case "rename" if isinstance(container, dict):
            container[f"{key}x"] = container.pop(key)
        case "reverse" if isinstance(container[key], list):
            container[key].reverse()
        case "repeat" if isinstance(container, list):
            container.insert(key, deepcopy(container[key]))
        case _:
            container[key] = draw.draw(JUNK)


def shorten(node: Any) -> Any:
    """At most three numbers of each table."""
    if isinstance(node, dict):
        return {key: shorten(value) for key, value in node.items()}
    return [shorten(value) for value in node[:3]] if isinstance(node, list) else node


def small_profile() -> Any:
    """A profile with every kind of table."""
    data = shorten(json.loads((PROFILES / "h200.json").read_text()))
    data["links"].pop("to_device"), data["links"].pop("to_host")
    model = data["models"][LLAMA.name]
    model["tensor_parallel"] = {"2": model["tensor_parallel"]["2"]}
    data["models"] = {LLAMA.name: model}
    return data


@given(st.data(), st.integers(1, 3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_mutated_profile_file_is_refused_or_gives_finite_times(draw: st.DataObject, num_changes: int) -> None:
    data = small_profile()
    for _ in range(num_changes):
        damage(data, draw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.json"
        path.write_text(json.dumps(data))
        times_or_refusal(path, LLAMA, Topology(2, 2))
