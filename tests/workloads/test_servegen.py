"""ServeGen's workload and the published traces."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import message
from places import published

from experiments.workloads import ServeGen, Trace
from experiments.workloads.readers.traces import read_trace

# -- ServeGen ---------------------------------------------------------------------------------------------------------

HEADER = "client,window_start_s,rate_req_per_s,iat_cv,arrival_family,arg1,arg2\n"
LENGTHS = {"input_tokens": "{10: 0.5, 20: 0.5}", "output_tokens": "{0: 0.25, 5: 0.75}"}


def servegen(tmp_path: Path, windows: str, datasets: list[object] | None = None) -> ServeGen:
    """A workload over two small files, with lengths for the first six hours."""
    if datasets is None:
        datasets = [{"client": client, "dataset": {"0": LENGTHS}} for client in (1, 7)]
    (tmp_path / "t.csv").write_text(HEADER + windows)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in datasets))
    return ServeGen(path=str(tmp_path / "t.csv"), dataset=str(tmp_path / "d.jsonl"))


@pytest.fixture
def two_clients(tmp_path: Path) -> ServeGen:
    return servegen(tmp_path, "1,0,0.5,1,Gamma,1,2\n1,600,0,0,,0,0\n7,0,2,3,Weibull,0.4,0.1\n7,600,1,1,Gamma,0.3,1\n")


def by_client(trace: Trace) -> dict[str, int]:
    names, counts = np.unique(trace.fields["client"], return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))


def test_a_window_holds_exactly_its_rate(two_clients: ServeGen) -> None:
    trace = two_clients.trace()
    assert by_client(trace) == {"1": 300, "7": 1200}
    assert trace.arrival_time is not None and (np.diff(trace.arrival_time, append=600) >= 0).all()
    assert trace.arrival_time[0] == 0
    assert set(trace.prompt_tokens.tolist()) == {10, 20}
    assert set(trace.output_tokens.tolist()) == {1, 5}  # a bin of 0 tokens counts as 1
    assert np.mean(trace.output_tokens == 1) == pytest.approx(0.25, abs=0.04)
    assert abs(np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1]) < 0.1
    assert by_client(replace(two_clients, duration=1200).trace()) == {"1": 300, "7": 1800}
    assert by_client(replace(two_clients, rate_scale=0.5).trace()) == {"1": 150, "7": 600}
    assert by_client(replace(two_clients, clients=[1]).trace()) == {"1": 300}
    fractions = [len(replace(two_clients, rate_scale=0.001, seed=seed).trace()) for seed in range(60)]
    assert np.mean(fractions) == pytest.approx(1.5, abs=0.2), "a fraction of a request is a chance of one"
    assert "no requests from 1200 s to 1800 s" in message(replace(two_clients, start=1200).trace)
    assert "has no client 2; choose from 1, 7" in message(replace(two_clients, clients=[1, 2]).trace)


def test_a_rate_of_all_clients_keeps_their_shares(two_clients: ServeGen) -> None:
    """Recorded are 0.5 and 2 per second in the first window, 0 and 1 in the second: 2.5 and 1.75 per second on average."""
    assert by_client(replace(two_clients, rate=5.0).trace()) == {"1": 600, "7": 2400}
    assert by_client(replace(two_clients, rate=5.0, rate_scale=0.1).trace()) == {"1": 60, "7": 240}
    assert by_client(replace(two_clients, rate=5.0, clients=[1]).trace()) == {"1": 3000}
    assert by_client(replace(two_clients, rate=3.5, duration=1200).trace()) == {"1": 600, "7": 3600}
    half = replace(two_clients, rate=4.0, start=450.0, duration=600.0).trace()  # 150 s of 2.5 and 450 s of 1: 1.375
    whole = replace(two_clients, rate_scale=4.0 / 1.375, start=450.0, duration=600.0).trace()
    assert half.arrival_time is not None and whole.arrival_time is not None
    assert half.arrival_time.tolist() == whole.arrival_time.tolist()
    assert (
        message(replace(two_clients, rate=1.0, clients=[1], start=600.0).trace).split(": ")[1].startswith("no requests")
    )


def test_a_window_of_the_least_published_shape_is_drawn(tmp_path: Path) -> None:
    """The window's requests come in a few bursts. Windows of other clients and times are not checked."""
    for family in ("Gamma", "Weibull"):
        workload = servegen(tmp_path, f"7,0,5,9,{family},0.0067,1\n7,600,5,9,{family},0.0001,1\n1,0,1,1,Pareto,0,1\n")
        times = replace(workload, clients=[7]).trace().arrival_time
        assert times is not None and len(times) == 3000 and (np.diff(times) >= 0).all() and 0 < times[-1] < 600
        assert np.sort(np.diff(times))[-100:].sum() > 0.9 * times[-1]


def test_bursts_have_the_variation_of_the_family(tmp_path: Path) -> None:
    """A Gamma of shape 1/4 has a coefficient of variation of 2; a Weibull of shape 1/2 one of the square root of 5."""
    for family, shape, cv in (("Gamma", 0.25, 2.0), ("Weibull", 0.5, 5**0.5)):
        times = servegen(tmp_path, f"7,0,50,0,{family},{shape},1\n").trace().arrival_time
        assert times is not None
        intervals = np.diff(times)
        assert intervals.std() / intervals.mean() == pytest.approx(cv, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), start=st.floats(0, 500), duration=st.floats(50, 600))
def test_another_range_or_other_clients_move_no_request(
    tmp_path_factory: pytest.TempPathFactory, seed: int, start: float, duration: float
) -> None:
    path = tmp_path_factory.getbasetemp()
    workload = replace(servegen(path, "1,0,0.5,1,Gamma,1,2\n7,0,2,3,Weibull,0.4,0.1\n7,600,1,1,Gamma,1,1\n"), seed=seed)
    whole = replace(workload, duration=1200).trace()
    alone = replace(workload, duration=1200, clients=[7]).trace()
    part = replace(workload, start=start, duration=duration).trace()
    assert alone.prompt_tokens.tolist() == whole.prompt_tokens[whole.fields["client"] == "7"].tolist()
    assert any(part_of(whole, part, first) for first in range(len(whole) - len(part) + 1))


def part_of(whole: Trace, part: Trace, first: int) -> bool:
    """Whether the part is the whole's rows from `first` on."""
    rows = whole.select(slice(first, first + len(part)))
    assert rows.arrival_time is not None
    assert part.arrival_time is not None
    same_lengths = np.array_equal(rows.prompt_tokens, part.prompt_tokens) and np.array_equal(
        rows.output_tokens, part.output_tokens
    )
    return same_lengths and np.allclose(rows.arrival_time, part.arrival_time, atol=1e-6)


OK = "7,0,2,3,Weibull,0.4,0.1\n"
BAD_WINDOWS = [  # the second line of the windows, and what is said of it
    ("x,0,2,3,Weibull,0.4,0.1", "client='x': "),
    ("7,6e-1,2,3,Weibull,0.4,0.1", "window_start_s='6e-1': "),
    ("7,600,-1,3,Weibull,0.4,0.1", "rate_req_per_s='-1': "),
    ("7,650,2,3,Weibull,0.4,0.1", "window_start_s='650': must be a multiple of 600"),
    ("7,600,2,3,Pareto,0.4,0.1", "arrival_family='Pareto': "),
    ("7,600,2,3,Gamma,0,0.1", "arg1='0': "),
    (OK.strip(), "window_start_s='0': this client's window is there already"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_WINDOWS)
def test_bad_windows(tmp_path: Path, line: str, problem: str) -> None:
    workload = replace(servegen(tmp_path, f"{OK}{line}\n"), duration=1200)
    assert message(workload.trace).startswith(f"{tmp_path}/t.csv, line 3: {problem}")


BAD_DATASETS: list[tuple[object, str]] = [
    ({"client": 7}, "dataset is missing: "),
    ({"dataset": {}}, "client is missing: "),
    ({"client": 1, "dataset": {}}, "client=1: this client has a line already"),
    *(({"client": 7, "dataset": windows}, "window 0 has no input_tokens") for windows in ({}, {"0": 3})),
    *(
        ({"client": 7, "dataset": {"0": {**LENGTHS, "output_tokens": text}}}, "window 0, output_tokens: must map")
        for text in ("{5: 0.5}", "{5: 1, 6}", "{-5: 1}", "{a: 1}")
    ),
]


@pytest.mark.parametrize(("line", "problem"), BAD_DATASETS)
def test_bad_datasets(tmp_path: Path, line: object, problem: str) -> None:
    workload = servegen(tmp_path, OK, [{"client": 1, "dataset": {}}, line])
    assert message(workload.trace).startswith(f"{tmp_path}/d.jsonl, line 2: {problem}")


def test_the_two_files_are_of_one_data_set(tmp_path: Path) -> None:
    lacking = servegen(tmp_path, OK, [{"client": 1, "dataset": {}}])
    assert message(lacking.trace).startswith(f"{tmp_path}/d.jsonl: no line for client 7")


# -- the published files ----------------------------------------------------------------------------------------------

PUBLISHED = [  # rows, span in seconds, medians of prompt and output, as the files' notes give them
    ("azure_llm_2023_conv_rows1-14176.csv.gz", 14176, 2400, 1015, 115),
    ("azure_llm_2023_code_rows1-5740.csv.gz", 5740, 1788, 1460, 13),
    ("mooncake_fast25_conversation_rows1-7851.jsonl.gz", 7851, 2397, 7284, 356),
    ("arxiv_summarization_llama2_rows1-18838.csv.gz", 18838, None, 2716, 167),
    ("sharegpt_8k_llama2_rows1-20490.csv.gz", 20490, None, 1723, 410),
    ("vtc_real_27clients.csv.gz", 1500, 600, 40, 211),
]


@pytest.mark.parametrize(("name", "num", "span", "prompt", "output"), PUBLISHED)
def test_published_traces(name: str, num: int, span: float | None, prompt: int, output: int) -> None:
    trace = read_trace(published(name))
    medians = np.median(trace.prompt_tokens), np.median(trace.output_tokens)
    assert len(trace) == num and medians == (pytest.approx(prompt, abs=0.5), output)
    end = None if trace.arrival_time is None else trace.arrival_time[-1]
    assert end == (span and pytest.approx(span, abs=0.5))
