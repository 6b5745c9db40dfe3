"""Recorded runs of vLLM: what was asked of it, and that simulation with nothing fitted to them comes close."""

import numpy as np
import pandas as pd
import pytest
from places import SHARED

from cbatch.cost import BatchShape
from cbatch.sim import ProfileCost
from experiments.setup.presets import load_spec
from reproduction.profiles import convert
from reproduction.validation.rivals import KNOWN, STAGES, asked, named_blocks, predicted

KERNELS = SHARED / "profiles" / "aiconfigurator"
needs_tables = pytest.mark.skipif(not (SHARED / STAGES).is_file(), reason="published tables are not here")


def test_users_send_the_same_prompt_in_turn_over_the_whole_stage() -> None:
    stage = {"prompt_tokens": 566, "output_tokens": 247, "requests_per_s": 5, "seconds": 60}
    requests, ends = asked([stage, {**stage, "requests_per_s": 10}])
    assert ends == [300, 900] and [request.id for request in requests] == [*range(900)]
    times = np.array([request.arrival_time for request in requests])
    assert (np.diff(times) > 0).all() and times[[299, 899]] == pytest.approx([60, 120])
    assert requests[0].prefix_hashes == requests[44].prefix_hashes and len(requests[0].prefix_hashes) == 35
    assert not {*requests[0].prefix_hashes} & {*requests[43].prefix_hashes}


def test_blocks_have_the_same_name_where_all_text_up_to_their_end_is_the_same() -> None:
    known: dict[object, int] = {}
    first, second = [*named_blocks([1] * 40, known)], [*named_blocks([1] * 16 + [2] * 16, known)]
    assert len(first) == len(second) == 2 and first[0] == second[0] and first[1] != second[1]


@pytest.mark.long
@needs_tables
def test_the_time_of_an_engine_is_added_to_each_iteration_and_each_of_its_requests() -> None:
    spec = load_spec("llama-3.1-8b")
    plain, longer = (ProfileCost(convert(KERNELS / "h100_sxm", [spec], *host), spec) for host in ((), (0.5, 20.0)))
    for number in (1, 32, 100):
        shape = BatchShape((), number, 700 * number)
        assert longer.predict(shape) - plain.predict(shape) == pytest.approx(0.5e-3 + 20e-6 * number)


@pytest.mark.long
@needs_tables
def test_a_minute_of_a_recorded_run_is_simulated_to_within_its_error() -> None:
    stage = pd.read_csv(SHARED / STAGES).to_dict("records")[2]
    assert (stage["run"], stage["requests_per_s"]) == (18, 5)
    ours = predicted([{**stage, "seconds": 60}], load_spec("llama-3.1-8b"), KERNELS, **KNOWN["engine"])[0]  # type: ignore[dict-item]
    assert ours["e2e_mean_ms"] == pytest.approx(stage["e2e_mean_ms"], rel=0.05)
    assert ours["ttft_mean_ms"] == pytest.approx(stage["ttft_mean_ms"], rel=0.12)  # a seventh of the prompts is new
