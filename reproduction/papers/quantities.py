"""The quantities of claims/*.yaml that several figures share: a value of a figure's data, or measured on the machine, `at`."""

from collections.abc import Callable, Iterable
from math import nan
from typing import Any, Literal

import pandas as pd

from cbatch import BatchShape
from reproduction.papers.frames import select
from reproduction.papers.steady import Load, Scheme, SteadyState, closed_form_gain


def value(
    data: pd.DataFrame, of: str = "value", take: Literal["item", "max", "min", "mean"] = "item", **rows: object
) -> float:
    """The value of a column in the one row of a figure's data with these values or, by `take`, of several rows; NaN without any."""
    chosen = select(data, **rows)[of]
    return nan if chosen.empty else float(getattr(chosen, take)())


def gain(at: SteadyState, scheme: Scheme = "sarathi", chunk: int = 256, **load: Any) -> float:
    """Throughput over the baseline's."""
    return at.gain(scheme, Load(**load), chunk)


def closed_form(at: SteadyState, chunk: int = 256, **load: Any) -> float:
    """Sarathi's gain computed by hand."""
    return closed_form_gain(at.cost, Load(**load), chunk)


def share_lost_unaligned(at: SteadyState, chunk: int = 256, **load: Any) -> float:
    """Share of Sarathi's gain that is lost when its chunks are not aligned to tiles."""
    aligned, unaligned = gain(at, "sarathi", chunk, **load), gain(at, "sarathi_unaligned", chunk, **load)
    return (aligned - unaligned) / (aligned - 1)


def _best(
    at: SteadyState, outputs: Iterable[int], length: int, batch: int, scheme: Scheme = "sarathi", chunk: int = 256
) -> tuple[float, float]:
    """(P:D, gain) where the gain is highest among the given output lengths."""
    loads = [Load(length, batch, length / output - 1) for output in outputs]
    return max(((load.pd_ratio, at.gain(scheme, load, chunk)) for load in loads), key=lambda pair: pair[1])


def peak_pd_ratio(at: SteadyState, **setting: Any) -> float:
    return _best(at, **setting)[0]


def peak_gain(at: SteadyState, **setting: Any) -> float:
    return _best(at, **setting)[1]


def decode_speedup(at: SteadyState, length: int, batch: int, chunk: int = 256) -> float:
    """Seconds per decode in a decode-only iteration over marginal seconds in a mixed one (Table 2), at full context."""
    predict = at.cost.predict
    alone = predict(BatchShape((), batch, batch * length)) / batch
    prefix = length // 2 // chunk * chunk  # a chunk in the middle of its prompt
    mixed = predict(BatchShape(((chunk - batch + 1, prefix),), batch - 1, (batch - 1) * length))
    return alone * (batch - 1) / (mixed - predict(BatchShape(((chunk, prefix),))))


def prefill_slowdown(at: SteadyState, chunk: int, length: int = 1024) -> float:
    """Seconds of a prompt in chunks over those of the whole prompt."""
    return slowdown(at.cost.predict, chunk, length)


def prefill_loss(at: SteadyState, chunk: int, length: int = 1024) -> float:
    """Share of prefill throughput that chunks cost."""
    return 1 - 1 / prefill_slowdown(at, chunk, length)


def attention_slowdown(at: SteadyState, chunk: int, length: int = 1024) -> float:
    """Like `prefill_slowdown`, of attention alone."""
    return slowdown(lambda shape: at.cost.parts(shape).attention, chunk, length)


def iteration_ms(at: SteadyState, prompt: int = 0, decodes: int = 0, context: int = 1024) -> float:
    return 1e3 * at.cost.predict(BatchShape(((prompt, 0),) if prompt else (), decodes, decodes * context))


def cost_ratio(at: SteadyState, decodes: int, length: int = 1024) -> float:
    """A decode's linear and attention seconds over those of a prompt token (Fig 3)."""
    prompt, decode = map(at.cost.parts, (BatchShape(((length, 0),)), BatchShape((), decodes, decodes * length)))
    return (decode.linear + decode.attention) / decodes / ((prompt.linear + prompt.attention) / length)


def slowdown(seconds: Callable[[BatchShape], float], chunk: int, length: int) -> float:
    """What a prompt takes in chunks, by this measure of an iteration, over what it takes whole."""
    return sum_of_chunks(seconds, chunk, length) / seconds(BatchShape(((length, 0),)))


def sum_of_chunks(seconds: Callable[[BatchShape], float], chunk: int, length: int) -> float:
    return sum(seconds(BatchShape(((min(chunk, length - done), done),))) for done in range(0, length, chunk))
