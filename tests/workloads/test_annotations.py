"""What workloads add to requests: the visible limit, tiers, objectives and predictions, each seeded on its own."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command, summary
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import message
from test_workload_files import closed
from test_workloads import Letters, facts, open_loop, prompt_file

from cbatch import SLO, FinishReason
from cbatch.facts import facts_of
from cbatch.request import Request, spec_of
from experiments.workloads import TraceReplay
from experiments.workloads.readers.traces import read_trace
from experiments.workloads.trace import Fit

TIERS: dict[str, Any] = {
    "gold": {"share": 0.2, "priority": 2, "slo": {"ttft": 0.5, "tbt": 0.05}},
    "silver": {"share": 0.3, "priority": 1},
    "rest": {"share": 0.5},
}


def drawn(request: Request) -> tuple[Any, ...]:
    """What was drawn for a request apart from what `facts` tells."""
    return (request.tier, request.slo, request.predicted_new_tokens, spec_of(request).true_new_tokens)


# -- the limit --------------------------------------------------------------------------------------------------------


def test_a_number_is_the_limit_of_all_and_cuts_longer_outputs() -> None:
    plain = open_loop().requests(None)  # outputs of 2 to 16 tokens
    assert facts_of(plain).lengths_known and {drawn(request) for request in plain} == {(None, SLO(), None, None)}
    limited = replace(open_loop(), max_new_tokens=10, prediction={"error": 0}, slo={"total": 30}).requests(None)
    assert all(r.predicted_new_tokens == min(spec_of(r).true_new_tokens, 10) for r in limited), (
        "predicted without error"
    )
    assert {(r.tier, r.slo, r.deadline) for r in limited} == {
        (None, SLO(total=30), r.arrival_time + 30) for r in limited
    }
    assert {request.max_new_tokens for request in limited} == {10}
    assert [spec_of(request).true_new_tokens for request in limited] == [r.max_new_tokens for r in plain]
    assert not facts_of(limited).lengths_known
    assert [r.num_prompt_tokens for r in limited] == [r.num_prompt_tokens for r in plain]


@pytest.mark.parametrize("stream", ["on", "off"])
def test_outputs_that_the_limit_cuts_are_counted_and_said(stream: str, tmp_path: Path) -> None:
    """A limit of 6 cuts two of the outputs of 5, 6, 7 and 9 tokens."""
    lengths = "\n".join(f"0,9,{output}" for output in (5, 6, 7, 9))
    (tmp_path / "four.csv").write_text(f"arrived_at,num_prefill_tokens,num_decode_tokens\n{lengths}\n")
    trace = ("workload=trace", "workload.path=four.csv", f"stream={stream}", "policy=orca")
    for limit, cut in (("6", 2), ("9", 0), ("exact", 0)):
        done = command("run", *trace, f"workload.max_new_tokens={limit}", f"output={limit}", cwd=tmp_path)
        assert ("\noutputs cut at max_new_tokens: 2 of 4\n" in done.stdout) is (cut > 0), done
        assert summary(tmp_path / limit)["about"]["outputs_cut"] == cut


def test_a_request_that_its_limit_ends_before_its_own_end_is_cut() -> None:
    length, stop, rejected = FinishReason.LENGTH, FinishReason.STOP, FinishReason.REJECTED
    for true, stops, ended, cut in (
        (None, (), length, False),  # its limit is its length
        (None, (2,), length, True),  # and no stop token came
        (None, (2,), stop, False),
        (6, (), length, True),
        (5, (), length, False),
        (4, (), stop, False),
        (6, (), rejected, False),
        (6, (), None, False),  # has not ended
    ):
        request = Request(0, 3, 5, true_new_tokens=true, stop_tokens=stops)
        request.finish_reason = ended
        assert request.is_cut is cut


def test_outputs_are_padded_to_the_longest_of_their_batch() -> None:
    """Seven requests in batches of 3: two full ones and the last request alone."""
    outputs = np.array([5, 9, 2, 4, 4, 7, 3])
    columns = replace(closed(), pad_outputs=3).annotate(outputs, seed=0)
    assert columns["max_new_tokens"].tolist() == [9, 9, 9, 7, 7, 7, 3]
    limited = replace(closed(), pad_outputs=3, max_new_tokens=8).annotate(outputs, seed=0)
    assert limited["true_new_tokens"].tolist() == [9, 9, 9, 7, 7, 7, 3]


# -- tiers and objectives ---------------------------------------------------------------------------------------------


def test_tiers_have_their_shares_priorities_and_objectives() -> None:
    requests = replace(open_loop(num=20_000), tiers=TIERS, slo={"total": 9}).requests(None)
    names = [request.tier for request in requests]
    assert {name: names.count(name) / 20_000 for name in TIERS} == pytest.approx(
        {"gold": 0.2, "silver": 0.3, "rest": 0.5}, abs=0.01
    )
    assert {(request.tier, request.priority, request.slo) for request in requests} == {
        ("gold", 2, SLO(ttft=0.5, tbt=0.05)),
        ("silver", 1, SLO(total=9)),
        ("rest", 0, SLO(total=9)),
    }
    assert "tiers: the shares sum to 0.5" in message(lambda: closed(tiers={"a": {"share": 0.5}}))


# -- predictions ------------------------------------------------------------------------------------------------------


def test_prediction_errors_are_lognormal() -> None:
    """The logarithm of predicted / true has mean 0 and the given sigma; 500 tokens make rounding negligible."""
    requests = closed(length=1000, num_requests=20_000, prediction={"error": 0.3}).requests(None)
    errors = np.log([(request.predicted_new_tokens or 0) / 500 for request in requests])
    assert errors.mean() == pytest.approx(0, abs=0.01)
    assert errors.std() == pytest.approx(0.3, rel=0.02)
    assert np.mean(np.abs(errors) < 0.3) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.01)


# -- independence -----------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), num=st.integers(1, 30), more=st.integers(0, 20), error=st.floats(0, 2))
def test_what_is_added_moves_nothing_else(seed: int, num: int, more: int, error: float) -> None:
    plain = open_loop(seed, num)
    full = replace(
        plain, tiers={name: {**tier, "priority": 0} for name, tier in TIERS.items()}, prediction={"error": error}
    )
    requests = full.requests(Letters())
    assert [facts(request) for request in requests] == [facts(request) for request in plain.requests(Letters())]
    longer = replace(full, num_requests=num + more).requests(None)
    assert [drawn(request) for request in longer[:num]] == [drawn(request) for request in requests]
    assert [r.tier for r in replace(full, prediction=None).requests(None)] == [r.tier for r in requests]
    untiered = replace(full, tiers=None).requests(None)
    assert [r.predicted_new_tokens for r in untiered] == [r.predicted_new_tokens for r in requests]


# -- what the data has ------------------------------------------------------------------------------------------------


def test_prompt_lines_take_precedence(tmp_path: Path) -> None:
    own = {
        "tier": "own",
        "priority": 7,
        "slo": {"tbt": 0.1},
        "session": "s",
        "predicted_new_tokens": 5,
        "true_new_tokens": 2,
    }
    file = prompt_file(tmp_path, {"token_ids": [1]}, {"token_ids": [1], **own})
    workload = replace(file, tiers={"all": {"share": 1, "priority": 1}}, slo={"ttft": 2})
    first, second = workload.requests(None)
    assert (first.tier, first.priority, first.slo, first.session) == ("all", 1, SLO(ttft=2), None)
    assert (second.tier, second.priority, second.slo, second.session) == ("own", 7, SLO(tbt=0.1), "s")
    assert (second.predicted_new_tokens, spec_of(second).true_new_tokens, second.max_new_tokens) == (5, 2, 7)
    assert spec_of(first).true_new_tokens is None


def test_mooncake_hashes_become_prefix_hashes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    rows = [(1024, [3, 9]), (1500, [3, 9, 4]), (5, None)]
    lines = [{"timestamp": 0, "input_length": n, "output_length": 1, "hash_ids": ids} for n, ids in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = TraceReplay(path=str(path)).requests(None)
    assert [request.prefix_hashes for request in requests] == [(3, 9), (3, 9), ()], "id 4 stands for 476 tokens"
    path.write_text(path.read_text().replace("hash_ids", "mine"))
    named = TraceReplay(path=str(path), columns={"prefix_hashes": "mine"})
    assert [(spec_of(each).hash_block, each.prefix_hashes) for each in named.requests(None)][1] == (512, (3, 9))
    path.write_text(path.read_text().replace("[3, 9, 4]", "[3]"))
    refusal = "line 2: mine=[3]: must have an id for each 512 tokens of input_length"
    assert refusal in message(lambda: named.requests(None))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    clipped = Fit(max_length=1025, too_long="clip").fit(read_trace(str(path)))
    assert clipped.fields["prefix_hashes"].tolist() == [(3, 9), (3, 9), ()]
    clipped = Fit(max_length=513, too_long="clip").fit(read_trace(str(path)))
    assert clipped.fields["prefix_hashes"].tolist() == [(3,), (3,), ()]
