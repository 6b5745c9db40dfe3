"""`python -m reproduction.profiles tables=FOLDER model=NAME,... output=FILE`: a profile's file from published tables.

tables   folder of one device: .../vidur/compute/DEVICE, .../aiconfigurator/SYSTEM or
         .../llmservingsim/DEVICE/MODEL_tpDEGREE
model    presets of conf/model, separated by commas
output   the file, for `hardware=FILE`
host_ms, host_us_per_request
         what an iteration of the engine takes besides the measured kernels, and each of its requests: measure them once
         for an engine, as `reproduction.validation rivals fit=on` does for vLLM

`python -m reproduction.profiles recordings=FOLDER,... model=NAME`: a profile of vLLM, from iterations that it recorded (docs/vllm.md).

hardware profile of the card, for its memory and ceilings     output  the file; by default HARDWARE-vllm, in cbatch/sim/profiles

`python -m reproduction.profiles records=FILE hardware=NAME [key=value ...]` fits two factors of iteration times, with prompts and of
decodes alone, and the delay before every first token, to a server's requests by simulating them.

records  the folder of a run, or what `vllm bench serve --save-result --save-detailed` wrote
key=value
         the server, by the keys of `experiments.run`: policy=vllm_v1 model=... batch=... chunk=... kv_tokens=...
output   the file; by default PROFILE-RECORDS, in cbatch/sim/profiles
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cbatch.sim.profile_file import profile_text
from experiments.profile.__main__ import reporter
from experiments.settings.command_line import keyword_arguments, run
from experiments.setup.presets import load_spec
from experiments.store.provenance import write_text
from reproduction.profiles import convert
from reproduction.profiles.client_records import fit_card
from reproduction.profiles.vllm_recordings import profile_recordings


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run(_convert, arguments, lambda: str(__doc__))


def _convert(*options: str) -> None:
    make: Callable[..., object] = write_profile
    own = options
    if any(option.startswith("recordings=") for option in options):
        make = partial(profile_recordings, reporter())
    elif any(option.startswith("records=") for option in options):
        server = [option for option in options if not option.startswith(("records=", "output="))]
        make, own = partial(fit_card, reporter(), server), tuple(option for option in options if option not in server)
    make(**keyword_arguments(make, own, "profiles"))


def write_profile(
    tables: str, model: tuple[str, ...], output: str, host_ms: float = 0.0, host_us_per_request: float = 0.0
) -> None:
    """Converts the tables and writes the file."""
    profile = convert(Path(tables), [load_spec(name) for name in model], host_ms, host_us_per_request)
    write_text(Path(output), profile_text(profile))
    print(f"written: {output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
