"""Ends a run in which requests wait or run but receive no tokens, and reports whether a full KV cache is the cause."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from cbatch.errors import ConfigError, PolicyError, StallError
from cbatch.plan import Plan
from cbatch.view import View


@dataclass(frozen=True, slots=True)
class Patience:
    """The limits after which a run without tokens ends with a StallError, while requests wait or run.

    seconds: since the last token, excluding waits for arrivals. empty_plans: consecutive empty plans, each with a `wake_at`.

    Raises ConfigError for a value that is not above 0.
    """

    seconds: float = 3600.0
    empty_plans: int = 100_000

    def __post_init__(self) -> None:
        for name in ("seconds", "empty_plans"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"patience.{name}={getattr(self, name)} must be above 0")


PATIENCE = Patience()


class StallWatch:
    """Counts time and empty plans since the last progress of a run."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._since = 0.0
        self._num_empty_plans = 0

    def note_progress(self, now: float) -> None:
        """Records that a request has received a token, or has arrived on an idle engine."""
        self._since, self._num_empty_plans = now, 0

    def note_launch(self) -> None:
        """Records a nonempty iteration, which may sample no token."""
        self._num_empty_plans = 0

    def note_empty_plan(self) -> None:
        self._num_empty_plans += 1

    def check(self, now: float, view: View, where: Callable[[], str]) -> None:
        """Raises StallError if requests wait or run and the patience has ended. where: returns the start of the message."""
        patience, idle = self.patience, now - self._since
        if self._num_empty_plans > patience.empty_plans:
            stalled, setting = f"{patience.empty_plans} empty plans in a row", "empty_plans"
        elif idle > patience.seconds:
            stalled, setting = f"no token for {idle:g} s", "seconds"
        else:
            return
        if view.waiting or view.running:
            remedy = _describe_shortage(view) or "; compute their tokens"
            raise StallError(f"{where()}: {stalled} with {_held(view)}{remedy}, or raise patience.{setting}")


def _describe_shortage(view: View) -> str:
    """Returns "; ..." for an error message if no running request has the KV blocks for its next token, else ""."""
    kv, running = view.kv, view.running
    if not running or any(kv.num_lacking(request, request.num_computed + 1) <= kv.num_free for request in running):
        return ""
    held = f"the running ones hold {kv.num_blocks - kv.num_free} of {kv.num_blocks} KV blocks, and each needs one more"
    return f"; {held}: preempt one of them, or set blocks aside on admission, add(request, ..., reserve=request.max_tokens)"


def standstill(where: str, view: View, plan: Plan, num_unfinished: int) -> PolicyError:
    """Returns the error for an empty plan when nothing is in flight and no arrival or departure will follow."""
    if not (view.waiting or view.running):
        lost = f"{num_unfinished} requests are gone from view.waiting, which a policy must not change"
        return PolicyError(f"{where}: {lost}; copy it, as in list(view.waiting)")
    stuck = f"empty plan with {_held(view)}, nothing in flight and no arrival to come"
    return StallError(f"{where}: {stuck}{_describe_empty(view, plan)}")


def _held(view: View) -> str:
    first = next(chain(view.waiting, view.running), None)
    each = f" (request {first.id}{' first' * (len(view.waiting) + len(view.running) > 1)})" if first else ""
    return f"{len(view.waiting)} waiting and {len(view.running)} running requests{each}"


def _describe_empty(view: View, plan: Plan) -> str:
    """Returns "; ..." for an error message: why a plan is empty, and the remedy."""
    if shortage := _describe_shortage(view):
        return shortage
    why = f"; its last add granted nothing ({plan.refusal.value})" if plan.refusal else ""
    remedy = "build(wake_at=...)" if plan.wake_at is None else f"a wake_at after now={view.now:g}"
    return f"{why}; plan a request, preempt one, or give {remedy}"
