"""Simulation: hardware profiles, cost models, and an executor with a virtual clock. Never imports torch."""

from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import PlanningExecutor, SimExecutor
from cbatch.sim.measured import HostTime
from cbatch.sim.profile import Profile
from cbatch.sim.profile_file import PROFILES, load_profile

__all__ = ["PROFILES", "HostTime", "PlanningExecutor", "Profile", "ProfileCost", "SimExecutor", "load_profile"]
