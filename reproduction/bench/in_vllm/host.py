"""The host's time in vLLM's scheduler per iteration, by vLLM's own rule and a policy in turns: each pass makes a pair.

What else a machine does moves such times by more than half from one second to the next: within a pass, the rules alternate every few iterations.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cbatch import Request
from experiments.settings.servers import equal_requests
from experiments.store.intervals import mean_of
from experiments.store.provenance import spread
from reproduction.bench.in_vllm.model import BATCH, VLLM

PROMPT, PASSES, STRETCH = 64, 20, 16
RUNNING = (32, 32, 32, 32, BATCH)
"""By pass, again and again."""
NEW = {32: 160, BATCH: 320}
"""Tokens of each: many requests do not begin at once, and only iterations of all of them are timed."""

Turns = dict[str, dict[str, dict[int, dict[str, float]]]]
"""What a turn measured (`turns`), by running requests, side, and pass."""


def take_turns(
    serve: Callable[[str, list[Request], int], object], policy: str, times: Path, vocabulary: int
) -> Iterator[Turns]:
    """Yields the turns so far after each pass. `times` is the file that the scheduler writes."""
    turns: Turns = defaultdict(lambda: defaultdict(dict))
    for number in range(PASSES):
        running = RUNNING[number % len(RUNNING)]
        serve(policy, equal_requests(running, PROMPT, NEW[running], vocabulary), STRETCH)
        for count, sides in json.loads(times.read_text())["host"].items():
            for side, figures in sides.items() if int(count) in RUNNING else ():
                turns[count][side][number] = figures
        for side, by_pass in turns[str(running)].items():
            print(f"{running:4} {side:30} {by_pass.get(number)}", flush=True)
        yield turns


def pair(turns: Turns) -> dict[str, Any]:
    """Returns, by side and running requests, spreads over turns, and of the ratio to vLLM's own rule over pairs, with its mean's interval."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for running, by_side in turns.items():
        for side in [side for side in by_side if side != VLLM]:
            own, other = by_side.get(VLLM, {}), by_side[side]
            both = sorted(own.keys() & other.keys())
            for what in ("milliseconds", "schedule", "cpu") if len(both) > 1 else ():
                if not all(own[number][what] for number in both):
                    continue  # a coarse clock
                ratios = [other[number][what] / own[number][what] for number in both]
                spreads = {VLLM: spread([own[number][what] for number in both])}
                spreads |= {"policy": spread([other[number][what] for number in both]), "ratio": spread(ratios)}
                found[side][running][what] = spreads | {"interval": mean_of(ratios).ends()}
    return found


def report(turns: Turns) -> None:
    """Prints of `pair` both sides' medians and the ratio, for both calls of the scheduler, for `schedule` alone, and on a CPU."""
    for side, by_running in pair(turns).items():
        for running, by_what in by_running.items():
            for what, found in by_what.items():
                times = f"{found['policy']['median']:.3f} ms instead of {found[VLLM]['median']:.3f}"
                ratio, (low, high) = found["ratio"], found["interval"]
                print(f"    {side}, {running} running, {what}: {times}; ratio {ratio['median']:.3f}", end=", ")
                print(
                    f"mean {(low + high) / 2:.3f} (95%: {low:.3f} to {high:.3f}), {ratio['repeats']} pairs", flush=True
                )
