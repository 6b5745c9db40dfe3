"""Strategies for the settings of a run, a few of which are spoiled."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from spoiled_inputs import spoiled_json, values

from experiments.settings.compose import compose

FEW = ("backend=sim", "batch=3", "workload.num_requests=6")
SMALL = (*FEW, "workload.length=64")
QUEUE = (*FEW, "workload.lengths.min_length=16", "workload.lengths.max_length=64")
TRACE = (*FEW, "workload.path=trace.csv")
TABLE = (*FEW, "workload.lengths.path=table.csv")
BASES = (
    SMALL,
    ("policy=request_level", "runtime=sync", *SMALL),
    ("policy=sarathi_serve", "chunking=pd_aware", *SMALL),
    ("policy=policies.orca.Orca", "chunking=fixed", *SMALL),
    ("policy=longest_first", "workload=open_loop", *QUEUE),
    ("policy=orca", "workload=zipf", *QUEUE),
    ("policy=prefill_first", "workload=azure_conv", *TRACE),
    ("workload=sharegpt", *TABLE),
)
"""Runs of a few milliseconds, which are then spoiled."""

QUICK = ("policy=orca", "workload=open_loop", *QUEUE, "predictor=none", "slo.ttft=0.01")
SEARCHES = ((*QUICK, "requests=2000", "replications=20", "cores=1"),)
CELLS = ((*QUICK, "slo=none", "workload.load=0.7", "bounds=false"),)
IN_VLLM = (("policy=orca",), ("policy=sarathi_serve", "chunk=64"), ("policy=slai", "model=llama-3.1-8b"))


def keys_of(config: Any, prefix: str = "") -> Iterator[str]:
    """Keys of sections and of what is in them."""
    for key, value in config.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{key}.")


@cache
def composed(base: tuple[str, ...], name: str = "config") -> dict[str, Any]:
    return dict(compose(*base, name=name).keys)


@st.composite
def command_lines(draw: st.DrawFn, bases: Sequence[tuple[str, ...]] = BASES, name: str = "config") -> list[str]:
    """Settings of a valid command, one to three of them spoiled. name: of the file with its keys."""
    base = draw(st.sampled_from(bases))
    names = [
        *keys_of(composed(base, name)),
        *["nothing", "policy.x", "workload.a.b", ".", "ä", "hydra.job.name", "chunk.x", "x[0]"],
        "",
    ]
    lines = list(base)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        sign = draw(st.sampled_from(("", "", "", "", "+", "++", "~")))
        equals = draw(st.sampled_from(("=", "=", "=", "=", "")))
        lines.append(f"{sign}{draw(st.sampled_from(names))}{equals}{draw(values) if equals else ''}")
    return lines


configurations = (
    st.sampled_from(BASES).map(composed).flatmap(spoiled_json).filter(lambda config: isinstance(config, dict))
)
"""Composed settings, spoiled after the command line was parsed, so that any key can have any value."""
