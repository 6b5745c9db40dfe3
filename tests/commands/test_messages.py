"""What a user may get wrong on a command line, the cases of `messages.txt`: one line that names it, status 2, nothing written."""

import shutil
from pathlib import Path

import pytest
from commands import command

HERE = Path(__file__).parent
CASES = [line.split(" | ") for line in (HERE / "messages.txt").read_text().splitlines() if not line.startswith("#")]


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


@pytest.mark.parametrize(("arguments", "named"), CASES, ids=[arguments for arguments, _ in CASES])
def test_a_mistake_is_one_line_that_names_it(arguments: str, named: str, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(HERE / "mistakes", folder)
    before = files_in(folder)
    ended = command(*arguments.split(), cwd=folder)
    assert ended.returncode == 2, ended
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ") and [word for word in named.split() if word not in line] == []
    new = {path.name for path in files_in(folder) - before}
    assert new == ({"config.yaml", "unfinished.json"} if "iteration" in named else set()), "of a run that began"


@pytest.mark.parametrize(
    "module", ["run", "check", "plot", "profile", "replay", "bench", "arena", "capacity", "compare"]
)
def test_every_command_tells_its_usage(module: str, tmp_path: Path) -> None:
    ended = command(module, "--help", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"python -m experiments.{module}" in ended.stdout and ended.stdout.count("\n") > 3
    assert module != "run" or ("\npolicy: " in ended.stdout and "chunk: 256" in ended.stdout)
    assert list(tmp_path.iterdir()) == []
