"""`python -m reproduction.profiles tables=FOLDER model=NAME,... output=FILE`: a profile's file from published tables.

tables   folder of one device: .../vidur/compute/DEVICE, .../aiconfigurator/SYSTEM or
         .../llmservingsim/DEVICE/MODEL_tpDEGREE
model    presets of conf/model, separated by commas
output   the file, for `hardware=FILE`
host_ms, host_us_per_request
         what an iteration of the engine takes besides the measured kernels, and each of its requests: measure them once
         for an engine, as `reproduction.validation rivals fit=on` does for vLLM
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cbatch.sim.profile_file import profile_text
from experiments.settings.command_line import keyword_arguments, run
from experiments.settings.presets import load_spec
from experiments.store.provenance import write_text
from reproduction.profiles import convert


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    name, usage = "profiles", str(__doc__)
    return run(lambda *keys: write_profile(**keyword_arguments(write_profile, keys, name)), arguments, lambda: usage)


def write_profile(
    tables: str, model: tuple[str, ...], output: str, host_ms: float = 0.0, host_us_per_request: float = 0.0
) -> None:
    """Converts the tables and writes the file."""
    profile = convert(Path(tables), [load_spec(name) for name in model], host_ms, host_us_per_request)
    write_text(Path(output), profile_text(profile))
    print(f"written: {output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
