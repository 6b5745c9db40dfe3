"""Benchmarks: their options, what is measured of graphs, and whole runs as processes."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpu_server import cpu_server
from test_traces import LENGTHS
from tiny_models import LLAMA

from cbatch import ConfigError, Limits
from experiments.bench import __main__ as of_users
from experiments.settings.command_line import keyword_arguments
from experiments.settings.servers import equal_requests
from experiments.workloads import ServeGen
from policies.orca import Orca
from reproduction.bench import __main__ as bench
from reproduction.bench import graphs
from reproduction.bench.process import measured
from reproduction.papers import __main__ as papers
from reproduction.validation import __main__ as validation

NEED_TRITON = {"attention", "tiles"}
COMMANDS = {**of_users.BENCHMARKS, **bench.BENCHMARKS, **validation.COMPARISONS, **papers.COMMANDS}


def text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - NEED_TRITON))
def test_defaults_and_presets_are_options(name: str) -> None:
    function = COMMANDS[name].load()
    defaults = {key: parameter.default for key, parameter in inspect.signature(function).parameters.items()}
    options = {key: value for key, value in defaults.items() if value not in ((), None, inspect.Parameter.empty)}
    required = [key for key, value in defaults.items() if value is inspect.Parameter.empty]
    given = [f"{key}={'vllm' if key == 'engine' else 'x'}" for key in required]
    given += [f"{key}={text_of(value)}" for key, value in options.items()]
    assert keyword_arguments(function, given, "it").items() >= options.items()
    assert COMMANDS[name].presets.keys() <= defaults.keys()


@pytest.mark.parametrize("main", [bench.main, papers.main, validation.main])
def test_an_unknown_name_is_one_line(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fidelty"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_way_is_measured_batch_by_batch() -> None:
    asked, found = graphs.Asked((1, 2, 4), prompt=4, new=24, window=8), dict[str, Any]()
    measure = graphs.measure(LLAMA, graphs.WAYS["fused, graphs"], asked, found, cpu_server)
    assert [(batch, list(found["by_batch"])) for batch in measure] == [
        *((1, ["1"]), (2, ["1", "2"]), (4, ["1", "2", "4"]))
    ]
    assert found["output_tokens_per_second"]["repeats"] == graphs.RUNS and found["graphs"] == 8


def test_rates_of_a_window_are_those_of_its_iterations() -> None:
    server = cpu_server(LLAMA, Limits(2, 16, 32))
    record = server.serve(Orca(), equal_requests(2, 4, 17, LLAMA.vocab_size))
    rates = graphs.rates_of_window(record, batch=2, window=8)
    seconds = record.steps[-1].received_at - record.steps[-9].received_at
    assert len(rates) == graphs.STRETCHES and sum(2 * 2 / rate for rate in rates) == pytest.approx(seconds)
    server.close()


def test_a_million_requests_are_measured_as_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = "client,window_start_s,rate_req_per_s,iat_cv,arrival_family,arg1,arg2"
    (tmp_path / "t.csv").write_text(f"{head}\n7,0,0.5,1.0,Gamma,1.0,2.0\n")
    (tmp_path / "d.jsonl").write_text(json.dumps({"client": 7, "dataset": {"0": LENGTHS}}) + "\n")
    data = {"path": str(tmp_path / "t.csv"), "dataset": str(tmp_path / "d.jsonl")}
    options = [*(f"{key}={value}" for key, value in data.items()), "policy=orca", "num_requests=40", "rate=0.4"]
    assert bench.main(["million", *options, f"folder={tmp_path}"]) == 0
    found = json.loads((tmp_path / "cpu" / "million.json").read_text())["figures"]
    trace = ServeGen(**data, duration=1305.0, rate=0.4).trace()
    assert (found["requests"], found["generated_tokens"]) == (40, trace.first(40).output_tokens.sum())
    assert 0 < found["cpu_seconds"]["median"] < 60 and found["peak_memory_mb"]["median"] > 20
    with pytest.raises(ConfigError, match="tensor_parallel=3"):
        measured(["backend=sim", "hardware=h200", "backend.tensor_parallel=3"])
