"""Results in one JSON file beside the settings that made them: a capacity, a cell of the arena."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from experiments.store.provenance import write_json
from experiments.store.runs import Run
from experiments.store.text import flat


class ResultFile(NamedTuple):
    """name: of the file. parts: keys that a whole one has."""

    name: str
    parts: frozenset[str]

    def write(self, folder: Path, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Writes the file atomically; its presence means that the result is complete."""
        write_json(folder / self.name, {**summary, "settings": dict(settings)})

    def read(self, folder: Path) -> dict[str, Any] | None:
        """The result in a folder; None if it holds none."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((folder / self.name).read_text(encoding="utf-8"))
            return found if {"about", "settings", *self.parts} <= found.keys() else None
        return None

    def read_finished(self, folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the result in a folder, if it has this identity."""
        result = self.read(folder)
        return result if result and result["about"].get("identity") == identity else None

    def folders(self, root: Path) -> list[Path]:
        """The folders of finished results in and below a folder."""
        return sorted(path.parent for path in root.rglob(self.name) if self.read(path.parent) is not None)

    def runs(self, root: Path) -> list[Run]:
        """The same results, to be labelled as runs are."""
        found = ((folder, self.read(folder)) for folder in self.folders(root))
        return [Run(folder, dict(flat(result["settings"])), result) for folder, result in found if result is not None]
