"""The folder of a sweep, which one command claims, and the lines that the command prints at its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from cbatch import ConfigError
from experiments.report.text import count_text
from experiments.settings.compose import MULTIRUN
from experiments.store import claim
from experiments.store.run_folder import CONFIG, ERRORS, run_folders

_SWEEP = "sweep"  # the kind of a claimed folder


class FailedRunsError(ConfigError):
    """Raised at the end of a sweep some of whose runs failed."""


@contextmanager
def claimed_sweep(arguments: list[str]) -> Iterator[str]:
    """Claims a sweep's folder and yields its name; if the command line has none, adds one to it.

    The name is chosen before Hydra composes anything, so that an interrupted process can say how to resume.
    Raises ConfigError: a name that cannot be used; ClaimedError: another command runs this sweep.
    """
    name = _name_of_sweep(arguments)
    with ExitStack() as held:
        if name is None:
            name = held.enter_context(claim.new_run_folder(sweep_folder(f"{datetime.now():%Y-%m-%d_%H-%M-%S}"))).name
            arguments.append(f"sweep={name}")
        folder = sweep_folder(name)
        _check_apart(name)
        held.callback(claim.remove_empty, [folder])
        claim.check_writable(folder)
        held.enter_context(claim.claimed(folder, _SWEEP))
        _check_apart(name)  # a sweep in or around it may have begun just now
        try:
            yield name
        finally:
            left = {path.name for path in folder.iterdir()}
            if left <= {MULTIRUN, claim.UNFINISHED, claim.LOCK}:  # it ended before its first run
                (folder / MULTIRUN).unlink(missing_ok=True)


def _name_of_sweep(arguments: list[str]) -> str | None:
    """Returns the name that the command line gives to the sweep.

    Raises ConfigError: an empty name, several, or one of a folder that is not below multirun/.
    """
    given = next((argument for argument in arguments if argument.startswith("sweep=")), None)
    if given is None:
        return None
    text = given.removeprefix("sweep=")
    value = text.strip("'\"")
    if value in ("", "null") or "${" in value or ("," in value and value == text):
        raise ConfigError(f"{given}: is not a name; give one, without commas or ${{...}}")
    name = Path(value)
    if name.is_absolute() or not name.parts or ".." in name.parts:
        raise ConfigError(f"{given}: is not below multirun/, where sweeps are; give a name without .. or a leading /")
    return value


def _check_apart(sweep: str) -> None:
    """Checks that the folder of a sweep neither contains a run or another sweep nor lies in one: its table would show both.

    Raises ConfigError: the folder of a run or of another sweep; ClaimedError: the folder of a sweep that begins now.
    """
    own, *around = (sweep_folder(str(path)) for path in (Path(sweep), *Path(sweep).parents) if path.parts)
    unfinished = [path.parent for path in own.glob(f"*/**/{claim.UNFINISHED}")]
    inside = [folder for folder in unfinished if claim.read_state(folder).get("of") == _SWEEP]
    for folder in (*around, *inside):
        claim.check_free(folder)
    files = [folder / file for folder in around for file in (CONFIG, MULTIRUN)]
    files += [own / CONFIG, *own.glob(f"*/**/{MULTIRUN}")]
    if other := next(filter(Path.is_file, files), None):
        what = "run" if other.name == CONFIG else "sweep"
        raise ConfigError(f"sweep={sweep}: {other.parent} is the folder of a {what}; give another name")


def end_of_sweep(sweep: str, finished: Sequence[Path], table: Callable[[Path], str]) -> None:
    """Prints the table of the sweep's runs. Raises FailedRunsError if runs failed, ConfigError if there are none."""
    if finished:
        print(f"\n{table(sweep_folder(sweep))}\nresults: {sweep_folder(sweep)}")
    errors = sweep_folder(sweep) / ERRORS
    if not errors.exists():
        if finished:
            return
        problem = "the sweep has no runs; glob(...) chooses among the options of a group: list the values of other keys"
        raise ConfigError(problem)
    num_failed = len(errors.read_text(encoding="utf-8").splitlines())
    failed = f"{count_text(num_failed, 'run')} failed, see {errors}"
    raise FailedRunsError(f"{failed}; the same command with sweep={sweep} runs them again")


def table_of_sweep(folder: Path) -> str:
    """Returns the table of the sweep's runs, or the error of a file that was changed after its run."""
    from experiments.store.runs import drop_repeats, read_runs, run_table  # loads pandas

    try:
        return run_table(*drop_repeats(read_runs(folder)))
    except ConfigError as error:
        return str(error)


def sweep_folder(sweep: str) -> Path:
    """Returns the folder of a sweep by its name."""
    return Path(f"multirun/{sweep}")  # as conf/config.yaml puts it together


def how_to_resume(sweep: str, result: str, hint: str) -> str:
    """Returns what an interrupted sweep leaves. result: the file of a finished run. hint: `Command.resume_hint`."""
    num_finished = len(run_folders(sweep_folder(sweep), result))
    finished = f"runs finished: {num_finished}, in {sweep_folder(sweep)}" if num_finished else "no run finished"
    rest = "the others" if num_finished else "all of them"
    return f"{finished}{hint and ', ' + hint}; the same command with sweep={sweep} runs {rest}"
