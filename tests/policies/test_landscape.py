"""Golden schedules of the published policies, computed by hand or by a simulator of its own, on the unit machine."""

import re
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from unit_machine import golden

from cbatch import SLO, BatchShape, ConfigError, Request
from experiments.settings.compose import compose_run
from policies.chunking import Fixed, Slack
from policies.lars import LARS
from policies.length_order import LengthOrder
from policies.ltr import LTR
from policies.mc_sf import McSf
from policies.mlfq import MLFQ
from policies.past_future import PastFuture
from policies.predictors import Bins, Noisy, Oracle, Predictor
from policies.qoserve import QoServe
from policies.sarathi_serve import SarathiServe
from policies.shared.future_memory import draw_left, most_held
from policies.slai import Slai
from policies.vllm_v1 import VllmV1
from policies.vtc import VTC

# -- vllm_v1: one budget, admission order -----------------------------------------------------------------------------------


# -- length_order: SGLang's schedule policies -----------------------------------------------------------------------------


def test_the_highest_response_ratio_is_next() -> None:
    """1,000 tokens were processed. X came after 200 of them, prompt 400: 2.0; Y after 800, 50: 4.0; Z before all, 900: 1.1."""
    policy = LengthOrder(Fixed(100), Predictor(), "hrrn")
    x, y, z = (Request(id_, prompt, 1) for id_, prompt in enumerate((400, 50, 900)))
    for processed, request in ((0, z), (200, x), (800, y)):
        policy._processed = processed
        policy.on_arrival(request)
    policy._processed = 1000
    assert sorted([x, y, z], key=policy._response_ratio, reverse=True) == [y, x, z]


# -- trail: SRPT with limited preemption ----------------------------------------------------------------------------------


# -- vtc: fair shares among clients -----------------------------------------------------------------------------------------

SEVEN = "f1 2/2 @0, f2 2/2 @0, f3 2/2 @0, g1 2/2 @0, f4 2/2 @0, g2 2/2 @4, g3 2/2 @4"
CLIENTS = {name: name[0] for name in ("f1", "f2", "f3", "f4", "g1", "g2", "g3")}


def test_vtc_lifts_a_client_that_paused() -> None:
    """g paused from 3 to 4 with 6 on its counter and is lifted to f's 18; f, which came first, wins the tie."""
    found = golden(VTC(Predictor()), SEVEN, batch=2, client=CLIENTS)
    assert found.schedule == "f12 g12 | f11 g11 | f22 f32 | f21 f31 | f42 g22 | f41 g21 | g32 | g31"
    assert found.policy.counters == {"f": 24, "g": 30}


def test_least_counter_first_gives_credit_for_a_pause() -> None:
    found = golden(VTC(Predictor(), lift=False), SEVEN, batch=2, client=CLIENTS)
    assert found.schedule == "f12 g12 | f11 g11 | f22 f32 | f21 f31 | g22 g32 | g21 g31 | f42 | f41"
    assert found.policy.counters == {"f": 24, "g": 18}


# -- mc_sf and past_future: what the KV cache will hold ---------------------------------------------------------------------


def test_the_most_that_requests_hold_at_an_end() -> None:
    """(5, 4) and (3, 2): when the second ends, both hold 8 + 2 * 2 = 12; when the first ends, it holds 5 + 4 = 9."""
    assert most_held([5, 3], [4, 2]) == 12
    assert most_held([5, 3, 4], [4, 2, 3]) == 18, "5 + 4 = 9, 9 + 2 * 3 = 15, 12 + 3 * 2 = 18"


def test_past_future_draws_what_is_left_from_longer_outputs() -> None:
    """10 tokens generated, ended requests of 4, 12 and 20, limit 30: what is left is between 0 and 20, half of it below 10."""
    drawn = draw_left(Random(1), [10] * 4000, [30] * 4000, [4, 12, 20])
    assert min(drawn) >= 0 and max(drawn) <= 20
    # the support is 10, 12, 20, 30, each third equally likely: left 0 to 2, 2 to 10, 10 to 20
    assert [
        np.mean([low <= left < high for left in drawn]) for low, high in ((0, 2), (2, 10), (10, 20))
    ] == pytest.approx([1 / 3] * 3, abs=0.03)


# -- slai: decodes at the last moment ---------------------------------------------------------------------------------------


# -- qoserve: deadlines, chunks, relegation -----------------------------------------------------------------------------------


def interactive(id_: int, arrival: float, prompt: int) -> Request:
    return Request(id_, prompt, 10, arrival_time=arrival, slo=SLO(ttft=6))


@pytest.mark.parametrize(("order", "expected"), [("hybrid", "I3 I2 I1 N1"), ("edf", "I2 I3 I1 N1")])
def test_qoserve_ranks_by_deadline_and_tokens_left(order: str, expected: str) -> None:
    """Hybrid: I1 9.8 + 6 + 8 = 23.8, I2 9 + 6 + 1.6 = 16.6, I3 9.2 + 6 + 0.8 = 16.0, N1 600 + 5.6 = 605.6."""
    requests = {
        "I1": interactive(0, 9.8, 1000),
        "I2": interactive(1, 9.0, 200),
        "I3": interactive(2, 9.2, 100),
        "N1": Request(3, 500, 200, slo=SLO(total=600)),
    }
    policy = QoServe(Slack(), Oracle(), order)
    assert " ".join(sorted(requests, key=lambda name: policy.urgency(requests[name]))) == expected
    if order == "hybrid":
        urgencies = {name: policy.urgency(request)[1] for name, request in requests.items()}
        assert urgencies == pytest.approx({"I1": 23.8, "I2": 16.6, "I3": 16.0, "N1": 605.6})


def test_qoserve_relegates_what_cannot_be_in_time() -> None:
    """8 tokens per second: 16 tokens take 2 s, and B's first token is due 1 s after its arrival; A and C come first."""
    policy = QoServe(Fixed(8), Oracle(), "edf")
    policy._times.prompt_rate = 8.0
    slos = {"A": SLO(ttft=9), "B": SLO(ttft=1), "C": SLO(ttft=9)}
    found = golden(policy, "A 8/1 @0, B 16/1 @0, C 8/1 @0", slo=slos)
    assert found.schedule == "A8 | C8 | B8 | B8"
    kept = QoServe(Fixed(8), Oracle(), "edf", relegate=False)
    assert golden(kept, "A 8/1 @0, B 16/1 @0, C 8/1 @0", slo=slos).schedule == "B8 | B8 | A8 | C8"


def test_the_chunk_ends_before_a_decode_is_due() -> None:
    """15 ms + 0.06 ms per token: 512 tokens take 45.7 ms, 1.2 times that is 54.9; 768 would be 73 ms, over the 60 ms left."""

    def seconds(shape: BatchShape) -> float:
        return 1e-3 * (15 + 0.06 * shape.num_tokens)

    # A's first token comes at once, 21 ms after its arrival at 0, and is due then; its next one is due 60 ms later
    slos = {"A": SLO(ttft=1e-9, tbt=0.06)}
    requests = "A 100/2 @0, B 4000/1 @0.001"
    found = golden(SarathiServe(Slack()), requests, tokens=4000, memory=100_000, seconds=seconds, slo=slos)
    assert found.schedule.startswith("A100 | A1 B511 | ")


# -- mlfq and ltr: every request is ranked again in each iteration; those left out pause ---------------------------------------


# -- lars: least relative slack first ---------------------------------------------------------------------------------------


def test_lars_ranks_by_relative_slack_and_yields() -> None:
    """L: work 10, deadline 16, 5 left at t = 5: (16 - 5 - 5) / 10 = 0.6. A short: work 0.5, due 1 after t = 5: 0.5 / 0.5 = 1.0.

    L goes on with 1 - 0.6 = 40% of each iteration's second and leaves 60% to the shorts, which fit: one token takes 10 ms.
    """
    policy = LARS(target=1.0)
    slos = {"L": SLO(ttft=16), "S": SLO(ttft=1), "T": SLO(ttft=1)}
    requests = "L 1000/1 @0, S 50/1 @5, T 50/1 @5"
    found = golden(policy, requests, tokens=1000, seconds=lambda shape: shape.num_tokens / 100, slo=slos)
    entries = found.schedule.split(" | ")
    assert entries[0] == "L40", "at first (16 - 0 - 10) / 10 = 0.6 too: 40 tokens of the 100 in a second"
    with_shorts = next(entry for entry in entries if "S" in entry)
    assert with_shorts.startswith("L") and "S50" in with_shorts
    assert all(int(entry.split()[0][1:]) <= 100 for entry in entries)
    assert found.ends["S"] <= 7 and found.ends["T"] <= 7 and found.ends["L"] <= 16


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: VllmV1("auto"), "policy.budget=auto: give a number of tokens"),  # type: ignore[arg-type]
        (lambda: Slai("auto"), "policy.budget=auto: give a number of tokens"),  # type: ignore[arg-type]
        (lambda: VllmV1(8, victim="first"), "victim='first'"),
        (lambda: VTC(Predictor(), weights={"a": 0}), "weights must be above 0"),
        (lambda: VTC(Predictor(), order="lcf"), "order='lcf' must be vtc, mdrr or fcfs"),
        (lambda: VTC(Predictor(), quantum=0), "quantum=0 above 0"),
        (lambda: VTC(Predictor(), rpm=0), "policy.rpm=0: give at least 1"),
        (lambda: LengthOrder(Fixed(8), Predictor(), "shortest"), "policy.order=shortest: choose one of sjf"),
        (lambda: QoServe(Fixed(8), Predictor(), "lifo"), "order='lifo'"),
        (lambda: PastFuture("careful"), "admission='careful' in past_future, aggressive, conservative, optimum"),
        (lambda: McSf(Predictor(), "longest"), "policy.order=longest"),
        (lambda: MLFQ(quantum=0), "quantum=0"),
        (lambda: MLFQ(promote_after=0), "promote_after=0"),
        (lambda: LTR(Predictor(), starvation=0), "starvation=0"),
        (lambda: LARS(target=-1), "target=-1"),
        (lambda: LARS(ttft=0), "ttft=0"),
        (lambda: Noisy(), "give predictor.mae"),
        (lambda: Bins(refresh=0), "refresh >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


def test_whole_numbers_are_numbers_and_lists_are_not_judged() -> None:
    policy = compose_run("policy=past_future", "policy.reserve=0", "+policy.history=[3,5]").policy()
    assert isinstance(policy, PastFuture) and policy._ended.ascending == [3, 5]
