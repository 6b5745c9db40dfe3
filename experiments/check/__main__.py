"""`python -m experiments.check policy=NAME [key=value ...]`: which properties a scheduling policy has.

The policy is described as for experiments.run: policy=sarathi chunking=fixed, or policy=external policy._target_=my_package.Mine
+policy.argument=3. It serves all tiny workloads, and larger random ones, in simulation; for each property that it lacks, the
smallest schedule that shows it is printed. chunk=4 unless given: prompts have up to 8 chunks. Outputs have up to 12 tokens, an iteration
takes 1 ms and 10 us per token: scale the policy's own thresholds, in tokens and in seconds, to that. Requests have no tier, client,
priority, SLO or prediction. Workloads whose limits the policy's `check` refuses are left out, and counted.

  --config-dir=FOLDER the policy's settings are there, as for experiments.run
  random=200          random workloads for each property that no tiny one violates
  require=a,b         properties that the policy must have, besides legal, kv and ends
  table=FILE          check all built-in policies instead, and write their table into this file, between its marks
  patience.empty_plans=50, patience.seconds=3600
                      after which a run without progress counts as one that does not end

The status is 0, or 1 if the policy lacks a property that it must have, among them `steady` if it says that it is.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from tqdm import tqdm

from cbatch import ConfigError, Policy, is_steady
from cbatch.policy import copy_policy
from cbatch.stall import Patience
from cbatch.validation import nearest
from experiments.check.properties import NAMES, PROPERTIES
from experiments.check.scenario import SHORT, History
from experiments.check.search import describe_sizes, search
from experiments.check.verdicts import text, write_table
from experiments.settings.command_line import check_effects, listed, run
from experiments.settings.composition import policy_maker
from experiments.settings.settings import PLANS_BY

CHUNK = 4
_PAUSE = 10.0  # seconds between lines of progress


class Options(NamedTuple):
    """The command's own keys; the rest of the command line describes the policy."""

    num_random: int = 200
    required: tuple[str, ...] = ()
    table: str = ""


class _Count(AbstractContextManager["_Count"]):
    """Counts the workloads tried, those refused and those served to their end; shows it in a bar, or if stderr is no terminal, in a line every 10 s."""

    def __init__(self) -> None:
        self.tried = self.refused = self.ended = 0
        self.refusal = ""
        self._bar = tqdm(unit=" workloads", leave=False, disable=None)
        self._next = monotonic() + _PAUSE

    def __call__(self, history: History) -> None:
        self.tried += 1
        if history.refused:
            self.refused += 1
            self.refusal = self.refusal or history.refused
        elif history.error is None and not history.endless:
            self.ended += 1
        self._bar.update()
        if self._bar.disable and monotonic() > self._next:
            self._next += _PAUSE
            print(f"{self.tried:,} workloads so far", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status: 0 or 1 as above, 2 for a user error, 130 after Ctrl-C."""
    properties = listed({prop.name: prop.text for prop in PROPERTIES})
    return run(_check, arguments, lambda: f"{__doc__}\n{properties}", composes=True)


def _check(*arguments: str) -> int:
    options, overrides = _options(arguments)
    if options.table and overrides:
        raise ConfigError(f"table={options.table}: checks all built-in policies; leave out {overrides[0]}")
    make, chunk, patience = _policy(overrides)
    policy = make()
    name = type(policy).__name__
    with _Count() as count:
        if options.table:
            print(write_table(Path(options.table), chunk, options.num_random, count))
            return 0
        found = search(
            policy if _can_be_copied(policy) else make,
            PROPERTIES,
            chunk,
            num_random=options.num_random,
            patience=patience,
            tick=count,
        )
    refused = f'its check refuses {count.refused:,} of {count.tried:,} workloads, the first time with "{count.refusal}"'
    if 0 < count.refused == count.tried:
        raise ConfigError(
            f"policy {name}: {refused}; give it settings for small limits, or a larger chunk than {chunk}"
        )
    head = f"{name} with chunk={chunk}, {count.tried - count.refused:,} workloads: {describe_sizes(chunk)}"
    print(
        "\n".join(
            [head, *([refused] if count.refused else []), "", text(found, PROPERTIES, some_ended=count.ended > 0)]
        )
    )
    required = {*options.required, *(["steady"] if is_steady(policy) else [])}
    needed = [prop.name for prop in PROPERTIES if prop.needed or prop.name in required]
    return 1 if any(found[name] for name in needed) else 0


def _options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Splits the command line into this command's own keys and the others."""
    options, overrides = Options(), []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "random":
            if not value.isdigit():
                raise ConfigError(f"random={value}: give a whole number of workloads, 0 for none")
            options = options._replace(num_random=int(value))
        elif key == "table":
            options = options._replace(table=value)
        elif key == "require":
            options = options._replace(required=tuple(value.split(",")))
            for name in options.required:
                if name not in NAMES:
                    raise ConfigError(f"require={name}: no such property; {nearest(name, NAMES)}")
        else:
            overrides.append(argument)
    return options, overrides


def _can_be_copied(policy: Policy) -> bool:
    """Copying one takes much less time than building it from settings."""
    with suppress(ConfigError):
        copy_policy(policy)
        return True
    return False


def _policy(overrides: Sequence[str]) -> tuple[Callable[[], Policy], int, Patience]:
    """Returns what builds the policy that the overrides describe, its chunk, and how long it may make no progress."""
    check_effects(overrides, (*PLANS_BY, "patience"), "check")
    given = [f"chunk={CHUNK}", f"patience.empty_plans={SHORT.empty_plans}", *overrides]  # the last one counts
    make, settings = policy_maker(*given)
    return make, settings.chunk or CHUNK, settings.patience


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
