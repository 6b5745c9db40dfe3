"""A policy for tests that end a run from outside: it stops in the middle of the run and waits for a signal."""

from pathlib import Path
from threading import Event

from cbatch import Plan, View
from policies.orca import Orca


class Waiting(Orca):
    def __init__(self, at: int, begun: str) -> None:
        """at: the iteration in which to wait, -1 for none. begun: the file to make before."""
        self.at, self.begun = at, begun

    def plan(self, view: View) -> Plan:
        if view.iteration == self.at:
            Path(self.begun).touch()
            Event().wait(timeout=600)  # a process that was forgotten ends
            raise TimeoutError("no signal came")
        return super().plan(view)
