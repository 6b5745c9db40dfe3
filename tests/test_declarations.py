"""What operations declare is what they do: every tensor operation is watched, in whole runs.

The check of races sees declarations alone, so one that lies would blind it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from any_order import AnyOrderStream, Order
from rig import stress
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.runtime.checks.ownership import PAGE
from cbatch.runtime.streams import Items, Operation, Streams, Touched


class Watch(TorchDispatchMode):
    """Notes the memory that tensor operations read and write, and the KV pages among it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: set[int] = set()
        self.writes: set[int] = set()
        self.pages_read: set[int] = set()
        self.slots_written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, torch.Tensor) and not view:
                written = argument.alias_info is not None and argument.alias_info.is_write
                (self.writes if written else self.reads).add(memory(value))
        if func is torch.ops.aten.index.Tensor and args[0].dim() == 4:  # [pages + 1, page size, kv heads, head dim]
            self.pages_read |= set(args[1][0].flatten().tolist())
        if func is torch.ops.aten.index_copy_.default:
            self.slots_written |= set(args[2].tolist())
        return func(*args, **(kwargs or {}))


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class WatchedStream(AnyOrderStream):
    """Compares what each operation does with what was declared of it."""

    known: dict[int, str]  # memory that declarations are about, by address
    page_size: int

    def run(self, operation: Operation, reads: Touched = (), writes: Touched = ()) -> None:
        declared = [{memory(part) for part in parts if isinstance(part, torch.Tensor)} for parts in (reads, writes)]
        pages = [
            [part.numbers() for part in parts if isinstance(part, Items) and part.kind == PAGE]
            for parts in (reads, writes)
        ]
        super().run(lambda: self.compare(operation, *declared, *map(page_set, pages)))

    def compare(
        self, operation: Operation, reads: set[int], writes: set[int], old_pages: set[int], new_pages: set[int]
    ) -> None:
        with Watch() as watch:
            operation()
        assert self.names(watch.writes) == self.names(writes)
        assert self.names(watch.reads - writes) == self.names(reads - writes)
        assert {slot // self.page_size for slot in watch.slots_written} == new_pages
        # Rows are read up to the longest context of the batch and masked beyond their own: more than what matters.
        assert old_pages <= watch.pages_read | new_pages

    def names(self, addresses: set[int]) -> set[str]:
        return {self.known[address] for address in addresses if address in self.known}


def page_set(parts: list[np.ndarray]) -> set[int]:
    return {int(page) for part in parts for page in part}


class WatchedStreams(Streams):
    def name(self, tensor: torch.Tensor, name: str) -> None:
        for stream in self:
            stream.known[memory(tensor)] = name  # type: ignore[attr-defined]


def watched(numbers: random.Random) -> Streams:
    order = Order(numbers, every=8)
    streams = WatchedStreams(*(WatchedStream(name, order) for name in Streams._fields))
    for stream in streams:
        stream.known, stream.page_size = {}, 4
    return streams


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_operations_touch_what_they_declare(asynchronous: bool) -> None:
    for seed in range(4):
        stress(watched, seed, asynchronous=asynchronous).run()


def test_a_declaration_that_lies_is_found() -> None:
    rig = stress(watched, 0)
    download = rig.slots[0].download
    for slot in rig.slots:
        slot.download = download  # type: ignore[method-assign]
    with pytest.raises(Exception, match="slot 0's buffer"):
        rig.run()
