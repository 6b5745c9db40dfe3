"""Engines that share cards: all start at once, which takes minutes, and then run one after the other on each card."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def in_turn(path: str) -> Iterator[Callable[[], None]]:
    """Yields a function to call once started: it returns when no process that names the same file starts, or runs on this card.

    The turn ends with the block, and with the process. path: of a file that is made; empty for a process on its own.
    """
    if not path:
        yield lambda: None
        return
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    with open(path, "w", encoding="utf-8") as starting, open(f"{path}.{card}", "w", encoding="utf-8") as running:
        fcntl.flock(starting, fcntl.LOCK_SH)

        def wait() -> None:
            print("started; waits for its turn", flush=True)
            fcntl.flock(starting, fcntl.LOCK_EX)  # gives up the shared lock first: two that wait don't block each other
            fcntl.flock(starting, fcntl.LOCK_UN)
            fcntl.flock(running, fcntl.LOCK_EX)

        yield wait
