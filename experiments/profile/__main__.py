"""`python -m experiments.profile model=NAME [key=value ...]`: measure models on this machine's GPU, into a hardware profile.

    model        presets of conf/model, separated by commas
    batch        largest batches for which graphs are captured; iterations of the last one are measured in full, those of
                 the others to see what captured rows cost
    max_tokens   most tokens of an iteration           longest  most tokens of a request; by default the model's positions
    tensor_parallel   GPUs that share every layer; tables of other degrees are kept
    backend      cuda, or cpu for the plain runtime    output   the file; by default that of the hardware, in cbatch/sim/profiles

`python -m experiments.profile cpu model=NAME` measures this machine's CPU in seconds, for policies that read `view.cost`. The keys
are those of the model in `experiments.run`; without keys the model is that of backend=cpu. The profile is kept in ~/.cache/cbatch.

`python -m experiments.profile card` measures how fast this card is against the profile of its kind, in one to two minutes: factors of
iterations with prompts, of decodes alone, and of the host's launches without a graph. Runs with hardware=FILE are then predicted for this card.

    hardware     the profile; by default that of the card's kind      model  a model of the profile; default llama-3.1-8b
    output       the file; by default PROFILE-CARD, in cbatch/sim/profiles

`python -m experiments.profile copies` measures copies of KV blocks in seconds: between GPU and host memory, for `kv.host_tokens`, and between two GPUs, for roles.
The keys are those of `card`; without `output` the profile itself is written.

`python -m experiments.profile drafts` measures decodes with drafts of n-grams, in a minute or two, for their price in simulation. The keys are those of
`copies`, and `batch`, `longest` and `drafts`, the most of a request.

`python -m experiments.profile show hardware=NAME` prints where each entry of a profile comes from.

The file keeps the other models' tables. Interpolated times are compared with batches measured in between, and printed.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tabulate import tabulate

from cbatch.errors import check_installed
from cbatch.sim import PROFILES, load_profile
from cbatch.sim.profile_file import profile_content
from cbatch.sim.provenance import Place, kind_of
from experiments.settings.command_line import keyword_arguments, run
from experiments.store.claim import check_writable


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_profile, arguments, lambda: str(__doc__), composes=True, resume_hint="files written are complete")


_WAYS = {"card": "card:measure_card", "copies": "command:measure_copies"}
_WAYS |= {"cpu": "command:measure_cpu", "drafts": "command:measure_drafts"}
"""Functions by the first option, imported only where needed, as torch takes seconds; without one of these, models are measured."""


def _profile(*options: str) -> None:
    kind, *own = options
    if kind == "show":
        show(**keyword_arguments(show, own, "profile show"))
        return
    check_installed("real", "torch", "transformers")
    if kind not in _WAYS:
        own = [*options]
    measure = partial(resolve_name(f"experiments.profile.{_WAYS.get(kind, 'command:profile')}"), reporter())
    if kind == "cpu":
        measure(*own)
        return
    keys = keyword_arguments(measure, own, f"profile {kind}" if kind in _WAYS else "profile")
    output = keys.get("output")
    check_writable(Path(output).parent if output else PROFILES, "give output=FILE in another folder")
    measure(**keys)


def show(hardware: str) -> None:
    """Prints a row per entry of a profile with its kind and the number of its origin, then the origins, then the errors with their runs.

    Raises ProfileError: no such profile.
    """
    profile = load_profile(hardware)
    entries = {place: profile.origin(*place) for place in (("memory_bytes",), *_entries(profile_content(profile)))}
    origins = list(dict.fromkeys([profile.source, *entries.values()]))
    rows = [[".".join(place), kind_of(origin), origins.index(origin) + 1] for place, origin in entries.items()]
    print(tabulate(rows, ["entry", "kind", "origin"]), end="\n\n")
    print(*(f"{number}  {origin}" for number, origin in enumerate(origins, 1)), sep="\n", end="\n\n")
    for loop, known in profile.compared.items():
        print(f"{known.text}; runs: {known.runs}, cards: {known.cards}; {known.date}; {known.see}")
        kinds = {"largest error": known.largest_error, "of ratios": known.largest_error_of_ratios}
        rows = [
            [name, *(f"{of[name]:.1%}" if name in of else "" for of in kinds.values())] for name in known.largest_error
        ]
        print(tabulate(rows, ["", *kinds], disable_numparse=True))
        print(f"printed for models: {', '.join(known.models)}; loop: {loop}; GPUs: {known.gpus}", end="\n\n")
    print(f"other models, loops and GPUs: {profile.error}")


def _entries(content: dict[str, Any], place: Place = ()) -> Iterator[Place]:
    """Yields the path of each object of numbers in a profile's file."""
    inner = {key: value for key, value in content.items() if isinstance(value, dict) and (place or key != "compared")}
    for key, value in inner.items():
        yield from _entries(value, (*place, key))
    if place and not inner:
        yield place


def reporter() -> Callable[[str], None]:
    """Returns a function that prints the beginning of a step, with the seconds since the start of the command."""
    begin = time.perf_counter()
    return lambda what: print(f"  {time.perf_counter() - begin:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
