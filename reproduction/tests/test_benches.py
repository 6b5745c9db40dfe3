"""Benchmarks: their options, the work that other engines share with ours, pages of stored results, and simulated servers of vLLM."""

import inspect
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from commands import largest_file
from places import RESULTS, ROOT

from cbatch import ConfigError, Request
from cbatch.model.checkpoint import Vocabulary
from experiments.settings.command_line import keyword_arguments
from experiments.settings.compose import compose_run
from experiments.setup.presets import load_spec
from reproduction.bench import __main__ as bench
from reproduction.bench.in_vllm import drafts
from reproduction.bench.page import BEGIN, END, TABLES, comparison, text
from reproduction.bench.peers.cases import CASES, requests_of, speed
from reproduction.bench.peers.turns import in_turn
from reproduction.papers import __main__ as papers
from reproduction.validation import __main__ as validation

COMMANDS = {**bench.BENCHMARKS, **validation.COMPARISONS, **papers.COMMANDS}


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_defaults_and_presets_are_options(name: str) -> None:
    function = COMMANDS[name].load()
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    options = {key: value for key, value in defaults.items() if value not in ((), None, inspect.Parameter.empty)}
    required = [key for key, value in defaults.items() if value is inspect.Parameter.empty]
    given = [f"{key}=x" for key in required]
    given += [f"{key}={text_of(value)}" for key, value in options.items()]
    assert keyword_arguments(function, given, "it").items() >= options.items()
    assert COMMANDS[name].presets.keys() <= defaults.keys()
    assert {*re.findall(r"(?<!')\b(\w+)=", COMMANDS[name].about)} <= defaults.keys(), "what a list of commands names"


@pytest.mark.parametrize(("name", "benchmark"), [("trace-128-2048", "trace"), ("pd-256", "pd")])
def test_peers_serve_the_requests_that_our_benchmark_serves(name: str, benchmark: str, tmp_path: Path) -> None:
    tokens, path = np.random.default_rng(7).integers(1, 60, (600, 2)).tolist(), tmp_path / "trace.csv"
    times = (f"2023-11-16 18:{row // 60:02}:{row % 60:02}.0000000" for row in range(600))
    rows = [f"{time},{prompt},{output}" for time, (prompt, output) in zip(times, tokens, strict=True)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    case, preset = CASES[name], bench.BENCHMARKS[benchmark].presets["settings"].split()
    settings = compose_run(*preset, *([f"workload.path={path}"] if benchmark == "trace" else []))
    spec = load_spec(case.model)
    ours, theirs = settings.workload.requests(Vocabulary(spec)), requests_of(case, spec, str(path))
    assert [(each.prompt, each.max_new_tokens) for each in theirs] == [
        *((each.prompt, each.max_new_tokens) for each in ours)
    ]
    assert (settings.model.name, settings.batch) == (case.model, case.batch)


@pytest.mark.long
def test_wrong_tokens_and_outputs_cut_short_are_counted(tmp_path: Path) -> None:
    spec = replace(load_spec("tiny"), hidden_size=32, head_dim=8, intermediate_size=32, vocab_size=128)
    model, prompt, output = drafts.write_model(spec, tmp_path), (1, 2, 3), tuple[int, ...]()
    for _ in range(20):
        output += (int(model(torch.tensor([[*prompt, *output]])).logits[0, -1].argmax()),)
    assert drafts.count_wrong(drafts.shortfalls(model, prompt, output)) == 0
    assert drafts.count_wrong(drafts.shortfalls(model, prompt, (*output[:-1], (output[-1] + 1) % 128))) == 1
    assert drafts.count_wrong(drafts.shortfalls(model, (1, 2, 4), output)) > 0
    stop, request = drafts.STOP, Request(0, 3, 4, prompt=[1, 2, 3], stop_tokens=(drafts.STOP,))
    for tokens, is_whole in (([5, 5, 5, 5], True), ([5, stop], True), ([5, 5], False), ([stop, 5, 5, 5], False)):
        request.output = tokens
        assert drafts.ended(request) == is_whole


@pytest.mark.parametrize(("name", "value"), [("decode-2048", 3e3 / 2048), ("one", 512 / 3), ("pd-256", 144 * 1024 / 3)])
def test_the_speed_of_what_took_3_seconds(name: str, value: float) -> None:
    """Milliseconds per iteration, output tokens/s, and prompt and output tokens/s."""
    case = CASES[name]
    assert speed(case, requests_of(case, load_spec(case.model)), 3.0) == pytest.approx(value)


def test_pages_are_those_of_the_stored_results() -> None:
    for card in ("h100", "h200"):
        assert (RESULTS / card / "README.md").read_text() == text(RESULTS / card)
    assert f"{BEGIN}\n{comparison(RESULTS / 'h200')}\n{END}" in (ROOT / "README.md").read_text()


def test_a_version_that_was_not_measured_on_all_of_the_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES, "engines", {"vLLM": "0.33.0"})
    monkeypatch.setattr(
        "reproduction.bench.page._engines", lambda _: {"vllm-0.33.0-decode-2048": {}, "vllm-0.22.1-one": {}}
    )
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.33\.0: .* has no one, pd-256, trace-128-2048, trace-256-2048, groups, chat;"
    ):
        comparison(RESULTS / "h200")


def test_engines_of_a_card_start_together_and_run_one_after_the_other(tmp_path: Path) -> None:
    events, begun = list[str](), Barrier(2)

    def serve(seconds: float) -> None:
        with in_turn(str(tmp_path / "turns")) as wait:
            begun.wait()
            time.sleep(seconds)
            events.append("started")
            wait()
            events.append("begins")
            time.sleep(0.05)
            events.append("ends")

    with ThreadPoolExecutor() as engines:
        assert [*engines.map(serve, (0.0, 0.2))] == [None, None]
    assert events == ["started", "started", "begins", "ends", "begins", "ends"]


@pytest.mark.parametrize("command", [partial(bench.main, ["coverage"]), partial(papers.main, ["fig3"])])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.args[0].append(f"folder={tmp_path / 'new'}")
    with largest_file(0):
        assert command() == 2
    error = f"error: {tmp_path / 'new'} cannot be written (File too large); give another folder=\n"
    assert tuple(capsys.readouterr()) == ("", error) and not [*tmp_path.iterdir()]
