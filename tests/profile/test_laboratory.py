"""What the laboratory measures: kernels told apart, batches that it can hold, noise, and iterations that compile."""

from dataclasses import replace

import numpy as np
import pytest
from test_profile_command import CAPTURED, LIMITS, SIZES, Clockwork, lab_of, server

from cbatch import BatchShape, Server, Step, StepResult
from cbatch.cost import NO_COST
from cbatch.kv import KVSize
from cbatch.sim.interpolation import PiecewiseLinear
from cbatch.sim.measured import CapturedGraphs
from experiments.profile.batches import (
    attention_counts,
    contexts_before,
    decode_counts,
    fit_in,
    held_out,
    mixed_totals,
    prompts,
    spread,
)
from experiments.profile.kernels import Kernel, shares, times_in_turn
from experiments.profile.laboratory import Batch, FittedLaboratory, Laboratory, features, fit_prices
from experiments.profile.measure import measure
from experiments.profile.tables import captured_graphs, captured_rows


def test_kernels_are_told_apart_by_name_and_place() -> None:
    kernels = [
        ("_small_batch_gemm_kernel", 4.0),
        ("kernel_cutlass_flash_attn", 9.0),
        ("_decode_kernel", 9.0),
        ("elementwise", 1.0),
        ("sm90_xmma_gemm", 2.0),
        ("_add_norm_kernel", 1.0),
        ("nvjet_tst", 1.0),
        ("_search_kernel", 1.0),
    ]
    assert shares(kernels) == pytest.approx((0.6, 0.2, 0.2))
    assert shares([]) == (1.0, 0.0, 0.0)


def test_a_kernel_that_waits_for_another_counts_from_its_end() -> None:
    """The norm is launched while the product still runs, reads ahead, and takes 3 us by itself."""
    kernels = (Kernel(0, 10, "gemm"), Kernel(1, 2, "Memcpy DtoH"), Kernel(2, 13, "_norm"), Kernel(15, 16, "nvjet"))
    assert times_in_turn(kernels) == [("gemm", 10), ("_norm", 3), ("nvjet", 1)]


def test_both_sides_of_every_step_are_measured() -> None:
    assert decode_counts([1, 2, 4, 8, 10]) == [1, 2, 3, 4, 5, 8, 9, 10]
    assert attention_counts([1, 4, 16, 48]) == [1, 2, 4, 5, 16, 17, 32, 48]
    totals = mixed_totals(CAPTURED, 64, 4096)
    assert totals[:7] == [2, 16, 64, 65, 128, 129, 256]
    assert {257, 320, 321, 768, 769} <= set(totals)
    assert totals[-1] == 4064 and all(total % 64 == 32 for total in totals if total > 1024)
    assert all(total >= 2 for total in mixed_totals((), 16, 64))
    assert fit_in((1, 5, 9), 7) == [1, 5, 7] and fit_in((1, 5), 7) == [1, 5]


def test_totals_are_made_of_prompts_and_contexts_have_their_mean() -> None:
    for total in (2, 1024, 1025, 1026, 5000):
        assert sum(tokens for tokens, _ in prompts(total)) == total
        assert min(tokens for tokens, _ in prompts(total)) >= 2, "one token is a decode"
    assert all(len(batch.ends) <= 8 for batch in held_out((1, 2, 8), LIMITS))
    assert spread(1, 100, 1000) == (100,) and sorted(spread(2, 100, 1000)) == [75, 125]
    contexts = spread(33, 1000, 4000)
    assert sum(contexts) == 33 * 1000 and (min(contexts), max(contexts)) == (515, 1485)
    assert abs(sum(contexts[:11]) / 11 - 1000) < 100, "not in the order of their lengths"
    assert spread(4, 9, 9) == (9,) * 4, "no room to differ"


def test_a_laboratory_knows_what_it_cannot_hold() -> None:
    lab = Laboratory(server(Clockwork(), num_blocks=16), 512)
    assert lab.holds(Batch((), (512, 512)))
    assert not lab.holds(Batch((), (512, 513)))  # blocks
    assert not lab.holds(Batch((), (1,) * 9))  # requests
    assert not lab.holds(Batch(((2000, 100),)))  # positions


def test_captured_rows_and_graphs() -> None:
    assert captured_rows({4: PiecewiseLinear((1,), (1.0,))}) is None
    assert captured_graphs((1, 2), ()) is None
    graphs = captured_graphs((1, 4, 8), (128, 256, 512), (256, 512))  # a larger batch has no graph for 128
    assert graphs == CapturedGraphs((1, 4, 8), (128, 256, 512), (0, 0, 0))


def test_noise_makes_no_price_negative() -> None:
    """Three of five prices are planted; the two others are lost in the noise of 20%."""
    assert features(Batch(((2, 10), (3, 0)), (7, 8))).tolist() == [1, 7, 4, 15, 2 * 11.5 + 3 * 2]
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, (60, 3)).tolist()
    rows = np.array([features(Batch(((2 * a, 10 * b),) * (a % 3), (30 * b,) * c)) for a, b, c in sizes])
    prices = np.array([5e-4, 2e-5, 0.0, 1e-6, 0.0])
    seconds = rows @ prices
    assert fit_prices(rows / seconds[:, None]) == pytest.approx(prices, rel=1e-6, abs=1e-12)
    noisy = fit_prices(rows / (seconds * rng.uniform(0.8, 1.2, 60))[:, None])
    assert noisy.min() >= 0 and rows @ noisy / seconds == pytest.approx(1.0, abs=0.2)


def test_where_times_vary_a_few_batches_price_all_others() -> None:
    class Priced(Clockwork):
        def seconds(self, shape: BatchShape) -> float:
            return 4e-3 + 1e-5 * shape.num_tokens + self.attention(shape)

    lab = FittedLaboratory(server(Priced()), 512)
    measured = len(lab.measured)
    for batch in (Batch((), (700,) * 3), Batch(((100, 500),), (300, 300)), Batch(((1500, 0), (900, 100)))):
        assert lab.seconds(batch) == pytest.approx(Priced().seconds(batch.shape()), rel=1e-6)
    assert len(lab.measured) == measured <= 30
    assert lab.time(Batch((), (700,) * 3)) == pytest.approx(4.03e-3 + 2100 * 2e-7)


def test_where_all_time_is_attention_a_base_is_left() -> None:
    """The attention of a chunk of 2 tokens is taken to be that of 16, the smallest measured chunk: longer than the iteration."""

    class Attentive(Clockwork):
        def seconds(self, shape: BatchShape) -> float:
            return 1e6 * self.attention(shape)

    found = measure(lab_of(Attentive()), SIZES, (), lambda text: None, power_limited=False)
    assert min(found.mixed.seconds) > 0


def test_a_pause_of_the_host_leaves_the_median_of_a_long_iteration() -> None:
    class Pausing(Clockwork):
        def seconds(self, shape: BatchShape) -> float:
            return 0.06 + 0.5 * (shape.num_tokens == 300 and 0.25 < self.clock < 0.35)

    lab = lab_of(Pausing())
    assert lab.time(Batch(((300, 0),))) == pytest.approx(0.06)
    assert lab.executor.now() > 0.9  # it paused


@pytest.mark.parametrize("begins", [0.0, 0.9, 2.1])
def test_a_clock_that_is_slow_for_a_second_changes_no_time_that_is_measured_in_rounds(begins: float) -> None:
    class Drifting(Clockwork):
        def seconds(self, shape: BatchShape) -> float:
            return super().seconds(shape) * (1.03 if begins <= self.clock < begins + 1 else 1.0)

    lab, batches = lab_of(Drifting()), [Batch(((tokens, 0),)) for tokens in (2, 64, 65, 128, 129, 256, 1500, 1600)]
    lab.time_in_rounds(batches)
    for batch in batches:
        assert lab.measured[batch] == pytest.approx(Clockwork().seconds(batch.shape())), batch
    assert 5 < lab.executor.now() < 15


def test_many_decodes_are_timed_in_the_steady_state_of_the_clock() -> None:
    """After few decodes many are 4% faster for 0.2 s, and 4% slower from 0.5 to 1.1 s: the power is limited on average. Few are slow right after many."""

    class Limited(Clockwork):
        began, last = 0.0, -1.0  # of many decodes

        def seconds(self, shape: BatchShape) -> float:
            if shape.num_decodes <= 16:
                return 4e-3 + 1e-3 * (self.clock < self.last + 0.05)
            since = self.clock - self.began
            return 5e-3 * (0.96 if since < 0.2 else 1.04 if 0.5 < since < 1.1 else 1.0)

        def launch(self, step: Step) -> StepResult:
            result = super().launch(step)
            if step.shape().num_decodes > 16:
                self.last = self.clock
            elif self.clock > self.last + 0.05:
                self.began = self.clock
            return result

    limits = replace(LIMITS, max_batch=64)
    lab = Laboratory(Server(Limited(), limits, NO_COST, KVSize(64 * 32, 64)), 512)  # type: ignore[type-var]
    for number, milliseconds in ((8, 4.0), (64, 5.0), (17, 5.0), (33, 5.0), (16, 4.0), (32, 5.0)):
        assert lab.time(Batch((), (1,) * number)) == pytest.approx(milliseconds / 1e3), number
    assert lab.executor.now() < 4  # the clock settles once, unless few decodes come between


def test_long_iterations_are_computed_twice_and_again_only_where_the_first_one_compiled() -> None:
    class Compiling(Clockwork):
        num_launched, compiles = 0, False

        def launch(self, step: Step) -> StepResult:
            self.num_launched += 1
            return super().launch(step)

        def seconds(self, shape: BatchShape) -> float:
            return shape.num_tokens / 1000 + 2.0 * self.compiles * (self.num_launched == 1)

    for tokens, compiles, launches in ((1500, False, 2), (1500, True, 2), (30, True, 10)):
        executor = Compiling()
        executor.compiles = compiles
        assert lab_of(executor).time(Batch(((tokens, 0),))) == pytest.approx(tokens / 1000)
        assert executor.num_launched <= launches
    assert contexts_before(1024, 131072) == [1024, 2048, 4096, 7168, 32768, 130048]
    assert contexts_before(65536, 131072) == [65536] and contexts_before(4096, 8192) == [4096]
