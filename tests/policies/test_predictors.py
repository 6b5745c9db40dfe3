"""Predictors of output lengths: what each may know, how large its errors are, and on what they depend."""

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pytest
from plain_view import PlainRequest

from cbatch import FinishReason, RequestSpec
from policies.predictors import Bins, History, Noisy, Oracle, Predictor, Ranks


def request(id_: int = 0, limit: int = 20, new: int = 0, **fields: Any) -> PlainRequest:
    """A request that has generated `new` tokens after its prompt of 5."""
    made = PlainRequest.from_spec(RequestSpec(id_, 5, limit, **fields))
    made.total = 5 + new
    return made


def outputs(predictor: Predictor, true: int, number: int = 4000) -> Any:
    """Predictions for as many requests of the same true length, [requests]."""
    return np.array([predictor.output(request(id_, 1000, true_new_tokens=true)) for id_ in range(number)])


def test_without_a_model_it_is_the_workloads_prediction_or_the_limit() -> None:
    predictor = Predictor()
    assert predictor.output(request(limit=20, true_new_tokens=3)) == 20
    assert predictor.output(request(limit=20, predicted_new_tokens=7)) == 7
    assert predictor.remaining(request(limit=20, predicted_new_tokens=7, new=5)) == 2
    past = request(predicted_new_tokens=7, new=9)
    assert (predictor.output(past), predictor.remaining(past)) == (10, 1), "at least one token is still to come"


def test_the_oracle_knows_the_true_length_up_to_the_limit() -> None:
    assert [Oracle().output(request(limit=20, true_new_tokens=true)) for true in (None, 3, 30)] == [20, 3, 20]


def test_a_relative_error_is_uniform_up_to_the_share() -> None:
    found = outputs(Noisy(share=0.5), 100)
    assert 50 <= found.min() < 51 and 149 < found.max() <= 150
    assert np.histogram(found, bins=4, range=(50, 150))[0] / len(found) == pytest.approx([0.25] * 4, abs=0.03)


def test_an_error_in_tokens_is_gaussian_with_this_mean_size() -> None:
    """The mean size is s * sqrt(2 / pi) for a standard deviation s; 68.3% of the errors are within s = 12.53."""
    errors = outputs(Noisy(mae=10.0), 500) - 500
    assert np.abs(errors).mean() == pytest.approx(10, rel=0.05) and errors.mean() == pytest.approx(0, abs=0.6)
    assert (np.abs(errors) < 12.53).mean() == pytest.approx(0.683, abs=0.03)


def test_a_prediction_is_at_least_a_token() -> None:
    assert outputs(Noisy(mae=50.0), 2, 100).min() == outputs(Noisy(share=1.0), 1, 100).min() == 1.0


@pytest.mark.parametrize("predictor", [Noisy(mae=0.0), Noisy(share=0.0), Ranks(sigma=0.0)])
def test_without_an_error_it_is_the_true_length(predictor: Predictor) -> None:
    assert set(outputs(predictor, 70, 10)) == {70.0}


@pytest.mark.parametrize("make", [lambda seed: Noisy(mae=9.0, seed=seed), lambda seed: Ranks(seed=seed)])
def test_an_error_depends_on_seed_and_request_alone(make: Callable[[int], Predictor]) -> None:
    first, second = (request(id_, 100, true_new_tokens=50) for id_ in (1, 2))
    later = request(1, 100, true_new_tokens=50, new=9)
    assert make(0).output(first) == make(0).output(first) == make(0).output(later)
    assert make(0).output(first) not in (make(0).output(second), make(1).output(first))


def test_classes_are_known_by_their_middles_and_looked_at_again() -> None:
    """Four classes of 4 tokens up to 16. Of 10 tokens: class 2, 8 to 12; of the 2 that are left after 8: class 0, 0 to 4."""
    predictor = Bins(bins=4, longest=16, refresh=8)
    true_10 = [request(limit=100, true_new_tokens=10, new=new) for new in (0, 7, 8, 9)]
    assert [predictor.output(each) for each in true_10] == [10.0, 10.0, 8 + 2.0, 8 + 2.0]
    assert predictor.output(request(limit=100, true_new_tokens=8)) == 10.0
    assert predictor.output(request(limit=100, true_new_tokens=7)) == 6.0
    assert predictor.output(request(limit=100, true_new_tokens=90)) == 14.0, "the last class holds all that are longer"


def test_each_look_is_taken_once_and_no_other_stands_for_it() -> None:
    """7 tokens are in class 1, 4 to 8, whose middle is 6; the one left after 6 is in class 0, whose middle is 2."""
    predictor, asked = Bins(bins=4, longest=16, refresh=6), request(limit=100, true_new_tokens=7)
    assert predictor.output(asked) == 6.0
    asked.total += 6
    assert predictor.output(asked) == 6 + 2.0


def test_a_classifier_errs_to_either_side_as_often_as_it_is_told() -> None:
    predictor = Bins(bins=4, longest=16, error=0.5)
    shares = {middle: (outputs(predictor, 10) == middle).mean() for middle in (6.0, 10.0, 14.0)}
    assert shares == pytest.approx({6.0: 0.25, 10.0: 0.5, 14.0: 0.25}, abs=0.03)
    assert set(outputs(Bins(bins=4, longest=16, error=1.0), 1, 50)) == {2.0, 6.0}, "no class is below the first"
    assert set(outputs(Bins(bins=4, longest=16, error=1.0), 15, 50)) == {10.0, 14.0}
    looks = [
        [Bins(100, 100, 1, 1.0).output(request(id_, 100, true_new_tokens=50, new=new)) for new in (0, 1)]
        for id_ in range(40)
    ]
    assert {first == second for first, second in looks} == {True, False}, "each look errs by itself"


def test_a_score_is_lognormal_around_the_true_length() -> None:
    logs = np.log(outputs(Ranks(sigma=0.5), 100))
    assert logs.mean() == pytest.approx(log(100), abs=0.03) and logs.std() == pytest.approx(0.5, rel=0.05)
    assert Ranks(sigma=0.0).output(request(true_new_tokens=3, new=9)) == 3.0, "it only orders requests"
    assert Ranks(sigma=0.0).remaining(request(limit=30, true_new_tokens=9, new=4)) == 5.0


def test_the_mean_of_the_last_ended_requests() -> None:
    predictor, asked = History(window=2), request(limit=30)
    assert predictor.output(asked) == 30
    served, left = FinishReason.STOP, FinishReason.CANCELLED
    for tokens, reason, mean in ((4, served, 4.0), (8, served, 6.0), (90, left, 6.0), (16, served, 12.0)):
        ended = request()
        ended.num_output_tokens, ended.finish_reason = tokens, reason
        predictor.observe(ended)
        assert predictor.output(asked) == mean
