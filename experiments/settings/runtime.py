"""How a run executes its iterations, chosen by `runtime=`."""

from dataclasses import dataclass
from typing import Literal

from cbatch.validation import Switch, check

Graphs = Literal["off", "decode", "all"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How the engine and the executor run.

    asynchronous: plan and launch an iteration while the previous one is computed.
    graphs: which iterations replay a captured CUDA graph: "off", "decode" (those without prompts) or "all".
    compile: compute real tokens with `transformers`' modules, compiled by `torch.compile`, instead of the fused model.
    """

    asynchronous: Switch
    graphs: Graphs
    compile: Switch

    def __post_init__(self) -> None:
        check(self, "runtime.")

    @property
    def name(self) -> str:
        """As in conf/runtime."""
        return "async" if self.asynchronous else "sync"
