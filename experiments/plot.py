"""`python -m experiments.plot NAME FOLDER [key=value ...]`: plot a finished run or sweep; the files go to FOLDER/plots."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from cbatch import CbatchError, ConfigError
from experiments.folder import PLOTS
from experiments.settings import nearest

NAMES = {
    "throughput_vs_pd": "throughput and gain over a baseline against P:D (of a sweep)",
    "latency_cdf": "time to first token, between tokens, end to end (of up to 8 runs)",
    "composition": "tokens of the iterations, requests and KV cache over time (of one run)",
    "lanes": "host and device during a few iterations (of up to 8 runs)",
    "table": "figures side by side, in Markdown",
}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status: 0, 2 for an error of the user's, 130 after Ctrl-C."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.splitlines()[0], *(f"  {name:18} {what}" for name, what in NAMES.items()), sep="\n")
        return 0 if arguments else 2
    try:
        _plot(*arguments)
    except CbatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


def _plot(name: str, where: str = "", *options: str) -> None:
    if name not in NAMES:
        raise ConfigError(f"plot {name}: no such plot; {nearest(name, NAMES)}")
    if not where or ("=" in where and not Path(where).exists()):
        raise ConfigError(
            f"plot {name}: needs the folder of a run or of a sweep: python -m experiments.plot {name} FOLDER"
        )
    folder = Path(where)
    module = import_module(f"experiments.plots.{name}")
    if name == "table":
        text = module.text(folder, **_options(module.text, options))
        print(text)
        path = folder / PLOTS / "table.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
        print(f"\n{path}")
        return
    figure = module.draw(folder, **_options(module.draw, options))
    from experiments.plots.style import save

    print(*save(figure, folder / PLOTS, name), sep="\n")


def _options(function: Callable[..., Any], options: Sequence[str]) -> dict[str, Any]:
    """key=value pairs as arguments of a plot, by the types of its parameters."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    types = {parameter.name: parameter.annotation for parameter in parameters}
    values = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in types:
            raise ConfigError(f"option {option}: no such option; {nearest(key, types)}")
        try:
            values[key] = types[key](value)
        except ValueError as error:
            raise ConfigError(f"option {option}: give {key}=NUMBER") from error
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
