"""Workloads from files and from settings: lengths that fit the model, prompt files, what is refused, and every configuration."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from in_process import message
from places import ROOT
from test_workloads import Letters, prompt_file

from cbatch.request import spec_of
from experiments.workloads import (
    AllAtOnce,
    ClosedBatch,
    FixedLengths,
    GammaArrivals,
    MixedLengths,
    OpenLoop,
    PromptFile,
    TraceLengths,
    TraceReplay,
    UniformLengths,
    Workload,
    ZipfLengths,
)
from experiments.workloads.trace import Fit, ScaledFit, Trace

# -- lengths that fit a model -----------------------------------------------------------------------------------------


def a_trace() -> Trace:
    return Trace(
        source="t.csv",
        prompt_tokens=np.array([100, 5, 40]),
        output_tokens=np.array([10, 60, 2]),
        arrival_time=np.array([0.0, 1.0, 3.0]),
        line=np.array([2, 3, 4]),
        fields={"client": np.array(["a", "b", "c"])},
    )


def columns(trace: Trace) -> list[tuple[int, int]]:
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def test_scaling_keeps_at_least_one_token() -> None:
    assert columns(ScaledFit(length_scale=0.1).fit(a_trace())) == [(10, 1), (1, 6), (4, 1)]
    assert columns(ScaledFit(length_scale=0.1, max_length=9, too_long="drop").fit(a_trace())) == [(1, 6), (4, 1)]
    assert columns(ScaledFit(length_scale=1e30).fit(a_trace()))[0] == (2**31 - 1, 2**31 - 1)


def test_a_recorded_run_is_scaled_clipped_and_limited_as_a_whole(tmp_path: Path) -> None:
    """Its lines state the limit of each output: limits and true lengths follow the lengths, and the workload's limit wins."""
    path, stated = tmp_path / "decisions.jsonl", {"arrival_time": 0.0, "arrival_iteration": 0}
    lengths = {"num_prompt_tokens": 100, "max_new_tokens": 90, "true_new_tokens": 20, "predicted_new_tokens": None}
    longer = {"num_prompt_tokens": 10, "max_new_tokens": 300, "true_new_tokens": 200, "predicted_new_tokens": 40}
    requests = [{"request": {"id": number, **stated, **each}} for number, each in enumerate((lengths, longer))]
    ends = [{"finish": {"id": number, "num_output_tokens": tokens}} for number, tokens in enumerate((20, 200))]
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"run": {}}, *requests, *ends]))

    def replayed(positions: int = 1000, **keys: Any) -> list[tuple[int, int, int | None, int | None]]:
        specs = map(spec_of, TraceReplay(path=str(path), **keys).within(positions).requests(None))
        return [
            (spec.num_prompt_tokens, spec.max_new_tokens, spec.true_new_tokens, spec.predicted_new_tokens)
            for spec in specs
        ]

    assert replayed() == [(100, 90, 20, None), (10, 300, 200, 40)]
    assert replayed(length_scale=0.1) == [(10, 9, 2, None), (1, 30, 20, 4)]
    assert replayed(length_scale=0.01) == [(1, 1, 1, None), (1, 3, 2, 1)]
    assert replayed(max_length=110, too_long="clip") == [(20, 90, 20, None), (1, 109, 200, 40)]
    assert replayed(max_new_tokens=30) == [(100, 30, 20, None), (10, 30, 200, 40)]
    limited = {"too_long": "clip", "max_new_tokens": 30}
    assert (
        replayed(60, **limited) == replayed(1000, **limited, max_length=60) == [(30, 30, 20, None), (10, 30, 200, 40)]
    )
    assert replayed(60, **limited, max_length=50) == [(20, 30, 20, None), (10, 30, 200, 40)]


def test_requests_that_are_too_long_are_clipped_dropped_or_refused() -> None:
    assert columns(Fit(max_length=50, too_long="clip").fit(a_trace())) == [(40, 10), (1, 49), (40, 2)]
    dropped = Fit(max_length=70, too_long="drop").fit(a_trace())
    assert columns(dropped) == [(5, 60), (40, 2)]
    assert dropped.arrival_time is not None
    assert dropped.arrival_time.tolist() == [0.0, 2.0]
    assert dropped.fields["client"].tolist() == ["b", "c"]
    assert columns(Fit(max_length=70, too_long="drop").fit(a_trace(), 1)) == [(5, 60)]
    assert message(lambda: Fit(max_length=70).fit(a_trace())) == (
        "t.csv, line 2: 100 prompt + 10 output tokens exceed workload.max_length=70 "
        "(as set, or the model's positions); raise it if it is set, choose another model, or set workload.too_long to clip or drop"
    )
    assert message(lambda: Fit(max_length=70).fit(replace(a_trace(), line=None))).startswith("t.csv, row 1: 100 prompt")
    assert columns(Fit(max_length=110).fit(a_trace())) == columns(a_trace()), "the longest has 110"
    hashes = np.array([[1, 2, 3, 4], [5], [6, 7]], object)
    clipped = Fit(max_length=50, too_long="clip").fit(replace(a_trace(), fields={"prefix_hashes": hashes}))
    assert list(clipped.fields["prefix_hashes"]) == [[1, 2], [5], [6, 7]], "of 40 of 100 tokens, 1 of 5, and all"
    assert hashes[0] == [1, 2, 3, 4], "the trace itself is left"
    hashed = replace(a_trace(), fields={"prefix_hashes": hashes, "hash_block": np.array([30, 5, 25])})
    clipped = Fit(max_length=40, too_long="clip").fit(hashed)
    assert list(clipped.fields["prefix_hashes"]) == [[1], [5], [6, 7]], "of 30, 1 and 38 tokens"
    assert ScaledFit(length_scale=0.2).fit(hashed).fields["hash_block"].tolist() == [6, 1, 5]
    assert ScaledFit(length_scale=0.1).fit(hashed).fields["hash_block"].tolist() == [3, 0, 0], "unknown: 0.5 and 2.5"
    stated = replace(a_trace(), fields={"max_new_tokens": np.array([45, None, 49], object)})
    assert columns(Fit(max_length=50, too_long="clip").fit(stated)) == [(5, 10), (1, 49), (1, 2)]
    assert columns(Fit(max_length=145, too_long="drop", new_tokens=80).fit(stated)) == [(100, 10), (5, 60), (40, 2)]
    assert columns(Fit(max_length=89, too_long="drop", new_tokens=84).fit(stated)) == [(5, 60), (40, 2)]
    of_lengths = TraceLengths(path="t.csv", max_length=20, too_long="drop")
    assert "workload.lengths.max_length=20 (as set" in message(lambda: of_lengths.fit(a_trace()))
    assert message(lambda: Fit(max_length=20, too_long="drop").fit(a_trace())) == (
        "t.csv: every request exceeds workload.max_length=20 (as set, or the model's positions); "
        "raise it if it is set, choose another model, or set workload.too_long=clip"
    )


def test_a_prompt_file_gives_text_token_ids_and_settings(tmp_path: Path) -> None:
    workload = prompt_file(
        tmp_path,
        {"prompt": "ab\u2028c"},  # a line separator to Unicode, but not to JSON lines
        {
            "token_ids": [1, 2],
            "max_new_tokens": 3,
            "arrival_time": 1.5,
            "temperature": 0.5,
            "top_k": 4,
            "top_p": 0.5,
            "priority": -2,
            "client": "me",
            "stop": "x",
        },
        {"messages": [{"role": "user", "content": "a"}], "arrival_time": 2.0, "stop": ["ab", "c"]},
    )
    first, second, third = workload.requests(Letters(size=9000))
    assert (first.prompt, first.max_new_tokens, first.arrival_time) == ([97, 98, 8232, 99], 7, 0.0)
    assert (second.prompt, second.max_new_tokens, second.arrival_time) == ([1, 2], 3, 1.5)
    assert (second.sampling.temperature, second.sampling.top_k, second.sampling.top_p) == (0.5, 4, 0.5)
    assert (second.priority, second.client) == (-2, "me")
    assert (third.prompt, third.stop_strings) == ([*map(ord, "user>a")], ("ab", "c"))
    assert (first.stop_strings, second.stop_strings) == ((), ("x",))
    assert first.sampling.seed != second.sampling.seed
    assert [r.id for r in replace(workload, num_requests=1).requests(Letters(size=9000))] == [0]
    assert "line 1: a simulation has no tokenizer for prompt text" in message(lambda: workload.requests(None))
    (simulated,) = prompt_file(tmp_path, {"token_ids": [1, 2, 3]}).requests(None)
    assert (simulated.num_prompt_tokens, simulated.prompt) == (3, None)


LENGTHS = [(10, 5), (90, 20), (200, 3), (60, 30)]
FITTED = {"drop": [(10, 5), (60, 30)], "clip": [(10, 5), (80, 20), (97, 3), (60, 30)], "error": LENGTHS}
"""By `too_long`, for a model of 100 positions; the engine refuses what is left too long."""


@pytest.mark.parametrize("too_long", FITTED)
def test_too_long_of_prompts_and_of_a_mix_sees_the_models_positions(too_long: Any, tmp_path: Path) -> None:
    lines = [{"token_ids": [*range(prompt)], "max_new_tokens": output} for prompt, output in LENGTHS]
    prompts = replace(prompt_file(tmp_path, *lines), too_long=too_long).within(100)
    for vocabulary in (None, Letters(size=200)):
        made = prompts.requests(vocabulary)
        assert [(request.num_prompt_tokens, request.max_new_tokens) for request in made] == FITTED[too_long]
    assert [request.prompt for request in made] == [[*range(prompt)] for prompt, _ in FITTED[too_long]]
    path = tmp_path / "table.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{p},{o}\n" for p, o in LENGTHS))
    table = TraceLengths(path=str(path), too_long=too_long, max_length=300)
    mix = MixedLengths(parts={"all": {"share": 1, "lengths": table}})
    made = OpenLoop(num_requests=len(FITTED[too_long]), arrivals=AllAtOnce(), lengths=mix).within(100).requests(None)
    assert [(request.num_prompt_tokens, request.max_new_tokens) for request in made] == FITTED[too_long]


BAD_PROMPTS: list[tuple[object, str]] = [
    ({"promt": "x"}, "promt: is not supported; did you mean prompt?"),
    ({"prompt": "x", "token_ids": [1]}, "give one of prompt, messages and token_ids"),
    ({}, "give one of prompt, messages and token_ids"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    ({"prompt": ""}, "the prompt has no tokens"),
    ({"prompt": 3}, "prompt=3: Input should be a valid string"),
    ({"token_ids": [1, 128]}, "token id 128 is not in the model's vocabulary"),
    ({"prompt": "x", "arrival_time": 1}, "arrival_time 1 comes after 2"),
    ('{"prompt": "x", "arrival_time": NaN}', "arrival_time=nan: "),
    *(
        ({"prompt": "x", **bad}, "{}={}: give ".format(*bad.copy().popitem()))
        for bad in (*({"max_new_tokens": 0}, {"arrival_time": -1}, {"temperature": None}, {"top_p": 0}),)
    ),
    *(({"token_ids": ids}, f"token_ids={ids}: give ") for ids in ([], [True])),
    ("[1]", "'[1]' is not a JSON object"),
    ("x", "'x' is not JSON ("),
]


@pytest.mark.parametrize(("line", "problem"), BAD_PROMPTS)
def test_bad_prompt_lines(tmp_path: Path, line: object, problem: str) -> None:
    first = {"token_ids": [1], "arrival_time": 2 if "comes after" in problem else 0}
    workload = prompt_file(tmp_path, first, line)
    assert message(lambda: workload.requests(Letters())).startswith(f"{tmp_path}/p.jsonl, line 2: {problem}")


# -- bad settings -----------------------------------------------------------------------------------------------------


def closed(**changes: Any) -> ClosedBatch:
    return ClosedBatch(**{"length": 10, "pd_ratio": 1, "batch": 2, **changes})


RATIO: dict[str, Any] = {"pd_ratio": 1}
RANGE = {"min_length": 4, "max_length": 8, **RATIO}
BAD_SETTINGS: list[
    tuple[Callable[..., object], str, dict[str, list[Any]]]
] = [  # what is built, its section, bad values
    (closed, "", {"seed": [-1, 0.5], "num_requests": [0], "length": [1], "batch": [True]}),
    (closed, "", {"pd_ratio": [0, math.nan, "1:2", 10, 0.1], "stagger": [-1, "odd", math.inf]}),
    (closed, "", {"max_new_tokens": [0, "all"], "tiers": [3], "prediction": [0.3], "pad_outputs": [0]}),
    (lambda **keys: closed(sampling=keys), "sampling.", {"temperature": [-1], "top_k": [-1], "top_p": [0]}),
    (partial(GammaArrivals, rate=1), "arrivals.", {"rate": [0, math.nan], "cv": [0]}),
    (partial(FixedLengths, length=4, **RATIO), "lengths.", {"length": [1], "pd_ratio": [4]}),
    (partial(FixedLengths, length=4), "lengths.", {"pd_ratio": [[], 9, 0]}),
    (partial(UniformLengths, **RANGE), "lengths.", {"min_length": [1], "max_length": [2.5, 3], "pd_ratio": [0]}),
    (partial(ZipfLengths, theta=0.4, **RANGE), "lengths.", {"theta": [-1]}),
    (partial(TraceLengths, path="t.csv"), "lengths.", {"order": ["sorted"]}),
    (partial(PromptFile, path="p"), "", {"max_new_tokens": [0]}),
    (partial(TraceReplay, path="t.csv"), "", {"start": [-1], "speed": [0], "max_length": [1], "too_long": ["cut"]}),
]


@pytest.mark.parametrize(("make", "section", "bad"), BAD_SETTINGS)
def test_bad_settings_are_named_with_a_remedy(
    make: Callable[..., object], section: str, bad: dict[str, list[Any]]
) -> None:
    for key, value in ((key, value) for key, values in bad.items() for value in values):
        refusal = message(lambda key=key, value=value: make(**{key: value}))  # type: ignore[misc]
        assert refusal.startswith(f"workload.{section}{key}={value}: ") and (
            "give " in refusal or "Input should be" in refusal
        )


# -- configuration ----------------------------------------------------------------------------------------------------

WORKLOADS = ROOT / "experiments" / "conf" / "workload"
CONFIGS = [
    *(path.stem for path in WORKLOADS.glob("*.yaml")),
    *(f"traces/{path.stem}" for path in WORKLOADS.glob("traces/*.yaml")),
]


def composed(*overrides: str) -> Workload:
    with initialize_config_dir(str(ROOT / "experiments" / "conf"), version_base=None):
        config = compose(overrides=["+seed=3", "+batch=4", *overrides])
    workload: Workload = instantiate(config.workload, _convert_="all")
    return workload


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_config_builds_its_workload(name: str) -> None:
    paths = {"sharegpt": ["lengths.path"], "arxiv": ["lengths.path"], "servegen": ["path", "dataset"]}
    traces = (
        "agents",
        "azure_code",
        "azure_conv",
        "mooncake",
        "prompts",
        "recorded",
        "recorded_sessions",
        "trace",
        "vtc_real",
    )
    keys = paths.get(name, ["path"] if name in traces else [])
    folder = ["+traces=some"] if name.startswith(("landscape_", "traces/")) else []
    workload = composed(f"+workload={name}", *folder, *(f"workload.{key}=some.file" for key in keys))
    assert workload.seed == 3
    assert workload.ignore_eos == (name != "prompts")
