"""Calls the methods of a user's policy, router or eviction. Exceptions and Ctrl-C become one line that names file and line."""

from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import Any

from cbatch.errors import CbatchError, Interruption, PlanError, PolicyError


def call(where: str | Callable[[], str], method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's method. An exception becomes a PolicyError; a KeyboardInterrupt gets the place as its message.

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
        if isinstance(error, KeyboardInterrupt):
            error.args = error.args or (f"{_text(where)}, {called}{line}",)  # of the innermost call
            raise
        problem = f"{called} raised {type(error).__name__}: {error}{line}"
        if str(error).startswith("'Request' object"):
            problem += "; a request takes no attributes of a policy: keep them in a dict by request.id"
        raise PolicyError(f"{_text(where)}: {problem}") from error


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
