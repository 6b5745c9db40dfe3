"""Converts published measurements of other projects to profiles of `cbatch.sim`."""

from collections.abc import Sequence
from pathlib import Path

from cbatch import ModelSpec
from cbatch.errors import ProfileError
from cbatch.sim import Profile
from reproduction.profiles import aiconfigurator, llmservingsim, vidur

_KINDS = (vidur, aiconfigurator, llmservingsim)


def convert(folder: Path, specs: Sequence[ModelSpec]) -> Profile:
    """Returns the profile of a folder of published tables, whose kind is recognised by its files, for these models.

    Raises:
        ProfileError: no known kind, no table of a model, or a damaged table. The message names folder or file.
    """
    for kind in _KINDS:
        if kind.recognises(folder):
            profile: Profile = kind.convert(folder, specs)
            if missing := [spec.name for spec in specs if spec.name not in profile.models]:
                problem = f"has no table of model={','.join(missing)}, whose times would be estimates"
                raise ProfileError(f"{folder}: {problem}; leave it out, or give the folder of its tables")
            return profile
    layouts = "; ".join(kind.LAYOUT for kind in _KINDS)
    raise ProfileError(f"{folder}: no tables known here; give the folder of one device: {layouts}")
