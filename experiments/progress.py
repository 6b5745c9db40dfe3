"""A progress bar over the requests of a run. A step costs a clock read; the engine is read at most ten times per second."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Never

from cbatch import Engine

if TYPE_CHECKING:
    from tqdm import tqdm

Setting = Literal["on", "off", "auto"]

_INTERVAL = 0.1  # seconds between updates
_DELAY = 2.0  # seconds before the bar shows


def size() -> dict[str, Any]:
    """Returns arguments of tqdm, which prints nothing where a terminal does not state its size."""
    columns, lines = get_terminal_size()
    return {"ncols": columns - 1, "nrows": lines - 1}


def memory_text() -> str:
    """Returns the most memory that this process has taken so far; nothing on Windows, which lacks the call."""
    if sys.platform == "win32":
        return ""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return f", {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB of memory"


@contextmanager
def progress(setting: Setting, num_requests: int) -> Iterator[Callable[..., None]]:
    """Yields a function for `Engine.run(on_step=...)`, which of a stream also takes the number of requests not yet submitted.

    With "auto" the bar shows if stderr is a terminal.
    """
    if setting == "off" or (setting == "auto" and not sys.stderr.isatty()):
        yield lambda engine, to_come=0: None
        return
    from tqdm import tqdm  # loaded only if shown

    layout = "{n_fmt}/{total_fmt} requests |{bar}| {elapsed} elapsed, {remaining} left{postfix}"
    look = {"mininterval": 0, "miniters": 0, "leave": False, **size()}
    with tqdm(total=num_requests, bar_format=layout, delay=_DELAY, **look) as bar:
        yield _Watch(bar)


class _Watch:
    def __init__(self, bar: "tqdm[Never]") -> None:
        self.bar = bar
        self._next = 0.0
        self._num_steps = self._num_tokens = 0

    def __call__(self, engine: Engine, to_come: int = 0) -> None:
        now = perf_counter()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        steps = engine.record.steps
        for step in steps[self._num_steps :]:
            self._num_tokens += step.num_prefill_tokens + step.num_decode_tokens
        self._num_steps = len(steps)
        seconds = engine.executor.now()
        if seconds > 0:
            taken = steps and steps[0].iteration  # the results of a streamed run are forgotten
            rate = f"{seconds:,.0f} s simulated" if taken else f"{self._num_tokens / seconds:,.0f} tokens/s"
            self.bar.set_postfix_str(f"{rate}{memory_text()}", refresh=False)
        self.bar.update((self.bar.total or 0) - to_come - engine.num_unfinished - self.bar.n)
