"""What imports what: no arrow runs upwards, and nothing that is installed imports the evidence."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from places import ROOT

BANNED = {
    "cbatch": ("policies", "experiments", "reproduction", "hydra", "omegaconf", "pandas"),
    "policies": ("experiments", "reproduction", "hydra", "omegaconf", "pandas", "torch"),
    "experiments": ("reproduction",),
    "experiments/store": ("experiments.settings",),
}


def imported(path: Path, names: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Yields what a file imports, anywhere, if its text has one of the names: to parse the others would take half a second."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if any(name.rpartition(".")[2] in text for name in names) else ():
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", BANNED)
def test_nothing_is_imported_from_above(package: str) -> None:
    files, banned = [*(ROOT / package).rglob("*.py")], tuple(f"{name}." for name in BANNED[package])
    arrows = [(path, name) for path in files for name in imported(path, BANNED[package])]
    assert files and [arrow for arrow in arrows if f"{arrow[1]}.".startswith(banned)] == []


@pytest.mark.parametrize(
    ("program", "unused"),
    [
        ("import cbatch, policies.sarathi", {"pydantic", "experiments"}),
        (
            "import cbatch.sim, cbatch.cluster, cbatch.model.checkpoint; cbatch.sim.load_profile('h200')",
            {"torch", "pandas"},
        ),
    ],
)
def test_slow_modules_are_not_imported_where_they_are_not_needed(program: str, unused: set[str]) -> None:
    program = f"{program}; import sys; sys.exit(not {unused}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_no_policy_reads_the_true_length_of_an_output_but_predictors_that_stand_for_a_model() -> None:
    """A request does not show its length: it stands in the specification that the request was made from."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "policies").rglob("*.py")}
    readers = {name for name, text in sources.items() if re.search(r"spec_of|true_new_tokens|_spec\b", text)}
    assert readers == {"predictors.py"}


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_the_vllm_adapter_without_vllm_names_the_package_to_install() -> None:
    import_module("experiments.vllm")  # checks the CBATCH variable
    with pytest.raises(ModuleNotFoundError, match=r"vLLM is not installed; pip install vllm"):
        _ = import_module("cbatch.vllm").make_scheduler
