"""Communication between GPUs: all-reduces within a pipeline stage, and hidden states sent from one stage to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from cbatch.errors import ProfileError
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.roofline import Seconds
from cbatch.sim.schema import NumGpus, TableColumns

ByBytes = Annotated[Seconds, TableColumns("bytes", positive=True, link=True)]
TO_ADD = "with bytes and seconds, to the profile's file (docs/adding.md, A GPU)"
_OR_MEASURED = f"{TO_ADD}, or choose hardware whose links were measured"


@dataclass(frozen=True, slots=True)
class Links:
    """Seconds against bytes: tables in a file, or closed forms (`Affine`) from a program.

    all_reduce: measured, by number of GPUs; each GPU contributes the table's bytes.
    within_node, between_nodes: sends from one GPU to another. kv_blocks: copies of KV blocks within a node, from the cache of one replica to
        that of another; None: as `within_node`. delay: by which they lengthen the iterations of the sender, whose multiprocessors copy them;
        None: not at all. to_host, from_host: copies of a KV block between a GPU and pinned host memory.
    """

    all_reduce: Mapping[NumGpus, ByBytes] = field(default_factory=dict)
    within_node: ByBytes | None = None
    between_nodes: ByBytes | None = None
    kv_blocks: ByBytes | None = None
    delay: ByBytes | None = None
    to_host: ByBytes | None = None
    from_host: ByBytes | None = None

    def all_reduce_of(self, num_gpus: int, profile: str) -> tuple[Seconds, bool]:
        """Returns the seconds of an all-reduce, and whether they are estimated. Raises ProfileError if none was measured.

        A ring sends 2 (n - 1) / n of the bytes over each link. An unmeasured number of GPUs is estimated in that proportion from
        the nearest measured number.
        """
        if num_gpus in self.all_reduce:
            return self.all_reduce[num_gpus], False
        others = [measured for measured in self.all_reduce if measured > 1]
        if not others:
            problem = f"hardware={profile} has no all-reduce times, tensor_parallel={num_gpus} needs them"
            raise ProfileError(f"{problem}; add links.all_reduce.{num_gpus}, {_OR_MEASURED}")
        nearest = min(others, key=lambda measured: abs(measured - num_gpus))
        known = self.all_reduce[nearest]
        if not isinstance(known, PiecewiseLinear):
            problem = f"hardware={profile} has a formula for all-reduces of {nearest} GPUs, which does not hold for {num_gpus}"
            raise ProfileError(f"{problem}; add links.all_reduce.{num_gpus}")
        return known.scaled((1 - 1 / num_gpus) / (1 - 1 / nearest)), True

    def of_host(self, num_bytes: float, profile: str) -> tuple[float, float]:
        """Returns the seconds of a copy to host memory, and of one from it. Raises ProfileError if they are not in the profile."""
        if self.to_host is None or self.from_host is None:
            key = "to_host" if self.to_host is None else "from_host"
            problem = f"hardware={profile} has no times of copies between GPU and host, which kv.host_tokens and view.cost need"
            raise ProfileError(f"{problem}; add links.{key}, {_OR_MEASURED}")
        return self.to_host.at(num_bytes), self.from_host.at(num_bytes)

    def to_next_stage(self, leaves_node: bool, profile: str) -> Seconds:
        """Returns the seconds of a send to the next stage's GPU. Raises ProfileError if the link was not measured."""
        link = self.between_nodes if leaves_node else self.within_node
        if link is None:
            where = "between nodes" if leaves_node else "within a node"
            problem = f"hardware={profile} has no send times {where}, which pipeline_stages and roles need"
            if leaves_node:
                raise ProfileError(f"{problem}; give backend.network in GB/s, or add links.between_nodes, {TO_ADD}")
            raise ProfileError(f"{problem}; add links.within_node, {_OR_MEASURED}")
        return link
