"""Profiles from published measurements of other projects, read from a folder given by the user."""

from pathlib import Path

from cbatch.errors import ProfileError
from cbatch.sim.importers import aiconfigurator, llmservingsim, vidur
from cbatch.sim.profile import Profile

_KINDS = (vidur, aiconfigurator, llmservingsim)


def read_folder(folder: Path) -> Profile:
    """Reads a folder of published tables, whose kind is recognised by its files.

    Raises:
        ProfileError: no known kind, or a damaged table. The message names folder or file.
    """
    for kind in _KINDS:
        if kind.recognises(folder):
            profile: Profile = kind.read(folder)
            return profile
    layouts = "; ".join(kind.LAYOUT for kind in _KINDS)
    raise ProfileError(f"hardware={folder}: no tables known here; give the folder of one device: {layouts}")
