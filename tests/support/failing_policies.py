"""Policies that bring a server into trouble."""

import multiprocessing
import os
import time
from pathlib import Path

from cbatch import Plan, View
from policies.orca import Orca


class Fails(Orca):
    def plan(self, view: View) -> Plan:
        if view.iteration > 20:
            raise ValueError("the policy's fault")
        return super().plan(view)


class Sleeps(Orca):
    """Its process writes its number, and takes long to begin."""

    def __init__(self) -> None:
        if multiprocessing.parent_process():
            Path("pid").write_text(str(os.getpid()))
            time.sleep(300)
        super().__init__()


class Refuses(Orca):
    def plan(self, view: View) -> Plan:
        plan = view.plan()
        for request in list(view.waiting):
            plan.reject(request, "too busy")
        return plan.build()


class Idles(Orca):
    def plan(self, view: View) -> Plan:
        return Plan()


class Loops(Orca):
    """Says that a request waits, and never returns."""

    def plan(self, view: View) -> Plan:
        while view.waiting:
            Path("plans").touch()
        return super().plan(view)
