"""How commands read their arguments and exit: key=value options by a function's parameters, and one exit status per outcome.

Independent of any command. The settings of a run are read by Hydra instead: see `experiments.run`.
"""

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import TextIOWrapper
from threading import Thread
from typing import Annotated, Any

from cbatch import ConfigError
from cbatch.validation import check_known, nearest, parse, whole
from experiments.settings.error_lines import is_of_output, one_line, output_text, with_notes
from experiments.settings.overrides import check_given_once, with_search_path
from experiments.store.claim import TerminatedError

_SECONDS_BETWEEN_LOOKS = 0.2  # at the parent of a worker
HELP = frozenset({"-h", "--help"})
Count = Annotated[int, whole(1)]
Index = Annotated[int, whole(0)]


def run(
    command: Callable[..., int | None],
    arguments: Sequence[str],
    usage: Callable[[], str],
    *,
    bare: bool = False,
    composes: bool = False,
    resume_hint: str = "",
) -> int:
    """Runs a command; a user error becomes one line on stderr.

    Args:
        usage: printed for --help, and when there are no arguments unless the command works without (`bare`).
        composes: the command reads settings, with Hydra's --config-dir and options with arguments, if given.
        resume_hint: printed after Ctrl-C: what is left.

    Returns:
        The exit status: the command's own, or 0; 2 after a user error; 130 after Ctrl-C; 141 if the reader of its output has ended.
    """

    def read_and_run() -> int:
        if HELP & set(arguments) or not (arguments or bare):
            print(usage())
            return 0 if arguments else 2
        given = with_search_path(arguments) if composes else arguments
        for argument in given:
            if argument.startswith("-"):
                raise no_such_option(argument)
        if composes:
            check_given_once(given)
        return command(*given) or 0

    return exit_status(read_and_run, resume_hint)


def exit_status(command: Callable[[], int], resume_hint: str) -> int:
    """Runs a command; a user error becomes one line on stderr. Returns the exit status.

    130 after Ctrl-C, which is answered by the line of a policy that was running, and by `resume_hint` unless the error has notes;
    143 after SIGTERM where `sigterm_raises`.
    141, as after SIGPIPE, if the reader of its output has ended, as `head` does; 2 after a user error, and if the output cannot be
    written for another reason, such as a full disk. Otherwise the command's own.
    """
    print_any_text()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as set by `experiments`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            status = command()
        except KeyboardInterrupt as error:
            place = f" in {error}" if str(error) else ""
            left = getattr(error, "__notes__", ()) or filter(None, [resume_hint])
            print("; ".join([f"\ninterrupted{place}", *left]), file=sys.stderr)
            status = 130
        except TerminatedError as error:
            print(with_notes(error), file=sys.stderr)
            status = 143
        except Exception as error:
            if (message := one_line(error)) is None:
                raise
            print(f"error: {message}", file=sys.stderr)
            status = 2
        sys.stdout.flush()
        return status
    except OSError as error:
        if not is_of_output(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"error: {output_text(error)}", file=sys.stderr)
        return 2


def print_any_text() -> None:
    """Prints characters that the terminal's encoding lacks as escapes, such as \\xb1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@cache
def end_with_the_parent() -> None:
    """Sends SIGTERM to this worker, repeatedly, once its parent has ended: a parent that is killed cannot end its workers."""
    parent = os.getppid()

    def watch() -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=watch, daemon=True).start()


def list_names(names: Mapping[str, str]) -> str:
    """Returns names and descriptions, a line for each, for usages."""
    return "\n".join(f"  {name:18} {what}" for name, what in names.items())


def no_such_option(option: str) -> ConfigError:
    """Returns the error for an option with dashes; no command has any."""
    return ConfigError(f"{option}: no such option; give key=value, without dashes, or --help to see what there is")


def check_name(kind: str, name: str, known: Mapping[str, str]) -> None:
    """Raises ConfigError for an unknown name, with the nearest known one."""
    if name not in known:
        raise ConfigError(f"{kind} {name}: no such {kind}; {nearest(name, known)}")


def keyword_arguments(function: Callable[..., Any], options: Sequence[str], command: str) -> dict[str, Any]:
    """Reads key=value options as keyword arguments of a function, by the types of its parameters.

    function: its parameters have types that `cbatch.validation.parse` reads; those that are not options are bound
        beforehand by position (`functools.partial`). command: its name in messages.
    Raises ConfigError: not key=value, an unknown or missing key, or a value of another type.
    """
    parameters = inspect.signature(function, eval_str=True).parameters
    values = {}
    check_given_once(options)
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise ConfigError(f"{command}: option {option!r} is not of the form key=value; see --help")
        check_known([key], parameters, f"{command}: ")
        values[key] = parse(parameters[key].annotation, text, f"{command}: {key}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in values:
            raise ConfigError(f"{command} needs {key}=...; see --help")
    return values
