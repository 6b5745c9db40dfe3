"""What `pip install .` leaves: commands that work in any folder, with all that they read."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from commands import PATIENCE, QUICK, ROOT, summary
from packaging.requirements import Requirement
from test_imports import imported

from cbatch import __version__

PACKAGES = ("cbatch", "experiments", "policies")


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
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds that pip builds, without a network, of a copy of the source."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (folder / "wheel").mkdir()
    said = python("-c", "from setuptools import build_meta; build_meta.build_wheel('../wheel')", cwd=source)
    wheels = list(folder.glob("wheel/*.whl"))
    assert len(wheels) == 1, said
    with ZipFile(wheels[0]) as files:
        files.extractall(site := folder / "site")
    assert {path.name for path in site.glob("*") if path.suffix != ".dist-info"} == {*PACKAGES}
    return site


def third_parties() -> set[str]:
    """The packages that the three import, anywhere.

    Triton, attention kernels and pynvml come with a GPU's PyTorch and `.[gpu]`, tokenizers with transformers; vLLM is the one
    that loads cbatch.vllm.
    """
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    found = {name.partition(".")[0] for path in files for name in imported(path)}
    return found - {*sys.stdlib_module_names, *PACKAGES, "triton", "flash_attn", "pynvml", "tokenizers", "vllm"}


@pytest.mark.long
def test_every_package_that_is_imported_is_installed_by_pip() -> None:
    """Or by the extra of the one command that imports it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["real"], *extras["check"], *extras["server"]]
    names = {re.split(r"[<>=]", need)[0].lower() for need in needs}
    distribution = {"hydra": "hydra-core", "yaml": "pyyaml", "pydantic_core": "pydantic"}
    assert {distribution.get(name, name) for name in third_parties()} <= names


@pytest.mark.long
def test_the_version_is_the_same_everywhere(installed: Path) -> None:
    """The wheel, the citation and the changelog's newest finished section have the version of the package."""
    [metadata] = installed.glob("cbatch-*.dist-info/METADATA")
    assert f"\nVersion: {__version__}\n" in metadata.read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", __version__]


def test_pre_commit_runs_the_pinned_ruff() -> None:
    """Another version would format otherwise than `make lint` demands."""
    [pinned] = re.findall(r"^ruff==(\S+)$", (ROOT / "requirements.lock").read_text(), re.M)
    assert f"ruff-pre-commit\n    rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()


@pytest.fixture(scope="module")
def base(installed: Path) -> str:
    """A PYTHONPATH for `python -S` with what `pip install .` installs: the wheel, and its dependencies without any extra."""
    to_do = [
        Requirement(need) for need in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    site, seen = installed.parent / "base", set[str]()
    site.mkdir()
    while to_do:
        if (need := to_do.pop()).name in seen or not (need.marker is None or need.marker.evaluate({"extra": ""})):
            continue
        seen.add(need.name)
        distribution = metadata.distribution(need.name)
        to_do += map(Requirement, distribution.requires or ())
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."} - {"__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    return f"{installed}{os.pathsep}{site}"


IN_TURN = """
import contextlib, importlib.util, io, json, runpy, sys

*names, last = sys.argv[1:]
said = [(spec := importlib.util.find_spec(name)) and spec.origin for name in names]
for sys.argv in json.loads(last):
    with (
        contextlib.redirect_stdout(io.StringIO()) as text,
        contextlib.redirect_stderr(text),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_module(f"experiments.{sys.argv[0]}", run_name="__main__", alter_sys=True)
    said.append(text.getvalue())
print(json.dumps(said))
"""
"""Tells where the named modules are found, and what each of a list of commands prints."""


@pytest.mark.long
def test_simulation_needs_no_extra(base: str, installed: Path, tmp_path: Path) -> None:
    """In an empty folder runs, sweeps, plots, comparisons, capacities and replays work without torch, transformers and hypothesis."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    quick = " ".join(QUICK)
    small = "model=tiny workload.lengths={min_length:16,max_length:24,pd_ratio:10} slo.ttft=0.003 requests=100"
    search = f"policy=orca batch=2 workload=open_loop {small} replications=3 accuracy=0.9 cores=1 output=found"
    works = {
        f"run {quick} decisions=true output=run": "results: run",
        "replay run": "Sarathi makes the same 37 plans",
        f"run -m {quick} policy=orca,sarathi workload.pd_ratio=5,10 sweep=few": "results: multirun/few",
        "plot throughput_vs_pd multirun/few baseline=orca": "throughput_vs_pd,baseline=orca.png",
        f"compare orca sarathi {quick} batch=4 seeds=2": "preemptions",
        f"capacity {search}": "results: found",
        "profile show hardware=h200": "largest error:",
    }
    lacks = {
        "run backend=cpu": "torch[real]",
        "run model.path=.": "transformers[real]",
        "profile model=tiny": "torch[real]",
        "check policy=orca": "hypothesis[check]",
        "server": "prometheus_client[server]",
    }
    names = (*PACKAGES, "torch", "transformers", "hypothesis")
    commands = json.dumps([command.split() for command in (*works, *lacks)])
    printed = python("-S", "-W", "ignore", "-c", IN_TURN, *names, commands, cwd=tmp_path, PYTHONPATH=base)
    assert printed.startswith("["), printed
    said = json.loads(printed)
    found, done, refused = said[: len(names)], said[len(names) : -len(lacks)], said[-len(lacks) :]
    assert found == [*(str(installed / package / "__init__.py") for package in PACKAGES), None, None, None]
    for shown, text in zip(works.values(), done, strict=True):
        assert shown in text and "Error" not in text, text
    assert summary(tmp_path / "run")["about"]["requests"] == 20
    for missing, text in zip(lacks.values(), refused, strict=True):
        package, extra = missing.split("[")
        assert text == f'error: {package} is not installed; run pip install "cbatch[{extra}"\n'


@pytest.mark.long
def test_every_file_of_settings_and_data_is_installed(installed: Path) -> None:
    files = {path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.*")}
    files |= {
        Path("experiments") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")
    }  # through the link
    data = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert Path("experiments/conf/config.yaml") in data and Path("cbatch/sim/profiles/h200.json") in data
    assert {path for path in data if not (installed / path).is_file()} == set()
