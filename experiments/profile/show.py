"""`python -m experiments.profile show hardware=NAME`: where each entry of a profile comes from, and what its error holds for."""

from tabulate import tabulate

from cbatch.sim import load_profile
from cbatch.sim.provenance import NOT_COMPARED, kind_of


def show(hardware: str) -> None:
    """Prints a row per entry with its kind, then the origins that the rows number, and the error with its runs.

    Raises ProfileError: no such profile.
    """
    profile = load_profile(hardware)
    origins = list(dict.fromkeys([profile.source, *profile.entries.values()]))
    rows = [[entry, kind_of(origin), origins.index(origin) + 1] for entry, origin in profile.entries.items()]
    print(tabulate(rows or [["all", kind_of(profile.source), 1]], ["entry", "kind", "origin"]), end="\n\n")
    print(*(f"{number}  {origin}" for number, origin in enumerate(origins, 1)), sep="\n", end="\n\n")
    print(f"error: {profile.error}")
    for loop, known in profile.compared.items():
        if known.error:
            print(f"error: {known.error}")
        where = f"{', '.join(known.models)}; loop: {loop}; GPUs: {known.gpus}"
        print(f"printed for models: {where}; elsewhere: {NOT_COMPARED}")
