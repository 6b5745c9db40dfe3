"""Drafts on the device: carried over and made without the host."""

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from guesses import Guesses
from schedules import UnitCost
from tiny_models import LLAMA, Reference
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch import CbatchError, Limits, Sampling, Server
from cbatch.drafts import Drafter
from cbatch.kv import Copies, KVSize
from cbatch.runtime import cpu
from cbatch.runtime.attention import PagedCache
from cbatch.runtime.batch import Extents, Shape, Work, device_views
from cbatch.runtime.carry import Drafting, TextProposer
from cbatch.runtime.draft_model import ModelProposer
from cbatch.runtime.host_memory import HostBlocks
from cbatch.runtime.options import Options
from cbatch.runtime.sampling import uniform
from cbatch.runtime.slots import RankSlot
from cbatch.runtime.transfers import copy_blocks
from policies.orca import Orca


class OnDevice(TorchDispatchMode):
    """Raises where an operation takes a tensor of the host, or makes one: in a captured graph either is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
        hosts = [value for value in flat if isinstance(value, torch.Tensor) and value.device.type == "cpu"]
        assert not hosts, f"{func} touches a tensor of the host"
        return result


class Zeros:
    """Stands for a model whose kernels need a GPU."""

    cache, hidden_size = SimpleNamespace(size=KVSize(10, 16)), 8

    def steps(self, inputs: torch.Tensor, batch: Any, bounds: Any, leaving: Any = None) -> Iterator[None]:
        yield
        return inputs.new_zeros((len(batch.context_lens), 96))

    def choose(self, logits: torch.Tensor, out: torch.Tensor) -> Iterator[None]:
        yield from ()
        out.copy_(logits.argmax(-1))


@pytest.mark.parametrize("num_tokens", [8, 40])
@pytest.mark.parametrize(
    "drafter", [Guesses([Reference([1, 2], Sampling(), [3, 4])]), Zeros()], ids=lambda drafter: type(drafter).__name__
)
def test_a_graph_can_capture_drafts(drafter: Any, num_tokens: int) -> None:
    """Nothing is read from the device or copied to it, and no shape depends on values: a device without memory stands for a GPU."""
    limits, meta = Limits(4, 64, 64, max_drafts=3), torch.device("meta")
    work = Work(shape := Shape(num_tokens, 8, 4, 3), Extents(num_tokens - 7, 64, 4), False)
    texts = torch.zeros((11, 16), dtype=torch.int32, device=meta)
    rank = RankSlot(0, Shape(64, 16, 4), meta, 8)
    rank.arriving, rank.arriving_guesses, rank.guesses = torch.zeros((3, 1 + 16 + 3), dtype=torch.int32, device=meta)
    proposer = ModelProposer(drafter) if isinstance(drafter, Zeros) else TextProposer(drafter, texts, limits)
    batch, drafting = device_views(rank.device, shape), Drafting(proposer, texts, limits)
    drafting.begin(batch, rank, work)  # what a drafter keeps is made before the capture
    with OnDevice():
        inputs = drafting.begin(batch, rank, work)
        uniform(batch.seeds, batch.context_lens)
    assert inputs.shape == (num_tokens,) and inputs.device == meta


def test_the_tokens_of_a_block_go_where_it_goes() -> None:
    """To host memory and back, and to another cache; drafts are looked up in them there."""
    here, there = (PagedCache(LLAMA, KVSize(number, 3, 2), torch.device("cpu")) for number in (4, 6))
    here.texts.copy_(torch.arange(15).reshape(5, 3))
    blocks = HostBlocks(here)
    blocks.copy(Copies([(1, 0), (2, 1)], []))
    here.texts[1:3] = -1
    blocks.copy(Copies([], [(3, 0), (0, 1)]))
    assert here.texts.tolist() == [[6, 7, 8], [-1] * 3, [-1] * 3, [3, 4, 5], [12, 13, 14]]
    copy_blocks([[here]], [[there]], ([3, 0], [5, 2]))
    assert there.texts[[5, 2]].tolist() == [[3, 4, 5], [6, 7, 8]] and there.texts.count_nonzero() == 6


FAULTS: dict[str, Any] = {
    "propose() raised KeyError: 'x' (": lambda tokens, k: {}["x"],
    "propose() returned array(None": lambda tokens, k: None,
    "propose() returned array([1, 2, 3, 4]); return an int32 array of at most 3 tokens": lambda tokens, k: [1, 2, 3, 4],
    "proposed tokens from -5 to ": lambda tokens, k: np.array([-5], np.int32),
    "to 1000000000; the vocabulary is from 0 to ": lambda tokens, k: np.array([10**9], np.int32),
    "to 2147483647; the vocabulary is from 0 to ": lambda tokens, k: np.array([10**12]),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_of_a_drafter_is_a_line_that_names_it(message: str) -> None:
    class Mine(Drafter):
        def propose(self, tokens: Any, k: int) -> Any:
            return FAULTS[message](tokens, k)

    limits, kv = Limits(2, 16, 32, max_drafts=3), KVSize(8, 8)
    executor = cpu.build(LLAMA, limits, kv, Options(drafter=Mine()))
    with closing(executor), pytest.raises(CbatchError) as caught:
        Server(executor, limits, UnitCost(), kv).serve(Orca(), [Reference([1, 2], Sampling(), []).request(0, 4)])
    assert str(caught.value).startswith("drafter Mine: ") and message in str(caught.value)
