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
        ProfileError: no known kind, or a damaged table. The message names folder or file.
    """
    for kind in _KINDS:
        if kind.recognises(folder):
            profile: Profile = kind.convert(folder, specs)
            return profile
    layouts = "; ".join(kind.LAYOUT for kind in _KINDS)
    raise ProfileError(f"{folder}: no tables known here; give the folder of one device: {layouts}")
