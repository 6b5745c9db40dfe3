"""The notebooks run from top to bottom without a GPU, and are stored with their pictures and without a trace of a machine."""

import re
from pathlib import Path

import nbformat
import pytest
from commands import PATIENCE, ROOT, environment
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

LARGEST = 200_000  # bytes


def read(path: Path) -> NotebookNode:
    notebook: NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cells: list[NotebookNode]) -> int:
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)


def begin(folder: Path) -> NotebookNode:
    """A cell after which there are no names, in a folder."""
    return nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {folder}")  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.long
def test_the_notebooks_run(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """As stored: the same cells print, show a table or draw a picture, and none fails.

    One after another in one process, which imports everything once; each begins without names, in the notebooks' folder.
    """
    if not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes half a minute")
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    folder = NOTEBOOKS[0].parent
    notebooks = [read(path) for path in NOTEBOOKS]
    cells = [cell for notebook in notebooks for cell in (begin(folder), *notebook.cells)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    together = nbformat.v4.new_notebook(cells=cells, metadata=notebooks[0].metadata)  # type: ignore[no-untyped-call]
    NotebookClient(
        together,
        timeout=PATIENCE,
        startup_timeout=PATIENCE,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    for path, notebook in zip(NOTEBOOKS, notebooks, strict=True):
        ran, stored_cells = code_cells(notebook), code_cells(read(path))
        assert [cell.source for cell in ran if cell.execution_count is None] == [], path.stem
        for cell, stored in zip(ran, stored_cells, strict=True):
            shown = ([output for output in found.outputs if output.output_type != "stream"] for found in (cell, stored))
            kinds = [
                [output.output_type for output in outputs] for outputs in shown
            ]  # lines about left-out runs may differ
            assert kinds[0] == kinds[1], f"{path.stem}: {cell.source}"
        assert pictures(ran) == pictures(stored_cells), path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_only_what_a_wheel_holds(path: Path) -> None:
    """It runs policies through experiments.api: no commands, and no `reproduction`, which needs a clone."""
    source = "\n".join(cell.source for cell in code_cells(read(path)))
    assert not re.search(r"^\s*!", source, re.M)
    used = re.findall(r"^\s*(?:from|import) ((?:experiments|reproduction|tests)\S*)", source, re.M)
    assert "experiments.api" in used
    assert {*used} <= {"experiments.api", "experiments.workloads"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_executed(path: Path) -> None:
    """Its cells are numbered in order, it has a picture, and nothing names the machine on which it ran."""
    notebook = read(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert pictures(cells) >= 1
    assert path.stat().st_size < LARGEST
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert all(not cell.metadata for cell in notebook.cells)
    shown = re.sub(r'"image/png": "[^"]*"', "", path.read_text(encoding="utf-8"))
    assert not re.search(r"/(home|root|tmp|work|usr|Users|opt)/", shown)
