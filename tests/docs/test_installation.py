"""What `pip install .` and `pip install -e .` leave: commands that work in any folder, and types that a stranger's mypy sees."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import PATIENCE, QUICK, ROOT, summary

PACKAGES = ("cbatch", "experiments", "policies")

POLICY = """
from cbatch import Plan, View

class First:
    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add(view.waiting[0].id)
        return plan
"""


def python(*arguments: str, cwd: Path, **variables: str) -> str:
    """Runs Python in a folder; returns what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the source, and the wheels that pip builds of it, without a network."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools import build_meta as it; it.build_wheel('../wheel'); it.build_editable('../editable')"
    for kind in ("wheel", "editable"):
        (folder / kind).mkdir()
    said = python("-c", build, cwd=source)
    assert len(list(folder.glob("*/*.whl"))) == 2, said
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    (wheel,) = built.glob("wheel/*.whl")
    site = built / "site"
    said = python("-m", "pip", "install", "-q", "--no-index", "--no-deps", f"--target={site}", str(wheel), cwd=built)
    assert {path.name for path in site.glob("*") if path.suffix != ".dist-info"} == {*PACKAGES}, said
    return site


def imported() -> set[str]:
    """The packages that the three import, anywhere.

    Triton and attention kernels come with a GPU's PyTorch and `.[gpu]`, tokenizers with transformers; vLLM is the one that
    loads cbatch.vllm.
    """
    found: set[str] = set()
    for file in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - {*sys.stdlib_module_names, *PACKAGES, "triton", "flash_attn", "tokenizers", "vllm"}


def test_every_package_that_is_imported_is_installed_by_pip() -> None:
    """Or by the extra of the one command that imports it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["arena"]]
    names = {re.split(r"[<>=]", need)[0].lower() for need in needs}
    distribution = {"hydra": "hydra-core", "yaml": "pyyaml", "pydantic_core": "pydantic"}
    assert {distribution.get(name, name) for name in imported()} <= names


def test_an_installed_command_runs_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = "import cbatch, experiments, policies; print(cbatch.__file__, experiments.__file__, policies.__file__)"
    said = python("-c", where, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.split() == [str(installed / package / "__init__.py") for package in PACKAGES]
    arguments = ("-m", "experiments.run", "policy=orca", "backend=sim", "output=run", *QUICK)
    said = python(*arguments, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.endswith("results: run\n"), said
    assert summary(tmp_path / "run")["about"]["requests"] == 20


def test_every_file_of_settings_and_data_is_installed(installed: Path) -> None:
    files = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.*")}
    files |= {
        Path("experiments") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")
    }  # through the link
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert Path("experiments/conf/config.yaml") in data and Path("cbatch/sim/profiles/h200.json") in data
    assert {path for path in data if not (installed / path).is_file()} == set()


def test_mypy_sees_the_types_of_an_installed_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(POLICY)
    arguments = ("-m", "mypy", "--strict", f"--cache-dir={tmp_path / 'cache'}", "first.py")
    said = python(*arguments, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.splitlines()[:-1] == [
        'first.py:7: error: Argument 1 to "add" of "PlanBuilder" has incompatible type "int"; expected "Request"  [arg-type]',
        'first.py:8: error: Incompatible return value type (got "PlanBuilder", expected "Plan")  [return-value]',
    ]


def test_an_editable_install_is_a_path_which_mypy_follows(built: Path) -> None:
    """Not an import hook, which is setuptools' other way and which no type checker runs."""
    (wheel,) = built.glob("editable/*.whl")
    with ZipFile(wheel) as files:
        assert [name for name in files.namelist() if ".dist-info/" not in name] == ["__editable__.cbatch-0.1.0.pth"]
        assert files.read("__editable__.cbatch-0.1.0.pth").decode().split() == [str(built / "source")]
    assert all((built / "source" / package / "py.typed").is_file() for package in PACKAGES)
