"""The framework's own errors, also in place of those of a user's policy. Each message is one line that names the cause and the remedy."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any


class CbatchError(Exception):
    """Base of every error that a user can cause. A command prints only the message and exits with a non-zero status."""


class Interruption(BaseException):
    """Run interrupted externally (SIGTERM); always re-raised."""


class ConfigError(CbatchError):
    """A setting is unknown, out of range, or conflicts with another setting."""


class TooLongError(ConfigError):
    """A policy adds more tokens of a request at once than an iteration can hold. request: a `cbatch.Request`."""

    def __init__(self, request: Any, problem: str) -> None:
        super().__init__(f"request {request.id}: {problem}")
        self.request = request


class WorkloadError(CbatchError):
    """A workload or a trace cannot be used: the message names the file and line, or the request."""


class PlanError(CbatchError):
    """A policy returned an illegal plan: the message names the policy, iteration, rule and request."""


class OverCommitError(PlanError):
    """A plan takes more KV blocks than are free."""


class PolicyError(CbatchError):
    """The policy raised an exception, or modified engine state."""


class StallError(PolicyError):
    """The policy makes no progress: its plan is empty with nothing to wait for, or `cbatch.stall.Patience` has ended."""


class ModelError(CbatchError):
    """A model cannot be built or loaded: the message names the preset, folder or file."""


class ProfileError(CbatchError):
    """A hardware profile is missing or malformed, or does not cover a query."""


class CapacityError(CbatchError):
    """Not enough memory: the message gives the memory needed by purpose, and the setting to lower."""


class ResultsError(CbatchError):
    """The results of a run cannot be written or read: the message names the folder or file."""


class ReplayError(CbatchError):
    """A recorded run cannot be replayed: the message names the file."""


def check_installed(extra: str, *packages: str) -> None:
    """Raises ConfigError if a package of one of the project's extras is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f'{package} is not installed; run pip install "cbatch[{extra}]"')


def type_and_message(error: BaseException) -> str:
    """Returns the type and the message of another library's exception, or of a user's, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def call(where: str | Callable[[], str], method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's method. An exception becomes a PolicyError that names a request among the arguments; a KeyboardInterrupt gets the place as its message.

    where: the start of the message, or a function that returns it and is called only after an error.
    """
    try:
        return method(*arguments)
    except PlanError as error:  # an illegal call of the plan builder
        raise PlanError(f"{_text(where)}, {error}{_line_in_policy(error)}") from error
    except (CbatchError, Interruption):
        raise
    except BaseException as error:
        called, line = f"{getattr(method, '__name__', type(method).__name__)}()", _line_in_policy(error)
        place = _text(where)
        of = [f", request {each.id}" for each in arguments if hasattr(each, "num_prompt_tokens")]  # a `cbatch.Request`
        place += "".join(of[:1]) if "request " not in place else ""
        if isinstance(error, KeyboardInterrupt):
            error.args = error.args or (f"{place}, {called}{line}",)  # of the innermost call
            raise
        problem = f"{called} raised {type(error).__name__}: {' '.join(str(error).split())}{line}"
        if str(error).startswith("'Request' object"):
            problem += "; a request takes no attributes of a policy: keep them in a dict by request.id"
        raise PolicyError(f"{place}: {problem}") from error


def _text(where: str | Callable[[], str]) -> str:
    return where if isinstance(where, str) else where()


def _line_in_policy(error: BaseException) -> str:
    """Returns " (file:line)" for the innermost line in the policy's file, the first file outside this package in the traceback.

    A module with `__tracebackhide__`, around a policy, counts as inside.
    """
    package = Path(__file__).parent
    frames = [(frame.f_globals, Path(frame.f_code.co_filename), line) for frame, line in walk_tb(error.__traceback__)]
    shown = [(path, line) for names, path, line in frames if "__tracebackhide__" not in names]
    outside = [(path, line) for path, line in shown if package not in path.parents]
    return next((f" ({path.name}:{line})" for path, line in reversed(outside) if path == outside[0][0]), "")
