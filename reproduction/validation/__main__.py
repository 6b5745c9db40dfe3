"""`python -m reproduction.validation NAME [key=value ...]`: compare simulation with real runs."""

import sys
from collections.abc import Sequence

from reproduction.benchmark import Benchmark, run_benchmark

_ABOUT = {
    "fidelity": "simulated runs against real ones, by policy; measured=FILE of kept runs needs no GPU",
    "capacity": "capacities with real tokens beside simulated ones, by policy; measured=FILE of kept runs needs no GPU",
    "sessions": "conversations with a prefix cache, served and simulated; measured=FILE of such runs needs no GPU",
    "jobs": "chats and agents in closed loop, served and simulated, by session; measured=FILE of such runs needs no GPU",
    "apart": "prefill and decode on two GPUs, against two replicas that do both, served and simulated; measured=FILE needs no GPU",
    "handover": "how long a request waits on its way from prefill to decode on two GPUs, served and simulated",
    "transfer": "one transfer between two GPUs, beside a plain copy of as many bytes, and the host's share of its time",
    "drafts": "drafts of n-grams at three loads, served and simulated: errors, and the best number of drafts; measured=FILE needs no GPU",
    "steady": "whether chats begin in a steady state: the first and the last third of a simulated hour, by seed",
    "long_prompts": "long prompts, whole and in chunks, alone and beside decodes, served and simulated; measured=FILE needs no GPU",
    "energy": "joules per token of an H100 that ML.ENERGY measured, beside a fit of its power and simulation",
    "power": "joules per token of this GPU, by its energy counter, beside a fit to other runs and simulation",
    "ranking": "how often simulation names the winner of a pair of settings that reality names, from stored comparisons",
    "recorded": "vLLM's runs that its scheduler or its client has measured, simulated, beside rivals' predictions; measured=FOLDER",
    "rivals": "vLLM's runs that others recorded, simulated from published tables, beside rivals' predictions",
}
COMPARISONS = {
    name: Benchmark(about, f"reproduction.validation.{name}", needs_gpu=False) for name, about in _ABOUT.items()
}


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run_benchmark(arguments, COMPARISONS, str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
