"""`python -m experiments.check policy=NAME [key=value ...]`: which properties a scheduling policy has. Also eviction=NAME, router=NAME.

The policy is described as for experiments.run: policy=sarathi chunking=fixed, or policy=my_module.Mine +policy.budget=4. It serves
one in seven tiny workloads, and larger random ones, in simulation. For each property that the policy lacks, the smallest
schedule that shows this is printed. The default is chunk=4: prompts have up to 8 chunks. Outputs have up to 12 tokens. An iteration
takes 1 ms and 10 us per token: scale the policy's own thresholds, in tokens and in seconds, to that. Requests have no tier, client,
priority, SLO or prediction. Workloads whose limits the policy's `check` refuses are left out and counted.

  --config-dir=FOLDER the policy's settings are there, as for experiments.run
  thorough=on         all tiny workloads, which takes seven times as long; the counterexamples are then the smallest
  prefix_cache=true   with a prefix cache, eviction=NAME: prompts 2 and 3 begin alike, and so do all others
  random=200          random workloads for each property that no tiny one violates
  require=a,b         properties that the policy must have, besides legal, kv and ends
  patience.empty_plans=50, patience.seconds=3600
                      after which a run without progress counts as one that does not end

Without policy= and prefix_cache=, eviction=my_module.Mine checks an eviction, and router='my_module.Mine(free=0.2)' a router: on random
turns of chats, with Orca as the policy; with a router on three replicas, one of which is too small for the longest requests.

The exit status is 1 if the policy lacks a property that it must have, among them `steady` if the policy promises it; else 0.
"""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from textwrap import indent
from typing import Any, NamedTuple

from cbatch import ConfigError, Eviction, Policy, is_steady
from cbatch.errors import check_installed
from cbatch.policy import copy_policy
from cbatch.replay.drafts import drafts_of
from cbatch.stall import Patience
from cbatch.validation import Switch, nearest
from experiments.check import evictions, routers
from experiments.check.plugins import BLOCK, Subject, find
from experiments.check.properties import NAMES, PROPERTIES
from experiments.check.scenario import DRAFTER, SHORT, Ending, PolicyHistory
from experiments.check.search import MOST_OUTPUT, Verdicts, search, tiny_scenarios
from experiments.progress import bar
from experiments.settings.command_line import Index, keyword_arguments, list_names, run
from experiments.settings.compose import compose_run
from experiments.settings.overrides import check_effects, log_unused, values_by_key
from experiments.settings.recipe import Recipe
from experiments.settings.settings import PLANS_BY

CHUNK = 4
SHARE = 7  # one of this many tiny workloads is served; no period of `tiny_scenarios` has this factor


class _Options(NamedTuple):
    """The command's own keys; all others describe what is checked."""

    random: Index = 200
    require: tuple[str, ...] = ()
    thorough: Switch = False


def _options(names: Collection[str], own: Sequence[str]) -> _Options:
    """Reads the command's own keys. names: of the properties."""
    options = _Options(**keyword_arguments(_Options, own, "check"))
    for name in options.require:
        if name not in names:
            raise ConfigError(f"require={name}: no such property; {nearest(name, names)}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status: 0 or 1 as above, 2 for a user error, 130 after Ctrl-C."""
    properties = list_names({prop.name: prop.text for prop in PROPERTIES})
    return run(_check, arguments, lambda: f"{__doc__}\n{properties}", composes=True)


def _check(*arguments: str) -> int:
    own = [argument for argument in arguments if argument.startswith(("random=", "require=", "thorough="))]
    if subject := _plug_in([argument for argument in arguments if argument not in own]):
        return _check_plug_in(subject, *_options(subject.rules, own))
    num_random, require, thorough = _options(NAMES, own)
    if num_random:
        check_installed("check", "hypothesis")
    build, chunk, patience, eviction = _policy([argument for argument in arguments if argument not in own])
    name = repr(build)  # before a policy is built, which the text uses, too
    policy = build()
    source: Policy | Callable[[], Policy] = build
    with suppress(ConfigError):
        source = copy_policy(policy)  # copies take much less time than building from settings
    ended: list[tuple[Ending, str]] = []
    drafts: list[int] = []
    every = enumerate(tiny_scenarios(chunk))
    tiny = [made for number, made in every if thorough or number % SHARE == 0 or len(made.arrivals) > 3]
    random = f", then {num_random:,} random ones for each property without a counterexample" if num_random else ""
    sizes = f"prompts of 1 to {8 * chunk - 1} tokens, outputs of 1 to {MOST_OUTPUT}, about 1 ms per iteration"
    print(f"{name}, {len(tiny):,} tiny workloads{random}: {sizes}", flush=True)
    with bar(unit=" workloads", delay=0.1) as tried:

        def count(history: PolicyHistory) -> None:
            ended.append((history.ending, history.why))
            drafts.extend(number for decision in history.decisions for number in drafts_of(decision).values())
            tried.update()

        how: Any = {"num_random": num_random, "tiny": tiny, "patience": patience, "eviction": eviction, "tick": count}
        verdicts = search(source, PROPERTIES, chunk, **how)
    required = {*require, *(["steady"] if is_steady(policy) else [])}
    needed = [prop.name for prop in PROPERTIES if prop.needed or prop.name in required]
    _report(name, chunk, verdicts, ended, needed)
    if drafts or "drafting" in build.section:
        most = f"at most {max(drafts, default=0)} of a decode; the drafter makes up to {len(DRAFTER.survivals)}"
        print(f"{sum(drafts):,} drafts were planned, {most}")
    return _verdict(needed, [name for name in needed if verdicts[name]])


def _verdict(needed: Sequence[str], failed: Sequence[str]) -> int:
    """Prints the last line; returns the exit status."""
    print(f"FAILED: {', '.join(failed)}" if failed else f"no counterexample to {', '.join(needed)}")
    return int(bool(failed))


def _print_verdicts(
    rules: Mapping[str, str], needed: Collection[str], found: Mapping[str, str], untested: Collection[str]
) -> None:
    """Prints a line for each property, followed by its counterexample in `found`. rules: the properties' texts by name."""
    for name, text in rules.items():
        held = "-  " if name in untested else "yes"
        verdict = held if name not in found else "NO " if name in needed else "no "
        print(f"{name:{max(map(len, rules))}}  {verdict}  {text}")
        if name in found:
            print(f"\n{indent(found[name], '    ')}\n")


def _plug_in(overrides: Sequence[str]) -> Subject | None:
    """Returns the eviction or the router that the overrides describe; None if they describe a policy."""
    overrides = [f"backend.{text}" if text.startswith("router=") else text for text in overrides]
    given = {key.partition(".")[0] for key in values_by_key(overrides)}
    if given & {"policy", "prefix_cache"} or not given & {"eviction", "backend"}:
        return None
    kind = "backend" if "backend" in given else "eviction"
    check_effects(overrides, (kind,), f"check of {'a router' if kind == 'backend' else 'an eviction'}")
    settings = compose_run("backend=sim", "prefix_cache=true", *overrides)
    if settings.eviction is not None and kind == "eviction":
        return evictions.subject_of(settings.eviction)
    return routers.subject_of(settings.backend.router)


def _check_plug_in(subject: Subject, num_random: int, require: Sequence[str], thorough: bool) -> int:
    number = max(num_random * (SHARE if thorough else 1), 1)
    sizes = f"turns of chats on {BLOCK}-token blocks, about 1 ms per iteration"
    print(f"{subject.name}, {number:,} workloads at most: {sizes}\n", flush=True)
    with bar(unit=" workloads", delay=0.1) as tried:
        found = find(subject, number, tried.update)
    untested = {"blind"} if {"legal", "deterministic"} & found.keys() else frozenset[str]()
    needed = [name for name in subject.rules if name in subject.needed or name in require]
    _print_verdicts(subject.rules, needed, found, untested)
    print('"yes" means no counterexample, which is no proof; "-" means not tested, as runs cannot be compared')
    return _verdict([name for name in needed if name not in untested], [name for name in needed if name in found])


def _report(
    name: str, chunk: int, verdicts: Verdicts, ended: Sequence[tuple[Ending, str]], needed: Collection[str]
) -> None:
    """Prints the verdicts. ended: how each run ended, and why. Raises ConfigError if the policy's `check` refused all workloads."""
    refusals, tried = [why for ending, why in ended if ending is Ending.REFUSED], len(ended)
    completes = any(ending is Ending.COMPLETE for ending, _ in ended)
    refused = f"its check refuses {len(refusals):,} of {tried:,} workloads, the first one with"
    if 0 < len(refusals) == tried:
        remedy = f"give it settings for small limits, or a larger chunk than {chunk}"
        raise ConfigError(f'policy {name}: {refused} "{refusals[0]}"; {remedy}')
    if refusals:
        print(f'{refused} "{refusals[0]}"')
    print()
    found = {name: str(counterexample) for name, counterexample in verdicts.items() if counterexample is not None}
    _print_verdicts({prop.name: prop.text for prop in PROPERTIES}, needed, found, () if completes else NAMES)
    meaning = f'"yes" means no counterexample among {tried - len(refusals):,} workloads, which is no proof'
    meaning += "; none has a priority, client, tier, SLO or prediction"
    print(meaning if completes else '"-" means not tested, as no run reached its end')


def _policy(overrides: Sequence[str]) -> tuple[Recipe, int, Patience, Eviction | None]:
    """Returns the recipe of the policy that the overrides describe, its chunk, its patience, and the eviction."""
    check_effects(overrides, (*PLANS_BY, "patience", "prefix_cache", "eviction"), "check")
    defaults = [f"chunk={CHUNK}", f"patience.empty_plans={SHORT.empty_plans}"]
    settings = compose_run(*defaults, *overrides)  # the last value of a key counts
    log_unused(overrides, settings.composed.unused)
    return settings.policy, settings.chunk or CHUNK, settings.patience, settings.eviction


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
