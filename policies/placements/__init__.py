"""Placements: routers that choose where a request is prefilled and where it is decoded. `backend.router=` takes their import paths."""

from policies.placements.distserve import DistServe
from policies.placements.mooncake import Mooncake
from policies.placements.remote_above import RemoteAbove
from policies.placements.splitwise import Splitwise
from policies.placements.taichi import TaiChi

__all__ = ["DistServe", "Mooncake", "RemoteAbove", "Splitwise", "TaiChi"]
