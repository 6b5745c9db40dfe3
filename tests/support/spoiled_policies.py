"""Policies that go wrong once, in every way that their authors may come upon; before and after they do what they should."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cbatch import Plan, Request, View


class Hostile:
    """Whatever is asked of it, it raises."""

    def _raise(self, *_: object) -> Any:
        raise RuntimeError("do not\ntouch")

    __eq__ = __hash__ = __iter__ = __len__ = __repr__ = __lt__ = __index__ = __bool__ = __int__ = _raise  # type: ignore[assignment]


class OwnPlan(Plan):
    """A plan of one's own kind, which says something else each time."""

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Any:
        yield from ((None, "x"),)


THINGS: dict[str, Callable[[View], Any]] = {
    "None": lambda view: None,
    "one": lambda view: 1,
    "huge": lambda view: 10**30,
    "nan": lambda view: float("nan"),
    "true": lambda view: True,
    "fraction": lambda view: Fraction(1, 3),
    "int64": lambda view: np.int64(2),
    "array": lambda view: np.ones(3, np.int64),
    "text": lambda view: "ä\n漢",
    "empty list": lambda view: [],
    "list of None": lambda view: [None],
    "dict": lambda view: {},
    "generator": lambda view: (n for n in range(3)),
    "object": lambda view: object(),
    "hostile": lambda view: Hostile(),
    "view": lambda view: view,
    "builder": lambda view: view.plan(),
    "waiting": lambda view: view.waiting,
    "running": lambda view: view.running,
    "twice": lambda view: [*view.running, *view.running],
    "pairs": lambda view: [(request, 1) for request in view.running],
    "strangers": lambda view: [Request(10**9, 4, 4)],
    "reserve of strangers": lambda view: {Request(1, 4, 4): 4},
    "own plan": lambda view: OwnPlan(),
    "reserve": lambda view: dict.fromkeys(view.running, 3),
    "ones": lambda view: [1] * len(view.running),
    "rejections": lambda view: [(request, "no") for request in view.waiting],
    "set": lambda view: set(view.running),
}

FIELDS = ("requests", "num_tokens", "preempt", "reject", "reserve", "pad_to", "wake_at", "note")


@dataclass
class Once:
    """`SarathiServe` in small, but at iteration `when` it answers something else.

    field: of the plan that is replaced by the thing; "plan" for all of it, "entry" and "count" for one entry's parts,
    and "del" with a field's name to take it away.
    """

    when: int
    field: str
    thing: str
    seen: int = -1

    def plan(self, view: View) -> Plan:
        self.seen += 1
        plan = view.plan()
        plan.add_decodes(preempt_newest=True)
        for request in [*view.prefilling, *view.waiting]:
            if not plan.add(request, 8):
                break
        made = plan.build()
        return self._spoiled(made, THINGS[self.thing](view)) if self.seen == self.when else made

    def _spoiled(self, plan: Plan, thing: Any) -> Any:
        if self.field == "plan":
            return thing
        if self.field == "entry":
            plan.requests[-1:] = [thing]
        elif self.field == "count":
            plan.num_tokens[-1:] = [thing]
        elif self.field.startswith("del "):
            delattr(plan, self.field.removeprefix("del "))
        elif self.field.startswith("more "):
            getattr(plan, self.field.removeprefix("more ")).append(thing)
        else:
            setattr(plan, self.field, thing)
        return plan


MORE = [f"more {name}" for name in ("requests", "num_tokens", "preempt", "reject")]
once = st.builds(
    Once,
    when=st.integers(0, 9),
    field=st.sampled_from(["plan", "entry", "count", *MORE, *FIELDS, *FIELDS, *(f"del {name}" for name in FIELDS)]),
    thing=st.sampled_from(tuple(THINGS)),
)

# -- policies as their authors write them: a module's text -----------------------------------------------------------

MODULE = '''
"""A policy from outside."""

from cbatch import ConfigError, Plan, Request, Status


class Ügly(BaseException):
    pass


class Höchst:
    def __init__(self, budget=64):
        self.budget = budget
        self.turn = 0

    def plan(self, view):
        self.turn += 1
        if self.turn == TURN:
            self.go_wrong(view)
        plan = view.plan()
        plan.add_decodes()
        for request in [*view.prefilling, *view.waiting]:
            if not plan.add(request, self.budget):
                break
        return plan.build("ok")

    def go_wrong(self, view):
        WRONG

    def METHOD(self, what):
        HOOK
'''

WRONG = (
    "pass",
    "raise ValueError('two\\nlines')",
    "raise SystemExit(0)",
    "raise StopIteration",
    "raise MemoryError",
    "raise Ügly('ä')",
    "raise ConfigError('mine')",
    "raise ExceptionGroup('many', [ValueError('a'), KeyError('b')])",
    "self.go_wrong(view)",
    "exit()",
    "assert False",
    "view.nothing",
    "view.waiting.clear()",
    "view.running._members.clear()",
    "view.running.discard(next(iter(view.running)))",
    "view.decoding.add(Request(0, 1, 1))",
    "view.limits = None",
    "view.now = 'x'",
    "view.limits.max_batch = 10**9",
    "view.kv._pool.num_free = -1",
    "view._state = None",
    "del view.waiting",
    "view.waiting[0].num_prompt_tokens = -5",
    "view.waiting[0].status = Status.FINISHED",
    "view.waiting[0].id = None",
    "next(iter(view.running))._row = 10**6",
    "next(iter(view.running)).status = Status.WAITING",
    "next(iter(view.running)).max_new_tokens = 0",
    "next(iter(view.running))._table.known[:] = 10**9",
    "next(iter(view.running))._table.computed[:] = -1",
    "next(iter(view.running)).output = None",
)

HOOKS = [
    "plan_b",
    "on_arrival",
    "on_wait",
    "on_step",
    "on_finish",
    "check",
    "__init_subclass__",
    "__repr__",
    "__getattr__",
]

modules = st.builds(
    lambda turn, wrong, method, hook: (
        MODULE.replace("TURN", str(turn))
        .replace("WRONG", wrong)
        .replace("METHOD", method)
        .replace("HOOK", hook.replace("view", "what"))
    ),
    turn=st.integers(1, 8),
    wrong=st.sampled_from(WRONG),
    method=st.sampled_from(HOOKS),
    hook=st.sampled_from(("pass", "pass", *WRONG)),
)
"""The text of a module with the policy Höchst."""
