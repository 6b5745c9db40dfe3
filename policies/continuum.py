"""Continuum (arXiv 2511.02230): keeps a session's KV cache for a time while its tool runs, and serves its next turn first.

When a turn that is not the last has ended, its session is pinned for the time that `ttl` says. The cached KV blocks of pinned sessions
are not given to others (`pins=false`: they are, and only the order changes); give `eviction=continuum`, which evicts them last. Waiting
turns of pinned sessions come first, the earliest pin first, then others by the first arrival of their session. A pin ends with the
admission of the session's next turn, or at its time if none waits. If a running request lacks a block, the pin with the latest end
goes; the same if nothing runs, the first that waits does not fit, and the times of all pins are over. After that the newest running request
is preempted. Ties: arrival.

Source: the code (Whrlicht/vllm-continuum); the paper's rule for times from secondary notes. Differences: docs/policies/continuum.md.
"""

from cbatch import Request, View
from policies.chunking import ChunkSelector
from policies.pauses import TimeToLive
from policies.sarathi_serve import SarathiServe
from policies.shared.pins import PinnedSessions
from policies.shared.programs import program_of


class Continuum(PinnedSessions):
    steady = SarathiServe.steady

    def __init__(self, chunking: ChunkSelector, ttl: TimeToLive, pins: bool = True) -> None:
        super().__init__(chunking, ttl.pauses, pins)
        self.ttl = ttl

    def keep(self, request: Request) -> float | None:
        return self.ttl.after(request) or None

    def rank(self, request: Request) -> tuple[bool, int]:
        pin = self.pinned.get(program_of(request))
        return (True, self.first[program_of(request)]) if pin is None else (False, pin.number)

    def lapse(self, view: View) -> None:
        for program in [program for program, pin in self.pinned.items() if view.now >= pin.until]:
            if program not in self.waiting:
                self.unpin(program)
