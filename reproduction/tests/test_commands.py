"""The commands of reproduction: defaults can be given as options, and mistakes end in one line."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from experiments.bench import __main__ as of_users
from experiments.settings.command_line import keyword_arguments
from reproduction.bench import __main__ as bench
from reproduction.papers import __main__ as papers
from reproduction.validation import __main__ as validation

NEED_TRITON = {"attention", "tiles"}
BENCHMARKS = {**of_users.BENCHMARKS, **bench.BENCHMARKS, **validation.COMPARISONS}
FUNCTIONS = {name: each.load for name, each in BENCHMARKS.items() if name not in NEED_TRITON}
FUNCTIONS |= {name: partial(getattr, import_module(f"reproduction.papers.{name}"), "main") for name in papers.COMMANDS}


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_defaults_can_be_given_as_options(name: str) -> None:
    function = FUNCTIONS[name]()
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    options = {
        key: "x" if value is inspect.Parameter.empty else value
        for key, value in defaults.items()
        if value not in ((), None)
    }
    assert keyword_arguments(function, [f"{key}={text_of(value)}" for key, value in options.items()], "it") == options


@pytest.mark.parametrize("name", BENCHMARKS)
def test_presets_are_options(name: str) -> None:
    if presets := BENCHMARKS[name].presets:
        assert presets.keys() <= inspect.signature(BENCHMARKS[name].load()).parameters.keys()


@pytest.mark.parametrize("main", [bench.main, papers.main, validation.main])
def test_an_unknown_name_is_refused_with_the_nearest(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fidelty"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
