"""Asks a router, and checks its answers."""

from operator import index
from typing import Any, SupportsIndex

from cbatch.cluster.routers import Reject, Route, Router
from cbatch.cluster.views import ClusterView, Phase, Role
from cbatch.errors import PolicyError, call
from cbatch.policy import name_of
from cbatch.request import Request


class CheckedRouter:
    """A router that names only replicas which can do what they are chosen for; others raise PolicyError."""

    def __init__(self, router: Router, view: ClusterView, can_move: bool) -> None:
        """can_move: whether a request can leave the replica to which it was sent."""
        self._router, self._name, self._view, self._can_move = router, name_of(router), view, can_move
        self._on_end = getattr(router, "on_end", None)

    def look(self, now: float) -> ClusterView:
        """Returns the view at a time, and tells the router which requests have ended."""
        for ended in self._view.update(now):
            if self._on_end is not None:
                call(self._where(ended), self._on_end, ended)
        return self._view

    def choose(self, shown: Request, now: float, stage: Role = Role.PREFILL) -> int | Route | Reject:
        """shown: a copy of the request that shows no progress."""
        view = self.look(now)
        view.stage = stage
        chosen: Any = call(self._where(shown), self._router.choose, shown, view)
        if isinstance(chosen, Reject):
            return chosen
        if not isinstance(chosen, Route):
            return self._check(chosen, chosen, shown, stage)
        if not self._can_move and (chosen.prefill != chosen.decode or chosen.copy is not None):
            remedy = "a router that moves them states moves = True in its class"
            raise PolicyError(
                f"{self._where(shown)}: returned {chosen}, but requests stay where they are sent; {remedy}"
            )
        stays = chosen.prefill == chosen.decode  # such a replica decodes, whatever its role
        stages = Role.DECODE if stays else Role.PREFILL, Role.DECODE, Role.BOTH
        parts = zip(chosen, stages, strict=True)
        return Route(*(self._check(chosen, part, shown, role) for part, role in parts if part is not None))

    def choose_decoder(self, shown: Request, now: float) -> int:
        chosen = self.choose(shown, now, Role.DECODE)
        if isinstance(chosen, Reject):
            raise PolicyError(f"{self._where(shown)}: returned {chosen} for its decoder; reject it at its arrival")
        return chosen.decode if isinstance(chosen, Route) else chosen

    def _where(self, request: Request) -> str:
        return f"router {self._name}, request {request.id}"

    def _check(self, chosen: Any, part: Any, shown: Request, stage: Role) -> int:
        """Returns the index of a replica that can take the request; raises PolicyError if the router chose none."""
        where = self._where(shown)
        is_index = type(part) is int or (isinstance(part, SupportsIndex) and type(part) is not bool)
        if not is_index or not 0 <= index(part) < len(self._view):
            last = len(self._view) - 1
            raise PolicyError(f"{where}: choose() returned {chosen!r}; return the index of a replica, from 0 to {last}")
        view = self._view[replica := index(part)]
        if view.phase is not Phase.READY:
            problem = f"is {view.phase}"
        elif not view.fits(shown):
            problem = f"serves up to {view.max_tokens} tokens per request"
        elif Role.BOTH not in (view.role, stage) and view.role is not stage:
            problem = f"has the role {view.role}"
        else:
            return replica
        raise PolicyError(f"{where}: chose replica {replica}, which {problem}; choose from view.fitting(request)")
