"""The simulator: its cost model against what was measured, its clock, its profiles and their errors."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from schedules import UnitCost, make_engine

from cbatch import BatchShape, Engine, Limits, Request
from cbatch.errors import ConfigError, ProfileError
from cbatch.model import ModelSpec
from cbatch.sim import profile as profiles
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.profile import load_profile, profile_names
from policies.orca import Orca

LLAMA = ModelSpec("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072)
OTHER = ModelSpec("some-13b", "llama", 40, 5120, 40, 40, 128, 13824, 32000, 4096)

MEASURED_MS = [  # (decodes, context of each, chunk, ms on an H200)
    (32, 1280, 0, 6.18),
    (32, 4352, 0, 8.93),
    (1, 300, 0, 4.69),
    (128, 1000, 128, 12.2),
    (128, 1000, 384, 17.7),
    (128, 1000, 896, 29.5),
    (31, 1000, 225, 8.6),
    (31, 1000, 481, 14.3),
]


@pytest.mark.parametrize(("decodes", "context", "chunk", "measured"), MEASURED_MS)
def test_iterations_measured_on_an_h200_are_predicted_within_12_percent(
    decodes: int, context: int, chunk: int, measured: float
) -> None:
    shape = BatchShape(((chunk, 0),) if chunk else (), decodes, decodes * context)
    assert ProfileCost(load_profile("h200"), LLAMA).predict(shape) * 1e3 == pytest.approx(measured, rel=0.12)


def test_measured_steps_at_tile_edges_stay_steps() -> None:
    cost = ProfileCost(load_profile("h200"), LLAMA)
    seconds = {count: cost.parts(BatchShape(((count, 0),))).linear for count in (255, 256, 257, 448, 512)}
    assert seconds[257] > 1.1 * seconds[256]
    assert seconds[448] > 1.2 * seconds[512]  # a size to avoid, found by measuring


def test_a_model_without_a_table_is_estimated_from_the_ceilings_and_marked() -> None:
    profile = load_profile("h200")
    cost = ProfileCost(profile, OTHER)
    assert cost.estimated and not ProfileCost(profile, LLAMA).estimated
    layers = OTHER.num_layers * sum(k * n for k, n in OTHER.linear_shapes.values())
    one, many = cost.parts(BatchShape((), 1, 1)).linear, cost.parts(BatchShape(((4096, 0),))).linear
    assert one == pytest.approx(2 * layers / profile.bandwidth_bytes_per_second, rel=0.01)
    assert many == pytest.approx(2 * layers * 4096 / profile.flops_per_second, rel=0.01)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_host_time_is_added_in_sync_and_hidden_in_async(asynchronous: bool) -> None:
    """10 iterations of 1 s on the device and 0.25 s on the host."""
    limits = Limits(1, 8, 100)
    engine = Engine(Orca(), SimExecutor(UnitCost(), host_seconds=0.25), limits, UnitCost(), num_blocks=50, block_size=4,
                    asynchronous=asynchronous)  # fmt: skip
    engine.submit([Request(0, 5, 10)])
    steps = engine.run().steps
    assert steps[-1].ended == pytest.approx(0.25 + 10 if asynchronous else 10 * 1.25)
    assert all(later.started >= step.ended for step, later in pairwise(steps))


def test_the_virtual_clock_jumps_over_idle_time() -> None:
    engine = make_engine(Orca(), Limits(2, 8, 100))
    engine.submit([Request(0, 4, 1), Request(1, 4, 1, arrival_time=1e6)])
    assert [step.started for step in engine.run().steps] == [0.0, 1e6]


def test_kv_cache_is_what_the_weights_leave() -> None:
    profile = load_profile("h200")
    tokens = profile.kv_tokens(LLAMA)
    assert tokens * 131072 == pytest.approx(0.9 * 141e9 - LLAMA.weight_bytes, rel=1e-4)  # 128 KiB a token
    huge = ModelSpec("huge", "llama", 200, 16384, 128, 8, 128, 53248, 128256, 8192)
    with pytest.raises(ConfigError, match=r"model=huge needs .* GB for its weights, hardware=h200"):
        profile.kv_tokens(huge)


def test_profiles_are_found_by_name_and_path(tmp_path: Path) -> None:
    copy = tmp_path / "mine.json"
    copy.write_text((Path(profiles.__file__).parent / "profiles" / "h200.json").read_text())
    assert load_profile(str(copy)) == load_profile("h200")
    assert "h200" in profile_names()
    with pytest.raises(ProfileError, match=r"hardware=h20: no such profile; did you mean h200\?"):
        load_profile("h20")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("bandwidth_bytes_per_second", None, "bandwidth_bytes_per_second is missing"),
        ("flops_per_second", -1.0, "flops_per_second must be a number above 0, is -1.0"),
        ("memory_bytes", math.inf, "memory_bytes must be a number above 0, is inf"),
        ("host_seconds", "fast", "host_seconds has the wrong type"),
        ("attention", {}, r"attention.base_seconds is missing"),
        ("linear_seconds", {"m": {"tokens": [1, 1], "all": [1, 2]}}, "linear_seconds.m.tokens must be ascending"),
        ("linear_seconds", {"m": {"tokens": [1, 2], "all": [1]}}, "linear_seconds.m.all has 1 values for 2"),
        ("linear_seconds", {"m": {"tokens": [1], "all": [math.nan]}}, r"linear_seconds.m.all\[0\] must be a number"),
    ],
)
def test_a_damaged_profile_names_file_and_key(tmp_path: Path, key: str, value: object, says: str) -> None:
    data = json.loads((Path(profiles.__file__).parent / "profiles" / "h200.json").read_text())
    if value is None:
        del data[key]
    else:
        data[key] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=says) as caught:
        load_profile(str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"broken.json: cannot read the profile"):
        load_profile(str(path))
