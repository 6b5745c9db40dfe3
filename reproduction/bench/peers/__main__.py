"""`python -m reproduction.bench.peers ENGINE [key=value ...]`: measure another engine on the work of our benchmarks.

Runs in the engine's own environment, which needs PyTorch, transformers and PyYAML beside it, on a machine with a GPU.

keys: cases=trace-256,decode  beginnings of cases' names; all without it
      path=FILE               the trace
      repeats=3               runs of each case
      folder=FOLDER          a file for each case is written to folder/<card>/peers

nano-vllm has no script: its package could not be installed beside the others on the machine of the measurements.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cbatch import CbatchError, ConfigError
from reproduction import RESULTS
from reproduction.bench.peers import transformers_engine, vllm_engine
from reproduction.bench.peers.cases import CASES
from reproduction.bench.peers.measure import Peer, measure
from reproduction.bench.peers.transformers_engine import TransformersEngine
from reproduction.bench.peers.vllm_engine import VllmEngine

PEERS = {
    "vllm": Peer("vllm", "vLLM", VllmEngine, vllm_engine.ENVIRONMENT),
    "transformers": Peer("transformers", "transformers", TransformersEngine, transformers_engine.ENVIRONMENT),
}

DEFAULTS = {"cases": "", "path": "", "repeats": "3", "folder": RESULTS}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns its exit status."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(f"{__doc__}\nengines: {', '.join(PEERS)}\ncases: {', '.join(CASES)}")
        return 0 if arguments else 2
    try:
        peer, keys = read(arguments)
        repeats, folder = int(keys["repeats"]), Path(keys["folder"])
        for name in chosen(keys["cases"]):
            path = measure(name, peer, path=keys["path"], repeats=repeats, folder=folder)
            print(f"written: {path}", flush=True)
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read(arguments: Sequence[str]) -> tuple[Peer, dict[str, str]]:
    """The engine and the value of each key; our other commands read theirs with Hydra's errors, which is not here."""
    engine, *options = arguments
    if engine not in PEERS:
        raise ConfigError(f"engine {engine} is unknown; known: {', '.join(PEERS)}")
    keys = dict(DEFAULTS)
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in keys:
            raise ConfigError(f"{option}: give key=value with one of {', '.join(keys)}")
        keys[key] = value
    if not keys["repeats"].isdecimal() or keys["repeats"] == "0":
        raise ConfigError(f"repeats={keys['repeats']}: give a whole number, at least 1")
    return PEERS[engine], keys


def chosen(beginnings: str) -> list[str]:
    """Names of the cases that begin with one of those given, in the order given."""
    found = [name for beginning in beginnings.split(",") for name in CASES if name.startswith(beginning)]
    if not found:
        raise ConfigError(f"cases={beginnings}: no case begins with it; known: {', '.join(CASES)}")
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
