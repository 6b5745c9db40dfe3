"""Sampling against sampling written out token by token, and carry-over."""

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tiny_models import draw, splitmix

from cbatch import RequestSpec, Sampling
from cbatch.request_table import RequestTable
from cbatch.runtime.batch import Fields
from cbatch.runtime.carry import carry_over
from cbatch.runtime.sampling import greedy, sample, uniform

VOCABULARY = 40


def batch_of(samplings: list[Sampling], numbers: np.ndarray) -> tuple[Fields[torch.Tensor], torch.Tensor]:
    fields = dict.fromkeys(Fields.__dataclass_fields__, torch.zeros(0))
    for name, kind in (("temperature", torch.float32), ("top_p", torch.float32), ("top_k", torch.int32)):
        fields[name] = torch.tensor([getattr(sampling, name) for sampling in samplings], dtype=kind)
    return Fields(**fields), torch.from_numpy(numbers).float()


def numbers_of(seeds: list[int], positions: np.ndarray) -> np.ndarray:
    halves = np.array(seeds, np.uint64).view(np.int32).reshape(-1, 2)
    return uniform(torch.from_numpy(halves), torch.from_numpy(positions.astype(np.int32))).numpy()


samplings = st.lists(
    st.builds(
        Sampling,
        temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
        top_k=st.sampled_from((0, 1, 2, 7, 1000)),
        top_p=st.sampled_from((1.0, 0.9, 0.5, 0.05)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.long
@settings(max_examples=100)
@given(samplings=samplings, seed=st.integers(0, 2**32))
def test_it_inverts_the_filtered_distribution(samplings: list[Sampling], seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(len(samplings), VOCABULARY)).astype(np.float32) * 3
    numbers = random.random(len(samplings), dtype=np.float32)
    tokens = sample(torch.from_numpy(logits), *batch_of(samplings, numbers))
    assert tokens.dtype is torch.int32
    for row, sampling in enumerate(samplings):
        expected = draw(logits[row].astype(np.float64), sampling, float(numbers[row]))
        event(f"tie: {expected is None}")
        assert expected is None or tokens[row] == expected


def likeliest(logits: torch.Tensor) -> list[int]:
    tokens = torch.empty(len(logits), dtype=torch.int32)
    greedy(logits, tokens)
    return tokens.tolist()


def test_a_row_of_temperature_0_is_greedy_beside_any_other() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(), Sampling(2.0), Sampling(), Sampling(1.0, 3), Sampling(), Sampling(1.0, 0, 0.1)]
    tokens = sample(logits, *batch_of(samplings, np.full(6, 0.999)))
    assert tokens[::2].tolist() == likeliest(logits)[::2]


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("filters", [(0, 1.0), (5, 1.0), (0, 0.9), (5, 0.5)])
def test_the_least_temperatures_give_the_likeliest_token(filters: tuple[int, float], flush: bool) -> None:
    """Logits of either sign, so large that their quotients by the temperature are infinite; the processor may flush denormals."""
    temperatures = (1e-45, 1e-40, 1.2e-38, 6e-38, 1e-30)
    logits = torch.randn(10, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 9
    logits[5:] -= logits[5:].amax(dim=-1, keepdim=True) + 20
    batch, numbers = batch_of([Sampling(temperature, *filters) for temperature in temperatures] * 2, np.full(10, 0.999))
    assert (batch.temperature > 0).all()
    torch.set_flush_denormal(flush)
    try:
        tokens = sample(logits, batch, numbers)
    finally:
        torch.set_flush_denormal(False)
    assert tokens.tolist() == likeliest(logits)


@given(st.floats(0, 1e300), st.integers(0, 2**40))
def test_any_temperature_and_top_k_has_a_row(temperature: float, top_k: int) -> None:
    """A temperature below 1e-5 is greedy, so that equal logits give the lowest token, too."""
    table = RequestTable(1, 1)
    row = table.admit(RequestSpec(0, 1, 1, sampling=Sampling(temperature, top_k)))
    assert (table.temperature[row] > 0) == (temperature >= 1e-5)
    assert np.isfinite(table.temperature[row]) and table.top_k[row] == min(top_k, 2**31 - 1)


def test_equal_logits_give_the_lowest_token_greedily() -> None:
    logits = torch.zeros(2, VOCABULARY)
    assert likeliest(logits) == [0, 0]
    assert sample(logits, *batch_of([Sampling(), Sampling(1.0, 1)], np.array([0.9, 0.9]))).tolist() == [0, 0]


def test_the_extremes_of_the_random_number_stay_inside_the_distribution() -> None:
    """The largest number below 1 takes the last token that the filters leave, never one beyond."""
    logits = torch.linspace(5, -5, VOCABULARY).repeat(4, 1)
    samplings = [Sampling(1.0, 3), Sampling(1.0, 3), Sampling(1.0, 0, 0.5), Sampling(0.1)]
    numbers = np.array([0.0, 1 - 2.0**-24, 1 - 2.0**-24, 1 - 2.0**-24])
    tokens = sample(logits, *batch_of(samplings, numbers)).tolist()
    assert tokens[:3] == [0, 2, 2]
    assert tokens[3] < VOCABULARY


def test_frequencies_are_those_of_the_distribution() -> None:
    """Pearson's chi-squared over 20,000 draws with the runtime's own random numbers; 99.9% bound, 9 degrees of freedom."""
    count = 20_000
    logits = torch.linspace(0, -2, 10)
    numbers = numbers_of([11] * count, np.arange(count))
    tokens = sample(logits.repeat(count, 1), *batch_of([Sampling(0.8)] * count, numbers))
    expected = (logits / 0.8).softmax(0) * count
    observed = torch.bincount(tokens.long(), minlength=10)
    assert float(((observed - expected) ** 2 / expected).sum()) < 27.88


def test_random_numbers_depend_on_seed_and_position_alone_and_fill_the_interval() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1]
    numbers = np.stack([numbers_of([seed] * 5000, np.arange(5000)) for seed in seeds])
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.abs(numbers.mean(axis=1) - 0.5).max() < 0.02
    assert np.abs(np.corrcoef(numbers) - np.eye(4)).max() < 0.05
    assert np.abs(np.corrcoef(numbers[:, 1:].ravel(), numbers[:, :-1].ravel())[0, 1]) < 0.03
    assert all(numbers[row, 77] == splitmix(seed, 77) for row, seed in enumerate(seeds))


@given(
    token_ids=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    sampled=st.lists(st.integers(-1, 1000), min_size=1, max_size=6),
    data=st.data(),
)
def test_carry_over_replaces_the_placeholders_and_nothing_else(
    token_ids: list[int], sampled: list[int], data: st.DataObject
) -> None:
    size = len(token_ids)
    carry = data.draw(st.lists(st.integers(0, len(sampled)), min_size=size, max_size=size))
    known = [0 if place else token for token, place in zip(token_ids, carry, strict=True)]
    result = carry_over(*(torch.tensor(values, dtype=torch.int32) for values in (known, carry, [0, *sampled])))
    assert result.dtype is torch.int32
    assert result.tolist() == [
        sampled[place - 1] if place else token for token, place in zip(token_ids, carry, strict=True)
    ]
