"""The settings of the adapter and its counts."""

from dataclasses import dataclass, field
from logging import getLogger
from typing import Literal, Protocol

from cbatch.cost import BatchShape, CostModel
from cbatch.errors import ConfigError
from cbatch.policy import Policy
from cbatch.replay.decisions import Decision, Recorded, StepEnd
from cbatch.request_spec import RequestSpec
from cbatch.stall import PATIENCE, Patience

log = getLogger("vllm.cbatch")  # vLLM formats and shows child loggers of its own

Mode = Literal["strict", "fallback", "shadow"]


class _NotGiven:
    def predict(self, shape: BatchShape) -> float:
        raise ConfigError("view.cost: the policy predicts iterations; give model=NAME and hardware=NAME in CBATCH")

    def copy_seconds(self, num_out: int, num_back: int, block_size: int) -> float:
        return self.predict(BatchShape())


class Recorder(Protocol):
    """Receives records: `experiments.store.decisions_file.DecisionsWriter` writes them to a file."""

    def begin(self, recorded: Recorded) -> None: ...

    def request(self, spec: RequestSpec) -> None: ...

    def event(self, event: Decision | StepEnd) -> None: ...

    def finish(self, id_: int, num_output_tokens: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Adapter:
    """A policy for vLLM. mode: the consequence of an illegal plan or of a policy's error.

    strict     the error ends vLLM's engine
    fallback   vLLM decides that iteration by its own rule, which is counted and logged
    shadow     vLLM decides every iteration; the policy also plans, and differing decisions are counted

    cost: for `View.cost`. tile, batch: for `View.limits`; batch=None means vLLM's batch (`--max-num-seqs`). patience: how long a
    policy may leave requests waiting while nothing is computed. recorder: records vLLM's decisions.
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
    """Counts vLLM's deviations from the plans of a run so far, by kind.

    short: times that vLLM granted a request fewer tokens than planned. short_tokens: tokens planned but not granted. unplanned:
    preemptions that vLLM decided. fallbacks: iterations that vLLM decided because the policy failed. different: plans in shadow
    mode that differ from vLLM's decision. drafts, accepted_drafts: verified, and accepted. lacking_drafts: asked for, and not proposed by vLLM.
    """

    iterations: int = 0
    short: int = 0
    short_tokens: int = 0
    unplanned: int = 0
    fallbacks: int = 0
    different: int = 0
    drafts: int = 0
    accepted_drafts: int = 0
    lacking_drafts: int = 0

    def __str__(self) -> str:
        short = f"{self.short} grants smaller than planned ({self.short_tokens} tokens)"
        parts = [f"{self.iterations} iterations", short]
        parts += [f"{self.unplanned} preemptions by vLLM itself", f"{self.fallbacks} fallbacks to vLLM's rule"]
        parts.append(f"{self.different} decisions of vLLM that the policy would have made otherwise")
        if self.drafts or self.lacking_drafts:
            parts.append(f"{self.drafts} drafts, {self.accepted_drafts} accepted")
            parts.append(f"{self.lacking_drafts} drafts asked for that vLLM had not proposed")
        return ", ".join(parts)


def warn_at_times(number: int, message: str, what: object) -> None:
    """Logs the 1st, 10th, 100th, ... occurrence."""
    if set(str(number)[1:]) <= {"0"} and str(number)[0] == "1":
        log.warning(message, number, what)
