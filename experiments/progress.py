"""Shows the progress of a run: a bar on a terminal, otherwise one line every 30 s. Each step costs one clock read."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from time import time
from typing import TYPE_CHECKING, Any, Literal

from cbatch import Engine

if TYPE_CHECKING:
    from tqdm import tqdm

Setting = Literal["on", "off", "auto"]

_INTERVAL = 0.1  # seconds between updates of a bar
_DELAY = 2.0  # seconds before a run's bar appears
_BETWEEN_LINES = 30.0  # seconds between lines if stderr is no terminal, and before the first line
_LAYOUT = "{{n_fmt}}/{{total_fmt}} {} |{{bar}}| {{elapsed}}, {{remaining}} left{{postfix}}"
_OPEN = "{{n_fmt}} {} | {{elapsed}}{{postfix}}"  # where the number of items is unknown


class _Lines:
    """A file for tqdm that prints each state of a bar as a line on stderr."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)


def bar(items: Iterable[Any] | None = None, *, delay: float, terminal: bool | None = None, **look: Any) -> "tqdm[Any]":
    """Returns a tqdm bar, which estimates the remaining time from the mean speed so far.

    Args:
        delay: seconds before a bar appears. terminal: False prints a line every 30 s instead; None: whether stderr is a terminal.
        items, look: arguments of tqdm.
    """
    from tqdm import tqdm  # loaded only if shown

    if sys.stderr.isatty() if terminal is None else terminal:
        columns, lines = get_terminal_size()  # tqdm prints nothing if the terminal's size is unknown
        look |= {"mininterval": _INTERVAL, "delay": delay, "ncols": columns - 1, "nrows": lines - 1}
    else:
        look |= {"mininterval": _BETWEEN_LINES, "delay": _BETWEEN_LINES, "file": _Lines(), "ascii": " #"}
    # no smoothing: tqdm's smoothed rate ignores the time of updates in which nothing ended
    return tqdm(items, miniters=0, smoothing=0, leave=False, **look)


def progress_of(setting: Setting, items: Iterable[Any], number: int, noun: str) -> Iterable[Any]:
    """Returns the items; their number is shown while they are taken, as `progress` shows requests."""
    if setting == "off" or not number:
        return items
    return bar(items, total=number, delay=_DELAY, terminal=setting == "on" or None, bar_format=_LAYOUT.format(noun))


def memory_text() -> str:
    """Returns the process's peak memory so far as text; empty on Windows, which lacks the call."""
    if sys.platform == "win32":
        return ""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return f", {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB memory"


@contextmanager
def progress(setting: Setting, num_requests: int) -> Iterator[Callable[..., None]]:
    """Yields a callback for `Engine.run`.

    "auto" shows a bar if stderr is a terminal, and lines otherwise. Tokens per second are the mean so far of those computed, without
    what the prefix cache held; with replicas and in streamed runs the seconds are shown for which the server has served.
    """
    if setting == "off":
        yield lambda engine: None
        return
    watch = _Watch(num_requests, setting == "on" or sys.stderr.isatty())
    try:
        yield watch
    finally:
        if watch.bar is not None:
            watch.bar.close()


class _Watch:
    def __init__(self, num_requests: int, terminal: bool) -> None:
        self.bar: tqdm[Any] | None = None  # made when it is first shown
        self._num_requests, self._terminal, self._start = num_requests, terminal, time()
        self._next = self._start + (_DELAY if terminal else _BETWEEN_LINES)
        self._num_steps = self._num_tokens = 0

    def __call__(self, engine: Engine) -> None:
        now = time()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        if self.bar is None:
            layout = (_LAYOUT if self._num_requests else _OPEN).format("requests")
            self.bar = bar(total=self._num_requests or None, terminal=self._terminal, delay=_DELAY, bar_format=layout)
            self.bar.start_t = self.bar.last_print_t = self._start
        steps = engine.record.steps
        for step in steps[self._num_steps :]:
            self._num_tokens += step.num_prefill_tokens + step.num_decode_tokens
        self._num_steps = len(steps)
        seconds = engine.executor.now()
        if seconds > 0:
            taken = steps and steps[0].iteration  # a streamed run drops its results; a cluster has none yet
            speed = f"{self._num_tokens / seconds:,.0f} tokens/s computed"
            rate = speed if steps and not taken else f"{seconds:,.0f} s served"
            self.bar.set_postfix_str(f"{rate}{memory_text()}", refresh=False)
        self.bar.update(engine.arrivals.num_ended - self.bar.n)
