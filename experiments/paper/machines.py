"""The machines that figures are measured on, by name; each is made when a figure first asks for it.

    a6000       LLaMA-13B on an A6000, from single-iteration times that the SARATHI paper prints
    a100        LLaMA-33B on an A100, from published kernel timings: needs tables=.../aiconfigurator/a100_sxm
    h200        Llama-3.1-8B on an H200, from its measured profile
    h200-13b    LLaMA-13B on the same
    gpu         the GPU at hand, which serves real tokens: hardware=gpu, and then it is the only one

What is not there is None: figures leave it out, and the command says what would bring it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cbatch.sim.cost import ProfileCost
from cbatch.sim.profile_file import load_profile
from experiments.config.presets import load_spec
from experiments.paper.a6000 import MODEL, NAME
from experiments.paper.steady import SteadyState

SINGLE_ITERATIONS = ("a6000", "h200", "gpu")
"""Machines on which the figures of single iterations are drawn, where they are at hand."""

TITLES = {
    "a6000": "A6000, LLaMA-13B",
    "a100": "A100, LLaMA-33B",
    "h200": "H200, Llama-3.1-8B",
    "h200-13b": "H200, LLaMA-13B",
    "gpu": "GPU, LLaMA-13B",
}
"""Of panels, by machine."""

LARGEST_BATCH = 18
"""Requests for which an H200's graphs are captured: the most that a figure serves. A graph computes their rows, taken or not."""

REAL = "gpu"
TABLES_OPTION = "tables=.../aiconfigurator/a100_sxm"


class Machines:
    """Gives a `SteadyState` by name.

    tables: folder of published A100 kernel timings. links: folder of published NCCL timings. None where they were not given.
    """

    def __init__(self, tables: str | None = None, links: str | None = None, real: SteadyState | None = None) -> None:
        """
        Args:
            real: serves real tokens; with it nothing is simulated but single iterations, on its measured profile.
        """
        self.tables = tables
        self.links = links
        self._makers: Mapping[str, Callable[[], SteadyState | None]] = (
            {REAL: lambda: real}
            if real
            else {
                "a6000": lambda: _simulated(NAME, MODEL),
                "a100": lambda: _simulated(tables, "nanogpt-33b") if tables else None,
                "h200": lambda: _simulated("h200", "llama-3.1-8b", LARGEST_BATCH),
                "h200-13b": lambda: _simulated("h200", "llama-13b", LARGEST_BATCH),
            }
        )
        self._made: dict[str, SteadyState | None] = {}
        self._asked: set[str] = set()
        self._noted: dict[str, Any] = {}

    @property
    def are_real(self) -> bool:
        """Whether loads are served with real tokens. They take as long as they take: figures choose fewer."""
        return REAL in self._makers

    def get(self, name: str) -> SteadyState | None:
        """
        Raises:
            ProfileError: the machine's profile or tables cannot be read.
        """
        self._asked.add(name)
        if name not in self._made:
            maker = self._makers.get(name)
            self._made[name] = maker() if maker else None
            _forget(self._made[name])
        return self._made[name]

    def single_iterations(self) -> list[tuple[str, SteadyState]]:
        """Those at hand on which single iterations are drawn. Take times from their `cost`, which always predicts."""
        return [(name, at) for name in SINGLE_ITERATIONS if (at := self.get(name))]

    def begin(self) -> None:
        """A figure begins: forget who was asked for."""
        self._asked.clear()
        self._noted.clear()
        for at in self._made.values():
            _forget(at)

    def note(self, name: str, provenance: Mapping[str, Any]) -> None:
        """A figure has made a machine of its own, and says of it what `provenance` does: model, profile, error ..."""
        self._noted[name] = provenance

    def provenance(self) -> dict[str, Any]:
        """Where the times come from of the machines that were asked for since `begin`, and are at hand."""
        asked = {name: at for name in sorted(self._asked) if (at := self._made[name])}
        return {name: {"model": at.cost.spec.name, **at.provenance()} for name, at in asked.items()} | self._noted

    def origin(self) -> str:
        """The same in a line, to stand below a figure; empty if nobody was asked."""
        asked = [at.origin() for name in sorted(self._asked) if (at := self._made[name])]
        noted = [f"{found['model']} simulated with profile {found['profile']}" for found in self._noted.values()]
        return "; ".join(dict.fromkeys([*asked, *noted]))

    def left_out(self) -> str:
        """Who was asked for since `begin` but needs an option, and which; empty if nobody."""
        missing = "a100" in self._asked and not self.are_real and self.tables is None
        return f"a100 is left out: give {TABLES_OPTION}" if missing else ""

    def close(self) -> None:
        """Give back what real machines hold."""
        for at in self._made.values():
            if at:
                at.close()


def _forget(at: SteadyState | None) -> None:
    if at:
        at.num_asked = 0


def _simulated(profile: str, model: str, max_batch: int | None = None) -> SteadyState:
    return SteadyState(ProfileCost(load_profile(profile), load_spec(model), max_batch=max_batch))
