"""Calls the methods of a user's policy, router or eviction: an exception becomes one line that names file and line."""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

from cbatch.errors import CbatchError, Interruption, PlanError, PolicyError


def call(where: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's method; an exception in it becomes a PolicyError that begins with `where`."""
    try:
        return method(*arguments)
    except (CbatchError, Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise policy_raised(where, method, error) from error


def call_at(where: Callable[[], str], method: Callable[[Any], Any], argument: Any) -> Any:
    """Calls a user's method in the middle of a run. where: called only for an error."""
    try:
        return method(argument)
    except PlanError as error:  # a call of the plan builder that no plan may contain
        raise PlanError(f"{where()}, {error}{line_in_policy(error)}") from error
    except (CbatchError, Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise policy_raised(where(), method, error) from error


def policy_raised(where: str, method: Callable[..., Any], error: BaseException) -> PolicyError:
    """Returns the error to raise for an exception in a method of the policy."""
    name = getattr(method, "__name__", type(method).__name__)
    return PolicyError(f"{where}: {name}() raised {type(error).__name__}: {error}{line_in_policy(error)}")


def line_in_policy(error: BaseException) -> str:
    """Returns " (file:line)" of the first line outside this package, whose own wrappers may call the policy."""
    package = Path(__file__).parent
    frames = ((Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__))
    return next((f" ({path.name}:{line})" for path, line in frames if package not in path.parents), "")
