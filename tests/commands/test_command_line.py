"""How commands read their lines and end: options by a function's parameters, mistakes in one line, one status for each end."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import pytest

from cbatch import ConfigError
from cbatch.validation import whole
from experiments import plot, replay
from experiments import run as hydra_run
from experiments.bench import __main__ as bench
from experiments.check import __main__ as check
from experiments.profile import __main__ as profile
from experiments.settings.command_line import Count, keyword_arguments, run

COMMANDS: list[Callable[[list[str]], int]] = [bench.main, check.main, plot.main, profile.main, replay.main]


@pytest.mark.parametrize("main", [*COMMANDS, hydra_run.main])
def test_a_reader_that_has_ended_is_no_error(
    main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `python -m experiments.run --help | head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        monkeypatch.setattr(sys, "argv", ["run", "--help"])
        assert (main() if main is hydra_run.main else main(["--help"])) == 141
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("path", "it: option 'path' is not of the form key=value; see --help"),
        ("bathces=1", "it: bathces: no such key; did you mean batches? known: batches, first, names, pairs, path, "),
        ("where=there", "it: where: no such key; "),
        ("=3", "it: : no such key; known: "),
        ("batches=1,two", "it: batches=two: give a whole number, at least 1"),
        ("batches=", "it: batches=: give a whole number, at least 1"),
        ("batches=1,0", "it: batches=0: give a whole number, at least 1"),
        ("batches=1.5", "it: batches=1.5: give a whole number, at least 1"),
        ("pairs=1", "it: pairs=1: give a whole number of pairs, at least 2"),
        ("ratio=half", "it: ratio=half: give a valid number"),
        ("first=0.5", "it: first=0.5: give a valid integer"),
        ("path=x path=y", "path: is given twice, as x and as y; give it once"),
        ("ratio=1", "it needs path=...; see the docstring of test_command_line"),
    ],
)
def test_mistakes_name_the_option_and_the_remedy(options: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keyword_arguments(MEASURE, options.split(), "it")
    assert str(caught.value).startswith(message)


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
    ],
)
def test_each_end_has_its_status(
    command: Callable[..., int | None], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, ["x"], lambda: "usage", interrupted="interrupted; all is lost") == status
    assert capsys.readouterr().err == said


def test_what_is_no_mistake_of_the_users_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda _: 1 // 0, ["x"], lambda: "usage")


def test_usage_is_printed_when_asked_for_and_when_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(AssertionError()), ["x", "-h"], lambda: "usage") == 0
    assert run(raising(AssertionError()), [], lambda: "usage") == 2
    assert capsys.readouterr() == ("usage\nusage\n", "")
    assert run(lambda: 3, [], lambda: "usage", bare=True) == 3


@pytest.mark.parametrize("main", COMMANDS)
def test_every_command_tells_its_usage(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("`python -m experiments.") and printed.count("\n") > 5


@pytest.mark.parametrize("main", COMMANDS)
def test_options_with_dashes_are_answered_in_one_line(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["host", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: --nonsense: no such option; give key=value, without dashes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "--nonsense: no such option; give key=value, without dashes"),
        (["chunk=3", "--batch=3"], "--batch=3: no such option; give key=value, without dashes"),
        (["-m", "-z", "chunk=3,4"], "-z: no such option; "),
        (["--config-name"], "--config-name/-cn: expected one argument; see --hydra-help"),
        (["--con"], "ambiguous option: --con could match --config-path, --config-name, --config-dir; see --hydra-help"),
        (
            ["-cp", "nowhere"],
            "--config-path=nowhere: settings begin with conf/config.yaml; add files of your own with --config-dir",
        ),
        (["-m", "--config-name=mine"], "--config-name=mine: settings begin with conf/config.yaml; "),
        (["--config-dir=nowhere", "chunk=3"], "--config-dir=nowhere: no such folder; "),
        (["--cfg", "jobs"], "--cfg/-c: invalid choice: 'jobs' (choose from "),
        (
            ["chunk=3", "--resolve", "policy=orca"],
            "policy=orca: separated from the other keys by an option; give options with dashes first",
        ),
        (["~policy"], "~policy: removes a key that every run needs; leave it out, or give policy=..."),
        (
            ["policy=[orca,sarathi]"],
            "policy=[orca,sarathi]: give one policy; or several for a sweep, without brackets and with -m",
        ),
        (
            ["chunking=[fixed]"],
            "chunking=[fixed]: give one chunking; or several for a sweep, without brackets and with -m",
        ),
        (["batch=1,2", "-m", "~policy"], "~policy: removes a key that every run needs; "),
        (["-m", "~chunking=tile_aligned", "batch=1,2"], "~chunking=tile_aligned: removes a key that every run needs; "),
    ],
)
def test_hydras_options_are_checked_in_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    assert hydra_run.main() == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_an_unknown_key_of_a_file_of_ones_own_is_told_with_its_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "with a space" / "workload"
    folder.mkdir(parents=True)
    (folder / "bursts.yaml").write_text("_target_: bursts.Bursts\nsize: 8\n")
    monkeypatch.setattr(sys, "argv", ["run", f"--config-dir={folder.parent}", "workload=bursts", "workload.sise=3"])
    assert hydra_run.main() == 2
    assert (
        capsys.readouterr().err
        == "error: workload.sise: no such key of workload=bursts; did you mean size? known: size\n"
    )


def test_an_unknown_benchmark_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["hots"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: benchmark hots: no such benchmark; did you mean host? known: ")
    assert error.count("\n") == 1
