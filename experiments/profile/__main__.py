"""`python -m experiments.profile model=NAME [key=value ...]`: measure models on the GPU at hand, into a hardware profile.

    model        presets of conf/model, separated by commas
    batch        largest batches for which graphs are captured; the last one's iterations are measured in full, the others'
                 to see what captured rows cost
    max_tokens   most tokens of an iteration           longest  most tokens of a request
    backend      cuda, or cpu for the plain runtime    output   the file; by default that of the hardware, in cbatch/sim/profiles

The file keeps the other models' tables. What was interpolated is compared with batches measured in between, and printed.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable

from cbatch import CbatchError, ConfigError
from experiments.settings import check_known

HELP = ("-h", "--help")


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status: 0, 2 for an error of the user's, 130 after Ctrl-C."""
    if not arguments or arguments[0] in HELP:
        print(__doc__)
        return 0 if arguments else 2
    try:
        options = dict(_pair(argument) for argument in arguments)
        from experiments.profile.command import profile  # loads torch

        check_known(options, inspect.signature(profile).parameters, "profile: ")
        profile(**options, report=_reporter())
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _pair(argument: str) -> tuple[str, str]:
    key, equals, value = argument.partition("=")
    if not equals or key == "report":
        raise ConfigError(f"profile: option {argument!r} is not of the form key=value; see --help")
    return key, value


def _reporter() -> Callable[[str], None]:
    """Prints what begins, and how long the command has taken until then."""
    begin = time.perf_counter()
    return lambda what: print(f"  {time.perf_counter() - begin:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
