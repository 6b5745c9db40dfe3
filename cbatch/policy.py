"""The interface of a scheduling policy.

    class Mine:
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            plan.add_decodes()
            for request in view.waiting:
                if not plan.add(request):
                    break
            return plan.build()

is a complete policy: it runs unchanged with real tokens on a CPU or GPU and in simulation, sync and async. The functions below
call a policy: optional methods may be missing, and an exception becomes an error that names the policy.
"""

from collections.abc import Callable
from copy import deepcopy
from inspect import getattr_static, isfunction
from operator import index
from typing import Any, Protocol, TypeVar

from cbatch.described import Described
from cbatch.errors import ConfigError, Interruption, PolicyError, call
from cbatch.limits import Limits
from cbatch.plan import Plan
from cbatch.request import Request
from cbatch.view import View

P = TypeVar("P")

HOOKS = ("on_arrival", "on_wait", "on_tokens", "on_step", "on_finish")
"""Optional methods that report events to a policy."""


class Policy(Protocol):
    """Decides which requests compute how many tokens in the next iteration, without a clock, randomness or I/O.

    A policy may also define any of

        check(limits: Limits) -> None            # before the run; raises ConfigError if the settings do not fit
        num_at_once(request: Request) -> int     # tokens that one iteration must have room for; see `WholePrompts`
        on_arrival(request: Request) -> None     # a request has arrived
        on_wait(request: Request) -> None        # it begins to wait: it has arrived, was preempted or, inside vLLM, was not
                                                 # admitted as planned; a queue of the policy's own is filled here
        on_tokens(requests: Sequence[Request]) -> None  # an iteration has ended; each request has received a token, with
                                                        # accepted drafts several: it is named once for each token
        on_step(record: StepRecord) -> None      # the same iteration's times and totals
        on_finish(request: Request) -> None      # a request has ended

    The last five methods may change only the policy's own state.

    `steady = True` in the policy's own class is a promise: if a plan is one decode per running request, the next plan is the same
    until a request arrives or ends, KV blocks run short (`Plan.least_free`), or `Plan.wake_at` comes. `steady` may be a property.
    The simulator (`cbatch.leap`) repeats such a plan without calling `plan`, and calls `on_step` afterwards, unless the policy has
    `on_tokens`.
    vLLM's adapter repeats it unless the policy has `on_tokens` or `on_step`. `experiments.check` tests the promise. With
    `steady = False` in the class, `plan` may set `self.steady` for the returned plan.

    `depends_on = ("prefix_cache", "clients")` in the class or the object: a run that lacks one of these has a note in its results.
    Evictions and routers may also have it. `experiments.report.notes` lists the names.
    """

    def plan(self, view: View) -> Plan:
        """Plans the next iteration. An empty plan waits for the next arrival or completion, or until `plan.wake_at`."""


class WholePrompts(Described):
    """A policy that does not chunk prompts: a request is refused before the run if no iteration has room for its prompt."""

    def num_at_once(self, request: Request) -> int:
        return request.num_prompt_tokens


def is_steady(policy: object) -> bool:
    """Returns whether the class of a policy, or of a part of a policy, declares itself steady.

    Subclasses do not inherit `steady`, since they may plan differently. Raises PolicyError if `steady` is neither True nor False.
    """
    kind = type(policy)
    steady = "steady" in vars(kind) and policy.steady  # type: ignore[attr-defined]
    if not isinstance(steady, bool):
        problem = f"steady is a {type(steady).__name__}; make it True or False, or rename it"
        raise PolicyError(f"{kind.__name__}: {problem}")
    return steady


def copy_policy(policy: P, what: str = "policy") -> P:
    """Returns a deep copy of a policy, eviction or router, for a replica or a new run. what: kind of the object, for errors.

    Raises ConfigError: the object cannot be copied, or stores a closure over `self`; the copy would still read the original.
    """
    name = name_of(policy)
    for attribute, value in getattr(policy, "__dict__", {}).items():
        if isfunction(value) and any(cell.cell_contents is policy for cell in value.__closure__ or ()):
            problem = f"self.{attribute} is a function over self, which in a copy still reads the original's attributes"
            raise ConfigError(f"{what} {name}: {problem}; make it a method")
    try:
        return deepcopy(policy)
    except (Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        refused = f"{what} {name} cannot be copied ({type(error).__name__}: {error})"
        raise ConfigError(f"{refused}; open files, locks and generators where they are used") from error


def name_of(policy: object) -> str:
    """Returns the name of a policy in errors: its class's, or the one that an object around a policy states as `__name__`."""
    stated = getattr_static(policy, "__name__", None)  # without a policy's own __getattr__, which may fail
    return stated if isinstance(stated, str) else type(policy).__name__


def check_policy(policy: Policy, limits: Limits) -> None:
    """Calls the policy's `check`, if defined.

    Raises:
        ConfigError: raised by `check`.
        PolicyError: `check` raised another error, `steady` is neither True nor False, or an attribute `on_...` is not a hook.
    """
    where = f"policy {name_of(policy)}"
    for name in call(where, dir, policy):
        if name.startswith("on_") and name not in HOOKS:
            raise PolicyError(f"{where}: {name} would never be called; the hooks are {', '.join(HOOKS)}")
    call(where, is_steady, policy)
    call(where, optional_method(policy, "check"), limits)


def optional_method(policy: Policy, name: str) -> Callable[[Any], Any]:
    """Returns an optional method of the policy, or `ignore`. Raises PolicyError if the attribute cannot be read or called."""
    where = f"policy {name_of(policy)}"
    method: Callable[[Any], Any] = call(f"{where}, attribute {name}", getattr, policy, name, ignore)
    if not callable(method):
        raise PolicyError(f"{where}: {name} is a {type(method).__name__}; make it a method, or rename it")
    return method


def tokens_at_once(policy: Policy) -> Callable[[Request], int]:
    """Returns the policy's `num_at_once`, or 1 without it. What it returns raises TypeError unless it is a whole number."""
    method = optional_method(policy, "num_at_once")

    def num_at_once(request: Request) -> int:
        return index(method(request) or 1)

    return num_at_once


def ignore(_: Any) -> None:
    """Replaces an optional method that a policy does not define."""
