"""A small model on made-up GPUs: every part of a simulated cluster at sizes that can be checked by hand."""

from cbatch import Engine, Limits, Policy, Server
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Link, Links
from cbatch.sim.profile import HostTime, Measured, Profile
from cbatch.sim.profile_file import ModelTables
from cbatch.sim.roofline import Ceilings

SPEC = ModelSpec(
    "small",
    "llama",
    num_layers=8,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=100,
    max_positions=4096,
)

LINKS = Links(
    all_reduce={2: PiecewiseLinear((1.0, 1e6), (1e-6, 1e-3))},
    within_node=Link(1e-6, 1e9).seconds(),
    between_nodes=Link(1e-5, 1e8).seconds(),
)


def profile(links: Links = LINKS, measured: dict[tuple[str, int], Measured] | None = None) -> Profile:
    return Profile(
        "made-up",
        "GPUs of a test",
        "nowhere",
        "not known",
        1e6,
        Ceilings(1e9, 1e12, tile=4),
        ModelTables(measured or {}),
        links=links,
    )


def make_cost(topology: Topology) -> ProfileCost:
    return ProfileCost(profile(), SPEC, topology)


def make_engine(
    policy: Policy,
    executor: SimExecutor,
    *,
    batch: int = 4,
    max_tokens: int = 64,
    num_blocks: int = 400,
    asynchronous: bool = False,
) -> Engine:
    limits = Limits(batch, max_tokens, 256, tile=4, num_stages=executor.num_stages)
    return Server(executor, limits, executor.cost, KVSize(num_blocks, 4), asynchronous).engine(policy)


def make_executor(num_stages: int, tensor_parallel: int = 1, host_seconds: float = 0.0) -> SimExecutor:
    return SimExecutor(make_cost(Topology(tensor_parallel, num_stages)), HostTime(host_seconds))
