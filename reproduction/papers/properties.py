"""Prints the table of docs/policies/properties.md: which properties of `experiments.check` each built-in policy has."""

from tabulate import tabulate

from experiments.check.__main__ import CHUNK
from experiments.check.properties import NAMES, PROPERTIES
from experiments.check.search import search, tiny_scenarios
from experiments.settings.compose import compose_run, policy_names

SHARE = 8
"""One in `SHARE` of the tiny scenarios with up to three requests is tried, and every longer one."""


def main(random: int = 200) -> None:
    """Prints rows of policies and columns of properties: no where a schedule violates the property.

    random: random workloads for each property that no tiny one violates.
    """
    numbered = enumerate(tiny_scenarios(CHUNK))
    tiny = [scenario for number, scenario in numbered if number % SHARE == 0 or len(scenario.arrivals) > 3]
    rows = []
    for name in policy_names():
        policy = compose_run(f"policy={name}", f"chunk={CHUNK}").policy()
        verdicts = search(policy, PROPERTIES, CHUNK, num_random=random, tiny=tiny)
        rows.append([f"`{name}`", *("no" if verdicts[key] else "yes" for key in NAMES)])
    print(tabulate(rows, ["", *(f"`{key}`" for key in NAMES)], tablefmt="github"))
