"""Benchmarks that a command line names: where each lies, what it needs, and how it is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from cbatch import ConfigError
from experiments.settings.command_line import check_name, keyword_arguments, list_names, run
from experiments.settings.hardware import count_gpus
from experiments.store.claim import check_writable


@dataclass(frozen=True)
class Benchmark:
    """A benchmark that a command line can name.

    module: its function `main` measures, or in `module:name` another one. presets: values of options that the command line may change.
    """

    about: str
    module: str
    needs_gpu: bool = True
    presets: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Callable[..., object]:
        module, _, name = self.module.partition(":")
        return getattr(import_module(module), name or "main")  # type: ignore[no-any-return]


def run_benchmark(arguments: Sequence[str], benchmarks: Mapping[str, Benchmark], usage: str) -> int:
    """Runs the benchmark that a command line names; returns the exit status."""

    def measure(name: str, *options: str) -> None:
        check_name("benchmark", name, {known: benchmark.about for known, benchmark in benchmarks.items()})
        chosen = benchmarks[name]
        if chosen.needs_gpu and count_gpus() == 0:
            others = ", ".join(other for other, benchmark in benchmarks.items() if not benchmark.needs_gpu)
            raise ConfigError(f"benchmark {name} needs a GPU and finds none; these need none: {others}")
        function = chosen.load()
        keys = {**chosen.presets, **keyword_arguments(function, options, name)}
        if default := signature(function).parameters.get("folder"):
            check_writable(Path(keys.get("folder", default.default)), "give another folder=")
        function(**keys)

    def describe() -> str:
        notes = {True: "", False: " (no GPU needed)"}
        texts = {name: f"{known.about}{notes[known.needs_gpu]}" for name, known in benchmarks.items()}
        return f"{usage}\n{list_names(texts)}"

    return run(measure, arguments, describe, resume_hint="files already written are complete")
