"""The machines that figures are measured on, by name; each is built when a figure first asks for it.

    a6000       SARATHI's LLaMA-13B, of nanoGPT's blocks, on an A6000, from single-iteration times that the paper prints
    a100        its LLaMA-33B on an A100, from published kernel timings: needs tables=.../aiconfigurator/a100_sxm
    h200        Llama-3.1-8B on an H200, from its measured profile
    h200-13b    LLaMA-13B on the same
    gpu         this machine's GPU, which serves real tokens: with hardware=gpu, and then it is the only one

Figures leave unavailable machines out, and the command says which option would add them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cbatch.sim import Profile, ProfileCost, load_profile
from experiments.report.notes import simulated_text
from experiments.setup.presets import load_spec
from reproduction.papers.steady import SteadyState
from reproduction.profiles import convert

SINGLE_ITERATIONS = ("a6000", "h200")
"""Machines in the figures of single iterations, which take times from `cost`: predicted, so that a real GPU is not among them."""

TITLES = {
    "a6000": "A6000, nanoGPT-13B",
    "a100": "A100, nanoGPT-33B",
    "h200": "H200, Llama-3.1-8B",
    "h200-13b": "H200, LLaMA-13B",
    "gpu": "GPU, LLaMA-13B",
}
"""Titles of panels, by machine."""

PRINTED = {"nanogpt-13b": "nanogpt-13b (LLaMA-13B in the paper)", "nanogpt-33b": "nanogpt-33b (LLaMA-33B in the paper)"}
"""Models that the SARATHI paper calls by another name."""

LARGEST_BATCH = 18
"""Batch for which an H200's graphs are captured, the largest in any figure: a graph computes all its rows."""

REAL = "gpu"
TABLES_OPTION = "tables=.../aiconfigurator/a100_sxm"


def origin_of(machines: Iterable[Mapping[str, Any]]) -> str:
    """A line for each of these machines to put below a figure: where its times come from. Empty if there are none."""
    return "\n".join(dict.fromkeys(map(_origin, machines)))


def _origin(provenance: Mapping[str, Any]) -> str:
    if "measured_on" not in provenance:
        return f"{PRINTED.get(provenance['model'], provenance['model'])}: {simulated_text(provenance)}"
    predicted = f"single iterations are predicted by profile {provenance['single_iterations']['profile']}"
    return f"served with real tokens on {provenance['measured_on']}; {predicted}"


class Machines:
    """Builds and keeps a `SteadyState` for each name.

    tables: folder of published A100 kernel timings. links: folder of published NCCL timings. traces: folder of published traces.
    None if not given. real: serves real tokens; with it, only single iterations are simulated, on its measured profile. a6000: name
    or file of its profile.
    """

    def __init__(
        self,
        tables: str | None = None,
        links: str | None = None,
        real: SteadyState | None = None,
        a6000: str = "a6000-llama-13b",
        traces: str | None = None,
    ) -> None:
        self.tables, self.links, self.traces = tables, links, traces
        self.are_real = real is not None
        """Whether loads are served with real tokens, in real time; figures then choose fewer."""
        of_a100 = load_spec("nanogpt-33b")
        self._makers: Mapping[str, Callable[[], SteadyState | None]] = (
            {REAL: lambda: real}
            if real
            else {
                "a6000": lambda: _simulated(load_profile(a6000), "nanogpt-13b"),
                "a100": lambda: _simulated(convert(Path(tables), [of_a100]), of_a100.name) if tables else None,
                "h200": lambda: _simulated(load_profile("h200"), "llama-3.1-8b", LARGEST_BATCH),
                "h200-13b": lambda: _simulated(load_profile("h200"), "llama-13b", LARGEST_BATCH),
            }
        )
        self._made: dict[str, SteadyState | None] = {}
        self._used: dict[str, Mapping[str, Any] | SteadyState | None] = {}  # by the present figure

    def get(self, name: str) -> SteadyState | None:
        """Returns the machine, or None if it is not available.

        Raises:
            ProfileError: the machine's profile or tables cannot be read.
        """
        if name not in self._made:
            maker = self._makers.get(name)
            self._made[name] = maker() if maker else None
        self._used[name] = self._made[name]
        return self._made[name]

    def available(self, names: Iterable[str]) -> Iterator[tuple[str, SteadyState]]:
        """Yields name and machine of the available ones."""
        return ((name, at) for name in names if (at := self.get(name)))

    def begin(self) -> None:
        """Starts a figure: forgets which machines were requested."""
        self._used.clear()

    def note(self, name: str, provenance: Mapping[str, Any]) -> None:
        """Records the model, profile and error of a machine; figures call it for those that they have built themselves."""
        self._used[name] = provenance

    def provenance(self) -> dict[str, Any]:
        """Returns where the times come from, for each available machine requested since `begin`."""
        return {
            name: {"model": used.cost.spec.name, **used.provenance()} if isinstance(used, SteadyState) else used
            for name, used in sorted(self._used.items())
            if used
        }

    def left_out(self) -> str:
        """Returns which machine requested since `begin` needs an option, and which; empty if there is none."""
        missing = "a100" in self._used and not self.are_real and self.tables is None
        return f"a100 is left out: give {TABLES_OPTION}" if missing else ""

    def close(self) -> None:
        """Releases what real machines hold."""
        for at in self._made.values():
            if at:
                at.close()


def _simulated(profile: Profile, model: str, max_batch: int | None = None) -> SteadyState:
    return SteadyState(ProfileCost(profile, load_spec(model), max_batch=max_batch))
