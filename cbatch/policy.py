"""What a scheduling policy implements.

    class Mine:
        def plan(self, view: View) -> Plan:
            plan = view.plan()
            plan.add_decodes()
            for request in view.waiting:
                if not plan.add(request):
                    break
            return plan.build()

is a whole policy: it runs with real tokens on a CPU or GPU and in simulation, sync and async, without an edit.
"""

from copy import deepcopy
from inspect import isfunction
from typing import Protocol, TypeVar

from cbatch.errors import ConfigError, Interruption, PolicyError
from cbatch.plan import Plan
from cbatch.view import View

P = TypeVar("P")


class Policy(Protocol):
    """Decides which requests compute how many tokens in the next iteration. No clock, no randomness, no I/O.

    A policy may also define any of

        check(limits: Limits) -> None            # before anything runs; raises ConfigError if its settings do not fit
        on_arrival(request: Request) -> None     # a request has arrived
        on_tokens(requests: Sequence[Request]) -> None  # an iteration has ended; each has received a token of it
        on_step(record: StepRecord) -> None      # the same iteration's times and totals
        on_finish(request: Request) -> None      # a request has ended

    The last four may change the policy's own state only.

    `steady = True` in its own class (a property, if settings decide) says that a plan of one token for each running
    request, and nothing else, stays the same until a request arrives or ends or KV blocks come free or run short. The
    simulator (`cbatch.leap`) then repeats it without calling `plan`, unless `on_tokens` is defined, and calls `on_step`
    afterwards; so does the adapter for vLLM, unless `on_step` is defined, too. `experiments.check` finds out whether it is
    true. With `steady = False` in its class, `plan` may set `self.steady` for the plan that it makes; vLLM asks for each.
    """

    def plan(self, view: View) -> Plan:
        """Plan the next iteration; an empty plan waits for the next arrival or completion, or until `plan.wake_at`."""


def is_steady(policy: object) -> bool:
    """Returns whether the class of a policy, or of a part of it, says that it is steady.

    Subclasses, which may plan in another way, do not inherit it. Raises PolicyError if it is neither True nor False.
    """
    kind = type(policy)
    steady = "steady" in vars(kind) and policy.steady  # type: ignore[attr-defined]
    if not isinstance(steady, bool):
        problem = f"steady is a {type(steady).__name__}; make it True or False, or call it something else"
        raise PolicyError(f"{kind.__name__}: {problem}")
    return steady


def copy_policy(policy: P) -> P:
    """Returns a deep copy, for a replica or a fresh run.

    Raises:
        ConfigError: it cannot be copied, or keeps a function that would read the attributes of the original in the copy.
    """
    name = type(policy).__name__
    for attribute, value in getattr(policy, "__dict__", {}).items():
        if isfunction(value) and any(cell.cell_contents is policy for cell in value.__closure__ or ()):
            problem = f"self.{attribute} is a function over self, which in a copy still reads the original's attributes"
            raise ConfigError(f"policy {name}: {problem}; make it a method")
    try:
        return deepcopy(policy)
    except (Interruption, KeyboardInterrupt):
        raise
    except BaseException as error:
        refused = f"policy {name} cannot be copied ({type(error).__name__}: {error})"
        raise ConfigError(f"{refused}; open files, locks and generators where they are used") from error
