"""Operations access the memory that they declare: every tensor operation is watched, in whole runs.

The race checker sees only declarations (`accesses`), so a wrong one would hide races from it.
"""

import random
from functools import partial
from typing import Any

import pytest
import torch
from accesses import Declarations, Items, block_kind
from any_order import AnyOrderStream, Order
from races import CheckedStreams, Checker, memory
from rig import stress
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.runtime.streams import Operation, Streams, stream_names

BLOCKS = [block_kind(stage) for stage in (0, 1)]


class Watch(TorchDispatchMode):
    """Records the memory and the KV blocks that tensor operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.blocks_read: set[int] = set()
        self.indices_written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, torch.Tensor) and not view:
                written = argument.alias_info is not None and argument.alias_info.is_write
                (self.writes if written else self.reads).add(memory(value))
        if func is torch.ops.aten.index.Tensor and args[0].dim() == 4:  # [blocks + 1, block size, kv heads, head dim]
            self.blocks_read |= set(args[1][0].flatten().tolist())
        if func is torch.ops.aten.index_copy_.default:
            self.indices_written |= set(args[2].tolist())
        return func(*args, **(kwargs or {}))


class WatchedStream(AnyOrderStream):
    """Compares the accesses of each operation with its declaration."""

    checker: Checker
    block_size = 4

    def run(self, operation: Operation) -> None:
        declared = self.checker.declarations.of(operation)
        buffers = [{memory(part) for part in parts if isinstance(part, torch.Tensor)} for parts in declared]
        blocks = [
            {
                number
                for part in parts
                if isinstance(part, Items) and part.kind in BLOCKS
                for number in part.numbers.tolist()
            }
            for parts in declared
        ]
        super().run(partial(self.compare, operation, *buffers, *blocks))

    def compare(
        self, operation: Operation, reads: set[int], writes: set[int], old_blocks: set[int], new_blocks: set[int]
    ) -> None:
        with Watch() as watch:
            operation()
        assert self.names(watch.writes) == self.names(writes)
        assert self.names(watch.reads - writes) == self.names(reads - writes)
        assert {index // self.block_size for index in watch.indices_written} == new_blocks
        # Rows are read up to the longest context of the batch and masked beyond their own: a superset.
        assert old_blocks <= watch.blocks_read | new_blocks

    def names(self, addresses: set[int]) -> set[str]:
        known: Any = self.checker.names
        return {known[address] for address in addresses if address in known}


def watched(numbers: random.Random, num_stages: int = 1) -> Streams:
    order, checker = Order(numbers, every=8), Checker(["the host"])
    streams = [WatchedStream(name, order) for name in stream_names(num_stages)]
    for stream in streams:
        stream.checker = checker
    made = CheckedStreams.of(streams)
    made.checker = checker
    return made


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_operations_touch_what_they_declare(asynchronous: bool, num_stages: int) -> None:
    for seed in range(4 // num_stages):
        streams = partial(watched, num_stages=num_stages)
        stress(streams, seed, asynchronous=asynchronous, num_stages=num_stages).run()


def test_a_wrong_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Declarations.of
    monkeypatch.setattr(Declarations, "of", lambda self, operation: of(self, operation)._replace(writes=()))
    with pytest.raises(Exception, match="slot 0's buffer"):
        stress(watched, 0).run()
