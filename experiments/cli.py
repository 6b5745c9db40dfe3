"""`cbatch COMMAND [ARGUMENT ...]`: the same as `python -m experiments.COMMAND [ARGUMENT ...]`.

Installed packages come before the modules of the current folder, so that no folder of the user replaces this package.

    cbatch run policy=sarathi chunk=256
    cbatch COMMAND --help
    cbatch --version
"""

import os
import runpy
import sys

from cbatch import __version__

COMMANDS = {
    "run": "serve a workload with a scheduling policy; -m: a sweep",
    "plot": "plot a finished run or sweep",
    "compare": "compare policies or results, with 95% intervals",
    "check": "test a policy for properties, with counterexamples",
    "capacity": "search the highest request rate at which objectives are met",
    "arena": "rank policies on traces, loads and objectives",
    "replay": "ask a policy for its plans at the views of a recorded run",
    "server": "serve clients over HTTP, compatible with OpenAI's API",
    "profile": "measure a machine for simulations and predictions",
    "bench": "measure the speed of policies with real tokens",
}


def main() -> int:
    """Runs the command that the arguments name; returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "-h", "--help"):
        print(__doc__, *(f"  {command:10} {what}" for command, what in COMMANDS.items()), sep="\n")
        return 0 if name else 2
    if name == "--version":
        print(f"cbatch {__version__}")
        return 0
    if name not in COMMANDS:
        from cbatch.validation import nearest  # loads pydantic

        print(f"error: {name}: no such command; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    sys.path.append(os.getcwd())
    del sys.argv[1]
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)  # exits
    return 0


if __name__ == "__main__":
    sys.exit(main())
