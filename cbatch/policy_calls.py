"""Calls a policy's methods: optional ones may be missing, and an exception becomes an error that names the policy."""

from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

from cbatch.errors import CbatchError, Interruption, PolicyError
from cbatch.limits import Limits
from cbatch.policy import Policy


def check_policy(policy: Policy, limits: Limits) -> None:
    """Call the policy's `check`, if defined; raises its ConfigError, or PolicyError if it raises anything else."""
    call(f"policy {type(policy).__name__}", optional_method(policy, "check"), limits)


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


def policy_raised(where: str, method: Callable[..., Any], error: BaseException) -> PolicyError:
    """Names the line in the policy: the first one outside this package, since our own wrappers may call it."""
    name = getattr(method, "__name__", type(method).__name__)
    package = Path(__file__).parent
    frames = ((Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__))
    line = next((f" ({path.name}:{line})" for path, line in frames if package not in path.parents), "")
    return PolicyError(f"{where}: {name}() raised {type(error).__name__}: {error}{line}")


def ignore(_: Any) -> None:
    """Stands in for an optional method that a policy does not define."""
