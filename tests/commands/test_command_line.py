"""How commands read their lines and end: options by a function's parameters, mistakes in one line, one status for each end."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest
from commands import QUICK, environment, sigint_not_ignored

from cbatch import ConfigError
from cbatch.validation import whole
from experiments import plot
from experiments import run as hydra_run
from experiments.cli import COMMANDS
from experiments.settings.command_line import Count, keyword_arguments, run


@pytest.mark.parametrize(("main", "words"), [(plot.main, ["--help"]), (hydra_run.main, ["--cfg", "job"])])
def test_a_reader_that_has_ended_is_no_error(
    main: Callable[..., int], words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `python -m experiments.run --cfg job | head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "argv", ["run", *words])
        assert main(words) == 141
    assert capsys.readouterr().err == ""


def measure(
    where: str,
    path: str,
    batches: tuple[Count, ...] = (1, 2),
    pairs: Annotated[int, whole(2, unit="number of pairs")] = 2,
    ratio: float = 0.5,
    first: int = 0,
    names: tuple[str, ...] = (),
    tables: str | None = None,
) -> None:
    """A command's function; `where` is bound, so it cannot be given as an option."""


MEASURE = partial(measure, "here")


def test_options_have_the_types_of_parameters() -> None:
    options = ["path=a=b", "batches=4,8", "pairs=3", "ratio=2", "first=-1", "names=x,y", "tables=t"]
    assert keyword_arguments(MEASURE, options, "it") == {
        "path": "a=b",
        "batches": (4, 8),
        "pairs": 3,
        "ratio": 2.0,
        "first": -1,
        "names": ("x", "y"),
        "tables": "t",
    }
    assert keyword_arguments(MEASURE, ["path="], "it") == {"path": ""}


def raising(error: BaseException) -> Callable[..., int]:
    def command(*arguments: str) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (lambda *arguments: None, 0, ""),
        (lambda *arguments: len(arguments), 1, ""),
        (raising(ConfigError("chunk=0: give\n   more")), 2, "error: chunk=0: give more\n"),
        (
            raising(FileNotFoundError(2, "No such file", "x")),
            2,
            "error: x: No such file; run where it can be read and written\n",
        ),
        (raising(KeyboardInterrupt()), 130, "\ninterrupted; all is lost\n"),
        (raising(KeyboardInterrupt("policy X")), 130, "\ninterrupted in policy X; all is lost\n"),
    ],
)
def test_each_end_has_its_status(
    command: Callable[..., int | None], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, ["x"], lambda: "usage", resume_hint="all is lost") == status
    assert capsys.readouterr().err == said


def test_what_is_no_mistake_of_the_users_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 // 0, ["x"], lambda: "usage")


def test_usage_is_printed_when_asked_for_and_when_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(AssertionError()), ["x", "-h"], lambda: "usage") == 0
    assert run(raising(AssertionError()), [], lambda: "usage") == 2
    assert capsys.readouterr() == ("usage\nusage\n", "")
    assert run(lambda: 3, [], lambda: "usage", bare=True) == 3


ENDS = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="there, no process can send itself Ctrl-C")
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_modules_load_prints_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text(ENDS)  # is in the way of the module that every command loads
    with sigint_not_ignored():
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m experiments.{name}; echo $?"],
            cwd=tmp_path,
            env=environment(),
            text=True,
            capture_output=True,
        )
    assert (done.stdout, done.stderr) == ("130\n", "")


CLI = ["-Pc", "import sys; sys.argv[0] = 'cbatch'; from experiments.cli import main; sys.exit(main())"]
"""The console script, which Python starts without the current folder in its path."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "package", "words", "status", "said"),
    [
        (["-m", "experiments.run"], "policies", ["policy=orca"], 0, ""),
        (["-m", "experiments.run"], "policies", ["policy=policies.mine.Mine"], 2, "give your folder policies/ another"),
        ([*CLI, "run"], "experiments", ["policy=mine.Mine"], 0, ""),
        ([*CLI, "rum"], "experiments", [], 2, "error: rum: no such command; did you mean run? "),
        ([*CLI, "--help"], "experiments", [], 0, ""),
    ],
)
def test_folders_of_a_user_do_not_replace_ours(
    start: list[str], package: str, words: list[str], status: int, said: str, tmp_path: Path
) -> None:
    """The likeliest names of a project's folders; a module beside them is found."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / "mine.py").write_text("from policies.orca import Orca\n\nclass Mine(Orca):\n    pass\n")
    settings = [*words, "backend=sim", *QUICK] if words else []
    done = subprocess.run(
        [sys.executable, *start, *settings], cwd=tmp_path, env=environment(), text=True, capture_output=True
    )
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (status, True, bool(status)), done.stderr
