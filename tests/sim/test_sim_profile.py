"""Profile files: found, checked, and refused with the file and key named."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from cbatch import BatchShape
from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.sim import profile_file as profiles
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile, profile_names

H200 = Path(profiles.__file__).parent / "profiles" / "h200.json"
MISSING = object()


def test_profiles_are_found_by_name_and_path(tmp_path: Path) -> None:
    copy = tmp_path / "mine.json"
    copy.write_text(H200.read_text())
    assert load_profile(str(copy)).ceilings == load_profile("h200").ceilings
    assert {"h200", "a6000-llama-13b"} <= set(profile_names())
    with pytest.raises(ProfileError, match=r"hardware=h20: no such profile; did you mean h200\?"):
        load_profile("h20")
    with pytest.raises(ProfileError, match=r"no tables known here; give the folder of one device"):
        load_profile(str(tmp_path))


def test_every_table_of_a_model_is_read(tmp_path: Path) -> None:
    data = json.loads(H200.read_text())
    data["models"] = {
        "m": {
            "num_layers": 2,
            "tensor_parallel": {
                "1": {
                    "linear": {"tokens": [1, 2], "qkv": [2.0, 4.0], "o": [2.0, 2.0], "from": "a remark"},
                    "other": {"tokens": [1], "seconds": [0.5]},
                    "embedding": {"tokens": [1], "seconds": [0.0]},
                    "head": {"requests": [1], "seconds": [0.25]},
                    "chunks": {"sizes": [1, 2], "contexts": [0, 10], "seconds": [[1.0, 2.0], [2.0, None]]},
                    "decodes": {"sizes": [1], "contexts": [10, 20], "seconds": [[4.0, 8.0]]},
                }
            },
        }
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    cost = ProfileCost(load_profile(str(path)), ModelSpec("m", "llama", 2, 64, 4, 4, 16, 128, 100, 64))
    assert cost.estimated == ()
    parts = cost.parts(BatchShape(((1, 10),), 1, 15))
    assert parts == (6.0, 2.0 + 6.0, 0.25 * 2, 1.0, 0.0)  # the head in proportion, as it was measured at one request


TABLE = "models.llama-3.1-8b.tensor_parallel.1"


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("ceilings.bandwidth_bytes_per_second", MISSING, "ceilings.bandwidth_bytes_per_second is missing"),
        ("ceilings.flops_per_second", -1.0, "ceilings.flops_per_second must be a number above 0, is -1.0"),
        ("memory_bytes", math.inf, "memory_bytes must be a number above 0, is inf"),
        ("name", 3, "name must be a text, is 3"),
        ("host.sync.seconds", "fast", "host.sync.seconds must be a number, is 'fast'"),
        ("host.sync.seconds", -1e-3, "host.sync.seconds must be a number of at least 0, is -0.001"),
        ("attention", {}, "attention.bandwidth_bytes_per_second is missing"),
        ("atention", {}, "atention is unknown, did you mean attention"),
        ("attention.base_second", 1.0, "attention.base_second is unknown, did you mean base_seconds"),
        ("links.all_reduce.two", {}, "links.all_reduce.two must be a number of GPUs"),
        ("links.within_node.bytes", [1, 2], r"links.within_node.seconds has 8 values for 2 bytes"),
        (f"{TABLE}.linear", {"tokens": [1, 1], "all": [1, 2]}, "linear.tokens must be ascending"),
        (f"{TABLE}.linear", {"tokens": [1, 2], "all": [1]}, "linear.all has 1 values for 2"),
        (f"{TABLE}.linear", {"tokens": [1], "all": [math.nan]}, r"linear.all\[0\] must be a number above 0, is nan"),
        (f"{TABLE}.linear", {"tokens": [1]}, "linear has no list of seconds"),
        (f"{TABLE}.head", [], "head must be an object"),
        (f"{TABLE}.chunks", MISSING, "chunks and decodes belong together"),
        (f"{TABLE}.power.reserve_seconds", -1, "power.reserve_seconds must be a number of at least 0, is -1"),
        (f"{TABLE}.power.idle_rise_seconds", 0, "power.idle_rise_seconds must be a number above 0, is 0"),
        (f"{TABLE}.power.loss", [0.1], "power.loss has 1 values for"),
        (f"{TABLE}.captured_rows.tokens", MISSING, "captured_rows.tokens is missing"),
        (f"{TABLE}.decode_only.head", MISSING, "decode_only.head is missing"),
        (f"{TABLE}.chunks", {"sizes": [1], "contexts": [1], "seconds": [[None]]}, "chunks.seconds must have a value"),
        ("models.llama-3.1-8b.num_layers", 0, "num_layers must be a number above 0, is 0"),
    ],
)
def test_a_damaged_profile_names_file_and_key(tmp_path: Path, where: str, value: object, says: str) -> None:
    node = data = json.loads(H200.read_text())
    *path, last = where.replace("3.1", "3_1").split(".")  # of the model's name
    for key in path:
        node = node.setdefault(key.replace("3_1", "3.1"), {})
    if value is MISSING:
        del node[last]
    else:
        node[last] = value
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ProfileError, match=says) as caught:
        load_profile(str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"broken.json: cannot read the profile"):
        load_profile(str(path))
    path.write_text("[]")
    with pytest.raises(ProfileError, match=r"broken.json: the file must be an object"):
        load_profile(str(path))


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads(name: str) -> None:
    assert load_profile(name).name == name


def test_simulation_never_imports_torch() -> None:
    program = (
        "import sys, cbatch.sim.executor, cbatch.cluster, cbatch.sim.profile_file as p; p.load_profile('h200'); "
        "import reproduction.papers.closure, reproduction.papers.fig12_systems; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
