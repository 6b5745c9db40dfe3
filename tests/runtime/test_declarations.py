"""Operations access the memory that they declare: every tensor operation is watched, in whole runs.

The race checker sees only declarations (`accesses`), so a wrong one would hide races from it.
"""

from functools import partial
from typing import Any

import pytest
import torch
from accesses import Declarations, Items, block_kind
from any_order import any_order
from races import Checker, memory
from rig import Rig, stress
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.runtime.streams import Operation

BLOCKS = [block_kind(stage) for stage in (0, 1)]
BLOCK_SIZE = 4


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
        named = [(kwargs or {}).get(argument.name) for argument in func._schema.arguments[len(args) :]]
        for argument, value in zip(func._schema.arguments, [*args, *named], strict=True):
            if isinstance(value, torch.Tensor) and not view:
                written = argument.alias_info is not None and argument.alias_info.is_write
                (self.writes if written else self.reads).add(memory(value))
        if func is torch.ops.aten.index.Tensor and args[0].dim() == 4:  # [blocks + 1, block size, kv heads, head dim]
            self.blocks_read |= set(args[1][0].flatten().tolist())
        if func is torch.ops.aten.index_copy_.default:
            self.indices_written |= set(args[2].tolist())
        return func(*args, **(kwargs or {}))


def watched(num_stages: int, seed: int = 0, *, asynchronous: bool = True, max_drafts: int = 0) -> Rig:
    """A run in which the accesses of each operation are compared with its declaration."""
    rig = stress(any_order, seed, asynchronous=asynchronous, num_stages=num_stages, max_drafts=max_drafts)
    checker = Checker(["the host"])
    checker.watch(rig.slots)
    for stream in rig.executor._streams.all:
        stream.run = partial(run, stream.run, checker)  # type: ignore[method-assign]
    return rig


def run(enqueue: Any, checker: Checker, operation: Operation) -> None:
    declarations = checker.declarations
    enqueue(partial(compare, operation, checker.names, declarations.of(operation), declarations._has_drafts))


def compare(operation: Operation, names: dict[Any, str], declared: Any, has_drafts: bool) -> None:
    buffers = [{memory(part) for part in parts if isinstance(part, torch.Tensor)} for parts in declared]
    reads, writes = buffers
    items = [[part for part in parts if isinstance(part, Items) and part.kind in BLOCKS] for parts in declared]
    old_blocks, new_blocks = ({number for part in parts for number in part.numbers} for parts in items)
    with Watch() as watch:
        operation()
    named = lambda addresses: {names[address] for address in addresses if address in names}  # noqa: E731
    assert named(watch.writes) == named(writes)
    assert named(watch.reads - writes) == named(reads - writes)
    written = {index // BLOCK_SIZE for index in watch.indices_written}
    assert written == new_blocks or (has_drafts and written < new_blocks)  # up to all drafts in flight are rejected
    # Rows are read up to the longest context of the batch and masked beyond their own: a superset.
    assert old_blocks <= watch.blocks_read | new_blocks


@pytest.mark.parametrize(
    ("asynchronous", "num_stages", "max_drafts"),
    [
        pytest.param(False, 1, 0, id="sync"),
        pytest.param(True, 2, 0, id="async pipeline", marks=pytest.mark.long),
        pytest.param(True, 2, 3, id="async pipeline with drafts", marks=pytest.mark.long),
    ],
)
def test_operations_touch_what_they_declare(asynchronous: bool, num_stages: int, max_drafts: int) -> None:
    watched(num_stages, num_stages, asynchronous=asynchronous, max_drafts=max_drafts).run()


def test_a_wrong_declaration_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Declarations.of
    monkeypatch.setattr(Declarations, "of", lambda self, operation: of(self, operation)._replace(writes=()))
    with pytest.raises(AssertionError, match="slot 0's buffer"):
        watched(1).run()
