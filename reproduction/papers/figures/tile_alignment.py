"""Ablation of SARATHI's tile alignment (arXiv 2308.16369, section 4.4): chunks that fill whole tiles, or do not.

With B = 18 and C = 256, adding decodes on top of the chunk makes 273 tokens: a third tile of 128, nearly empty. The
paper prints the step (Fig 7) but not its cost end to end.
"""

from collections.abc import Callable, Iterator

from reproduction.experiment_files import composed, swept_numbers
from reproduction.papers.frames import Row, data_frame
from reproduction.papers.machines import Machines
from reproduction.papers.steady import Scheme, load_of

EXPERIMENT = "tile_alignment"
SCHEMES: dict[str, Scheme] = {
    "aligned: C tokens with the decodes": "sarathi",
    "unaligned: C tokens and the decodes": "sarathi_unaligned",
}
HARDWARE = ("a6000", "h200", "gpu")
REAL_RATIOS = (5, 14, 28, 50)
"""P:D where every point is served with real tokens."""


@data_frame("hardware", "series", "pd_ratio", "value")
def measure(machines: Machines, say: Callable[[str], None]) -> Iterator[Row]:
    """Throughput over the baseline's against P:D."""
    chunk = composed(EXPERIMENT).keys["chunk"]
    for hardware, at in machines.available(HARDWARE):
        say(hardware)
        for ratio in REAL_RATIOS if machines.are_real else swept_numbers(EXPERIMENT, "workload.pd_ratio"):
            load = load_of(EXPERIMENT, ratio)
            for series, scheme in SCHEMES.items():
                yield hardware, series, ratio, at.gain(scheme, load, chunk)
