"""cbatch: a research framework for LLM-inference scheduling policies.

Policies and programs import these names. The package imports neither torch nor Hydra. `experiments.api` runs a policy in one call.
"""

from cbatch.cost import BatchShape, CostFunction, CostModel
from cbatch.described import Described
from cbatch.engine import Engine
from cbatch.errors import CbatchError, ConfigError, PlanError, PolicyError, WorkloadError
from cbatch.executor import Executor, Step, StepResult
from cbatch.kv import BlockHash, CachedBlock, Eviction, KVSize, KVView
from cbatch.limits import Limits
from cbatch.model import ModelSpec
from cbatch.plan import Plan, Refusal
from cbatch.plan_builder import PlanBuilder
from cbatch.policy import Policy, WholePrompts, is_steady
from cbatch.record import RunRecord, StepRecord
from cbatch.request import SERVED, FinishReason, Request, Status
from cbatch.request_spec import SLO, RequestSpec, Sampling
from cbatch.server import Server
from cbatch.view import View

__version__ = "0.1.0"  # CITATION.cff and CHANGELOG.md name it too

__all__ = ["Engine", "Executor", "KVSize", "Limits", "ModelSpec", "RunRecord", "Server", "Step", "StepRecord"]
__all__ += ["BatchShape", "CostFunction", "CostModel", "Described", "KVView", "Plan", "PlanBuilder"]
__all__ += ["BlockHash", "CachedBlock", "Eviction", "Policy", "Refusal", "View", "WholePrompts"]
__all__ += ["SERVED", "SLO", "FinishReason", "Request", "RequestSpec", "Sampling", "Status", "StepResult"]
__all__ += ["CbatchError", "ConfigError", "PlanError", "PolicyError", "WorkloadError", "is_steady"]
