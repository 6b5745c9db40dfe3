"""A small model on made-up GPUs: every part of a simulated cluster at sizes that can be checked by hand."""

from cbatch import Engine, Limits, Policy, Server
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.attention import AttentionRates
from cbatch.sim.cost import ProfileCost
from cbatch.sim.executor import SimExecutor
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.links import Links
from cbatch.sim.measured import HostTime, Measured, MeasuredModel
from cbatch.sim.profile import Profile
from cbatch.sim.roofline import Affine, Ceilings

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
    within_node=Affine(1e-6, 1 / 1e9),
    between_nodes=Affine(1e-5, 1 / 1e8),
    to_host=Affine(1e-6, 1 / 1e9),
    from_host=Affine(2e-6, 1 / 2e9),
)


def profile(
    links: Links = LINKS, measured: dict[int, Measured] | None = None, rates: AttentionRates | None = None
) -> Profile:
    """measured: tables of one layer of `SPEC`, by tensor-parallel degree."""
    return Profile(
        name="made-up",
        hardware="GPUs of a test",
        source="nowhere",
        error="not known",
        memory_bytes=1e6,
        ceilings=Ceilings(1e9, 1e12, tile=4),
        attention=rates,
        links=links,
        models={SPEC.name: MeasuredModel(num_layers=1, tensor_parallel=measured)} if measured else {},
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
