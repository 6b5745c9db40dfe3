"""The framework's own errors. Each message is one line that names the cause and the remedy."""

from importlib.util import find_spec
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
