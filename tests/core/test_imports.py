"""What imports what: no arrow runs upwards, and nothing that is installed imports the evidence."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

BANNED = {
    "cbatch": ("policies", "experiments", "reproduction", "hydra", "omegaconf", "pandas"),
    "policies": ("experiments", "reproduction", "hydra", "omegaconf", "pandas", "torch"),
    "experiments": ("reproduction",),
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("package", BANNED)
def test_nothing_is_imported_from_above(package: str) -> None:
    arrows = [(path, name) for path in (ROOT / package).rglob("*.py") for name in imported(path)]
    upwards = [(path, name) for path, name in arrows if name.partition(".")[0] in BANNED[package]]
    assert arrows and upwards == []
