"""`python -m reproduction.bench NAME [key=value ...]`: run one benchmark, print its table, write its results file."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from reproduction import BENCH, RESULTS
from reproduction.benchmark import Benchmark, run_benchmark


def _read_benchmarks(path: Path) -> dict[str, Benchmark]:
    benchmarks = {}
    for name, entry in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        if "presets" in entry:
            entry["presets"] = {"folder": RESULTS, "command": BENCH, "name": name, **entry["presets"]}
        else:
            entry["module"] = f"reproduction.bench.{entry['module']}"
        benchmarks[name] = Benchmark(**entry)
    return benchmarks


BENCHMARKS = _read_benchmarks(Path(__file__).with_name("benchmarks.yaml"))


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit status."""
    return run_benchmark(arguments, BENCHMARKS, str(__doc__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
