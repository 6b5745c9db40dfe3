"""Reads and writes profile files: the fields of `Profile` and its parts are the keys of a JSON object.

An object in the file may state its origin as "from": see `cbatch.sim.provenance`.
"""

import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cbatch.errors import ConfigError, ProfileError
from cbatch.sim.profile import Profile
from cbatch.sim.provenance import put_origins, take_origins
from cbatch.validation import nearest, read

PROFILES = Path(__file__).parent / "profiles"


def profile_names() -> list[str]:
    """Returns the names of the profiles in the package."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """Loads a profile by name or from a file.

    Raises ProfileError: there is no such profile, or a value is missing, unknown, negative or non-finite; the message names file and key.
    """
    path = PROFILES / f"{name_or_path}.json"
    if not path.is_file():
        path = Path(name_or_path)
        if not path.is_file():
            if path.suffix == ".json":
                raise ProfileError(f"hardware={name_or_path}: no such file; give the path of a profile, or a name")
            problem, known = "no such profile", nearest(name_or_path, profile_names())
            measured = "the file that python -m experiments.profile measures"
            raise ProfileError(f"hardware={name_or_path}: {problem}; {known}, or {measured}")
    return read_profile(path)


def read_profile(path: Path) -> Profile:
    """Reads a profile from a file. Raises like `load_profile`."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: cannot read the profile: {error}") from error
    try:
        return make_profile(data)
    except ConfigError as refusal:
        raise ProfileError(f"{path}: {refusal}; measure the profile again or correct the file") from None


def make_profile(data: Any) -> Profile:
    """Makes a profile from a file's content. Raises ConfigError, which names the key."""
    origins = take_origins(data)
    return read(Profile, {**data, "origins": origins} if isinstance(data, dict) else data)


def profile_content(profile: Profile) -> dict[str, Any]:
    """Returns the content of a profile's file."""
    content = TypeAdapter(Profile).dump_python(profile, mode="json", exclude_defaults=True)
    return dict(put_origins(content, profile.origins))


def profile_text(profile: Profile) -> str:
    """Returns the text of a profile's file: indented, but each list of numbers on one line."""
    text = json.dumps(profile_content(profile), indent=1)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text) + "\n"
