"""What a user may get wrong on a command line, the cases of `messages.txt`: one line that names it, status 2, nothing written."""

import re
import runpy
import shlex
import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
from commands import command
from hand_made import write_run

from cbatch import __version__
from experiments.check.search import tiny_scenarios
from experiments.keys import key_of

HERE = Path(__file__).parent
CASES = [line.split(" | ") for line in (HERE / "messages.txt").read_text().splitlines() if not line.startswith("#")]


def files_in(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


_GIVEN = re.compile(r"\b(?:give|add|set|use|choose) ((?:'[+\w@./]+=[^']+'|[+\w@./]+=[^\s,;]+)(?: [\w./]+=[^\s,;]+)*)")
_PLACEHOLDER = re.compile(r"=[A-Z]{3}|key=value|\.\.\.|my_module|=$")


def remedies(message: str, words: Sequence[str]) -> Iterator[list[str]]:
    """Yields the words of a command as each remedy of a message would have them, where the message spells the remedy out."""
    wrong, _, told = re.sub(r"^(bench|check|profile|CBATCH='[^']*'): ", "", message).partition(": ")
    key, equals, _ = wrong = wrong.rpartition(" ")[2].partition("=")
    for name in re.findall(
        r"[+\w./-]+(?=(?: or [\w./-]+)*\?)", told.partition("did you mean ")[2].partition("?")[0] + "?"
    ):
        whole = any(key_of(word).startswith(key) for word in words) and ("." in name or "no such key" in told)
        if equals or whole or message.startswith("plot"):
            old, better = "".join(wrong), f"{key}={name}" if equals else name
        else:
            old, better = key.rpartition(".")[2], name.rpartition(".")[2]  # of a section, or within a value
        yield [word.replace(old, better) for word in words]
    if added := re.search(r"\+([\w.]+)=\.\.\.", told):
        others = [word for word in words if key_of(word) != added[1]]
        yield [*others, next((f"+{word}" for word in words if key_of(word) == added[1]), f"+{added[1]}=1")]
    for text in _GIVEN.findall(message):
        if not _PLACEHOLDER.search(text):
            given = {key_of(part): part for part in shlex.split(text)}
            groups = [key.partition("@")[0] for key in given]
            yield [*(word for word in words if key_of(word) not in (*given, *groups)), *given.values()]


@pytest.mark.parametrize(("arguments", "named"), CASES, ids=[arguments for arguments, _ in CASES])
def test_a_mistake_is_one_line_that_names_it(
    arguments: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each remedy that the line spells out, as key=value or as another name, is followed: the same line does not come again."""
    few = lambda chunk: islice(tiny_scenarios(chunk), 0, None, 70)  # noqa: E731
    monkeypatch.setattr("experiments.check.search.tiny_scenarios", few)
    monkeypatch.setattr("experiments.progress._BETWEEN_LINES", 3600)  # however slow the machine is
    folder = tmp_path / "work"
    shutil.copytree(HERE / "mistakes", folder)
    before = files_in(folder)
    name, *words = arguments.split()
    ended = command(name, *words, cwd=folder)
    assert ended.returncode == 2, ended
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ") and [word for word in named.split() if word not in line] == []
    new = {path.name for path in files_in(folder) - before}
    assert new == ({"config.yaml", "unfinished.json"} if "iteration" in named else set()), "of a run that began"
    for better in remedies(line.removeprefix("error: "), words):
        assert better != words, line
        assert command(name, *better, cwd=folder).stderr != ended.stderr, better


@pytest.mark.parametrize(
    "module", ["check", "plot", "profile", "replay", "bench", "compare", "run", "arena", "capacity", "vllm"]
)
def test_every_command_tells_its_usage(module: str, tmp_path: Path) -> None:
    ended = command(module, "--help", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"python -m experiments.{module}" in ended.stdout and ended.stdout.count("\n") > 3
    assert module != "run" or ("\npolicy: " in ended.stdout and "chunk: 256" in ended.stdout)
    assert "\nslo:" not in ended.stdout or module in ("arena", "capacity"), "a group that a run does not take"
    own = re.findall(rf"^(\w+): .*# of {module} alone$", ended.stdout, re.MULTILINE)
    assert module != "capacity" or {"attainment", "accuracy", "cores"} <= {*own}
    assert not own or not {"batch", "policy", "chunk"} & {*own}
    assert list(tmp_path.iterdir()) == []


def test_the_variable_for_vllm_is_checked_without_vllm_and_records_nothing(tmp_path: Path) -> None:
    own = "class Own(Orca):\n    def __init__(self, budget=1):\n        self.kept = budget\n"
    (tmp_path / "own.py").write_text(f"from policies.orca import Orca\n{own}")
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "named.yaml").write_text("_target_: own.Own\nbudget: ${chunk}\n")
    for policy, said in (
        ("policy=orca", "orca, batch=4"),
        ("policy=own.Own +policy.budget=2048", "Own(budget=2048), batch=4"),
        ("--config-dir=conf policy=named chunk=512", "Own(budget=512), batch=4"),
    ):
        given = command("vllm", f"{policy} batch=4 vllm.record=kept", cwd=tmp_path)
        assert given.returncode == 0 and said in given.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "conf", "__pycache__"}


def test_the_list_of_commands_and_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for argument, lines in (("--version", f"cbatch {__version__}"), ("--help", "  run        serve a workload")):
        monkeypatch.setattr("sys.argv", ["-m", argument])
        assert runpy.run_module("experiments")["main"]() == 0
        assert any(line.startswith(lines) for line in capsys.readouterr().out.splitlines())


@pytest.mark.long
def test_a_plot_that_cannot_be_written_names_its_file_and_a_remedy(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "plots" / "latency_cdf.pdf").mkdir(parents=True)
    ended = command("plot", "latency_cdf", "run", cwd=tmp_path)
    problem = "run/plots/latency_cdf.pdf: Is a directory; give output=FILE in another folder"
    assert (ended.returncode, ended.stderr) == (2, f"error: {problem}\n")
