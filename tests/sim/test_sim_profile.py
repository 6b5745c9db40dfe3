"""Profile files: found, read, written, and refused with the file and key named."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cbatch import BatchShape
from cbatch.errors import ProfileError
from cbatch.model import ModelSpec
from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import PROFILES, load_profile, profile_content, profile_names, profile_text, read_profile

TABLE = "models/llama-3.1-8b/tensor_parallel/1"
MISSING = "MISSING"
DAMAGED = yaml.safe_load(Path(__file__).with_name("damaged.yaml").read_text())


def changed(where: str, value: object) -> Any:
    """The content of the H200's file with another value at one place."""
    node = data = json.loads((PROFILES / "h200.json").read_text())
    *path, last = where.split("/")
    for key in path:
        node = node.setdefault(key, {})
    if value == MISSING:
        del node[last]
    else:
        node[last] = value
    return data


def write(folder: Path, data: Any) -> Path:
    (path := folder / "mine.json").write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_found_by_name_and_path_and_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    profile, path = load_profile(name), PROFILES / f"{name}.json"
    assert profile.name == name
    assert profile_content(profile) == json.loads(path.read_text())
    assert profile_text(profile) == path.read_text()
    assert load_profile(str(write(tmp_path, profile_content(profile)))) == profile


def test_an_unknown_profile_is_answered_with_the_nearest(tmp_path: Path) -> None:
    for name, says in (
        ("h20", r"hardware=h20: no such profile; did you mean h200\?"),
        (str(tmp_path), "no such profile"),
    ):
        with pytest.raises(ProfileError, match=says):
            load_profile(name)


def test_every_table_of_a_model_is_read(tmp_path: Path) -> None:
    tables = {
        "linear": {"tokens": [1, 2], "seconds": [4.0, 6.0], "from": "a remark"},
        "other": {"tokens": [1], "seconds": [0.5]},
        "embedding": {"tokens": [1], "seconds": [0.0]},
        "head": {"requests": [1], "seconds": [0.25]},
        "chunks": {"sizes": [1, 2], "contexts": [0, 10], "seconds": [[1.0, 2.0], [2.0, None]]},
        "decodes": {"sizes": [1], "contexts": [10, 20], "seconds": [[4.0, 8.0]]},
    }
    data = changed("models", {"m": {"num_layers": 2, "tensor_parallel": {"1": tables}}})
    cost = ProfileCost(read_profile(write(tmp_path, data)), ModelSpec("m", "llama", 2, 64, 4, 4, 16, 128, 100, 64))
    assert cost.estimated == ()
    parts = cost.parts(BatchShape(((1, 10),), 1, 15))
    assert parts == (6.0, 2.0 + 6.0, 0.25 * 2, 1.0, 0.0)  # the head in proportion, as it was measured at one request


@pytest.mark.parametrize(("where", "value", "says"), DAMAGED)
def test_a_damaged_profile_names_file_and_key(tmp_path: Path, where: str, value: object, says: str) -> None:
    path = write(tmp_path, changed(where.replace("TABLE", TABLE), value))
    with pytest.raises(ProfileError) as caught:
        load_profile(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and says in message and "\n" not in message


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"{", "cannot read the profile"), (b"[]", "Input should be a dictionary"), (b"\xff", "cannot read")],
)
def test_a_file_that_is_no_profile_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (path := tmp_path / "broken.json").write_bytes(content)
    with pytest.raises(ProfileError, match=rf"broken.json: .*{says}"):
        load_profile(str(path))


@pytest.mark.parametrize(("batches", "ends"), [([48], (48, 48)), ([64, 16, 128], (16, 128)), (MISSING, ())])
def test_a_profile_states_the_smallest_and_the_largest_batch_that_was_compared(
    batches: object, ends: tuple[int, ...], tmp_path: Path
) -> None:
    """In a file by hand, too, in any order, or not at all."""
    path = write(tmp_path, changed("compared/async/batches", batches))
    assert load_profile(str(path)).compared["async"].batches == ends
