"""Calls a policy's methods: optional ones may be missing, and an exception becomes an error that names the policy."""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

from cbatch.errors import CbatchError, Interruption, PlanError, PolicyError
from cbatch.limits import Limits
from cbatch.policy import Policy, is_steady


def check_policy(policy: Policy, limits: Limits) -> None:
    """Call the policy's `check`, if defined; raises its ConfigError, or PolicyError if it raises anything else.

    PolicyError also if it does not say properly whether it is steady.
    """
    where = f"policy {type(policy).__name__}"
    call(where, is_steady, policy)
    call(where, optional_method(policy, "check"), limits)


def optional_method(policy: Policy, name: str) -> Callable[[Any], Any]:
    """Returns an optional method of the policy, or `ignore`; raises PolicyError if it cannot be read or called."""
    where = f"policy {type(policy).__name__}"
    try:
        found = getattr(policy, name, ignore)
    except (Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PolicyError(f"{where}: reading {name} raised {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PolicyError(f"{where}: {name} is a {type(found).__name__}; make it a method, or call it something else")
    return found


def call(where: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a user's method; an exception in it becomes a PolicyError that begins with `where`."""
    try:
        return method(*arguments)
    except (CbatchError, Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise policy_raised(where, method, error) from error


def call_at(where: Callable[[], str], method: Callable[[Any], Any], argument: Any) -> Any:
    """The same in the middle of a run; `where` is asked only for an error, which a call of the plan builder may be, too."""
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


def ignore(_: Any) -> None:
    """Stands in for an optional method that a policy does not define."""
