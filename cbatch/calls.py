"""Calls the methods of a user's policy, router or eviction: an exception becomes one line that names file and line."""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

from cbatch.errors import CbatchError, Interruption, PlanError, PolicyError


def call(where: str | Callable[[], str], method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's method; an exception in it becomes a PolicyError.

    where: the beginning of the message, or a function that returns it and is called only for an error.
    """
    try:
        return method(*arguments)
    except PlanError as error:  # a call of the plan builder that no plan may contain
        raise PlanError(f"{_text(where)}, {error}{_line_in_policy(error)}") from error
    except (CbatchError, Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        name = getattr(method, "__name__", type(method).__name__)
        problem = f"{name}() raised {type(error).__name__}: {error}{_line_in_policy(error)}"
        if str(error).startswith("'Request' object"):
            problem += "; a request takes no attributes of a policy: keep them in a dict by request.id"
        raise PolicyError(f"{_text(where)}: {problem}") from error


def _text(where: str | Callable[[], str]) -> str:
    return where if isinstance(where, str) else where()


def _line_in_policy(error: BaseException) -> str:
    """Returns " (file:line)" of the first line outside this package, whose own wrappers may call the policy."""
    package = Path(__file__).parent
    frames = ((Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__))
    return next((f" ({path.name}:{line})" for path, line in frames if package not in path.parents), "")
