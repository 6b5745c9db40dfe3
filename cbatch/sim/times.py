"""What is predicted of an iteration: seconds by operation, and by stage."""

from typing import NamedTuple

from cbatch.sim.power import STEADY, Pace


class Parts(NamedTuple):
    """Device seconds of one iteration by operation, over all layers and stages; `communication` includes waiting."""

    linear: float
    attention: float
    head: float
    other: float
    communication: float

    @property
    def total(self) -> float:
        return sum(self)


class StageTimes(NamedTuple):
    """Seconds of one iteration in a pipeline.

    compute, communication: each stage's operations, and the all-reduces between them.
    embedding: added in the first stage. head: added in the last stage.
    transfers: sends from each stage to the next, [stages - 1].
    pace: how `compute` depends on the GPU's clock.
    """

    compute: float
    communication: float
    embedding: float
    head: float
    transfers: tuple[float, ...]
    pace: Pace = STEADY


class TokenTimes(NamedTuple):
    """Times that depend only on the number of tokens; `linear`, `other` and `pace` cover a stage's layers."""

    linear: float
    other: float
    pace: Pace
    communication: float
    embedding: float
    transfers: tuple[float, ...]
    covered: bool
