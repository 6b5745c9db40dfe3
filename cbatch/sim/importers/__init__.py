"""Profiles from published measurements of other projects, read from a folder given by the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cbatch.errors import ProfileError
from cbatch.sim.importers import aiconfigurator, llmservingsim, vidur
from cbatch.sim.profile import Profile

_KINDS: list[tuple[Callable[[Path], bool], Callable[[Path], Profile], str]] = [
    (kind.recognises, kind.read, kind.LAYOUT) for kind in (vidur, aiconfigurator, llmservingsim)
]


def read_folder(folder: Path) -> Profile:
    """Read a folder of published tables, whose kind is recognised by its files.

    Raises:
        ProfileError: no known kind, or a damaged table. The message names folder or file.
    """
    for recognises, read, _ in _KINDS:
        if recognises(folder):
            return read(folder)
    layouts = "; ".join(layout for _, _, layout in _KINDS)
    raise ProfileError(f"hardware={folder}: no tables known here; give the folder of one device: {layouts}")
