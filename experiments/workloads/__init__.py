"""Workloads, which make the requests of a run.

A workload is a frozen dataclass, built by Hydra from `conf/workload/`. Equal fields give equal requests under every policy
and executor and on every machine. Importing this package loads neither torch nor pandas nor Hydra.
"""

from experiments.workloads.agents import Agents
from experiments.workloads.base import Vocabulary, Workload
from experiments.workloads.chat import Chat
from experiments.workloads.clients import Clients
from experiments.workloads.closed import ClosedBatch
from experiments.workloads.lengths import FixedLengths, Lengths, MixedLengths, TraceLengths, UniformLengths, ZipfLengths
from experiments.workloads.open_loop import (
    AllAtOnce,
    ArrivalProcess,
    DailyArrivals,
    GammaArrivals,
    OpenLoop,
    PrefixGroups,
)
from experiments.workloads.prompts import PromptFile
from experiments.workloads.recorded import TraceReplay
from experiments.workloads.recorded_sessions import RecordedSessions
from experiments.workloads.rollout import Rollout
from experiments.workloads.scripts import Session, Turn
from experiments.workloads.servegen import ServeGen
from experiments.workloads.sessions import ClosedLoop
from experiments.workloads.trace import Trace

__all__ = ["Clients", "ClosedBatch", "OpenLoop", "PromptFile", "ServeGen", "TraceReplay", "Vocabulary", "Workload"]
__all__ += ["FixedLengths", "Lengths", "MixedLengths", "TraceLengths", "UniformLengths", "ZipfLengths"]
__all__ += ["Agents", "AllAtOnce", "ArrivalProcess", "Chat", "ClosedLoop", "DailyArrivals", "GammaArrivals"]
__all__ += ["PrefixGroups", "RecordedSessions", "Rollout", "Session", "Trace", "Turn"]
