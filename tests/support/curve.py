"""Simulations whose outcome is known: a curve in place of a policy."""

from collections.abc import Callable, Sequence

from experiments.capacity.simulation import Outcome


class Curve:
    """Simulates nothing: each replication fails `violations(rate)` of its requests, times a factor of its own."""

    def __init__(self, violations: Callable[[float], float], scatter: float = 0.0, in_system: float = 1.0) -> None:
        self.violations, self.scatter, self.in_system = violations, scatter, in_system
        self.pairs: list[tuple[int, float]] = []
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, pairs: Sequence[tuple[int, float]], requests: int, warmup: int) -> list[Outcome]:
        self.pairs += pairs
        self.sizes.append((requests, warmup))
        return [self.simulate(number, rate, requests, warmup) for number, rate in pairs]

    def simulate(self, number: int, rate: float, requests: int, warmup: int) -> Outcome:
        factor = 1 + self.scatter * (-1) ** number
        counted = requests - 2 * warmup
        good = counted * (1 - min(self.violations(rate) * factor, 1.0))
        return Outcome(rate, number, requests, warmup, round(good), counted, self.in_system * rate, seconds=2.0)


def one_percent_at_7(power: int = 5, **others: float) -> Curve:
    return Curve(lambda rate: 0.01 * (rate / 7) ** power, **others)
