"""The adapter's settings besides the policy, and its counts."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from cbatch.cost import BatchShape, CostModel
from cbatch.errors import ConfigError
from cbatch.policy import Policy
from cbatch.replay.decisions import Decision, Recorded, StepEnd
from cbatch.request_spec import RequestSpec
from cbatch.stall import PATIENCE, Patience

Mode = Literal["strict", "fallback", "shadow"]


class _NotGiven:
    def predict(self, shape: BatchShape) -> float:
        raise ConfigError("view.cost: the policy predicts iterations; give model=NAME and hardware=NAME in CBATCH")


class Recorder(Protocol):
    """Where records go: `experiments.store.decisions_file.DecisionsWriter` writes them to a file."""

    def begin(self, recorded: Recorded) -> None: ...

    def request(self, spec: RequestSpec) -> None: ...

    def event(self, event: Decision | StepEnd) -> None: ...

    def finish(self, id_: int, num_output_tokens: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Adapter:
    """mode: the consequence of an illegal plan, or of an error of the policy.

    strict     the error ends vLLM's engine
    fallback   vLLM decides that iteration by its own rule; counted and logged
    shadow     vLLM decides every iteration; the policy plans too, and differing decisions are counted

    cost: for `View.cost`. tile, batch: for `View.limits`; batch: None for vLLM's own (`--max-num-seqs`). patience: how long a policy
    may leave requests waiting while nothing is computed. recorder: of vLLM's decisions.
    """

    policy: Policy
    mode: Mode = "strict"
    cost: CostModel = field(default_factory=_NotGiven)
    tile: int = 1
    batch: int | None = None
    patience: Patience = PATIENCE
    recorder: Recorder | None = None


@dataclass
class Counts:
    """Counts how often vLLM departed from the plans of a run so far, by kind.

    short: requests that were granted fewer tokens than planned, and short_tokens how many fewer; `unplanned` those that vLLM
    preempted by itself. fallbacks: iterations that vLLM decided since the policy failed. different: plans of a policy in
    shadow mode that differ from vLLM's decision.
    """

    iterations: int = 0
    short: int = 0
    short_tokens: int = 0
    unplanned: int = 0
    fallbacks: int = 0
    different: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.iterations} iterations",
            f"{self.short} grants smaller than planned ({self.short_tokens} tokens)",
        ]
        parts += [f"{self.unplanned} preemptions by vLLM itself", f"{self.fallbacks} fallbacks to vLLM's rule"]
        return ", ".join([*parts, f"{self.different} decisions of vLLM that the policy would have made otherwise"])
