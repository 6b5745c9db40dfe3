"""Predictors of output lengths, for policies that use them: `predictor=none|oracle|noisy|bins|ranks|history`.

A predictor stands for a trained model. Unlike a policy, it may read a request's hidden true length. Random draws depend only on
`seed` and the request's id, so that a run can be repeated and policies can be compared on equal predictions.
"""

from abc import abstractmethod
from collections import deque
from math import exp, inf, pi, sqrt
from random import Random
from weakref import WeakKeyDictionary

from cbatch import SERVED, ConfigError, Described, Request
from cbatch.request import spec_of


class Predictor(Described):
    """Predicts without a model: the workload's `predicted_new_tokens`, or the client's limit (`predictor=none`)."""

    inlined = True  # not printed, since it has no arguments

    def output(self, request: Request) -> float:
        """Returns the predicted total output tokens, always at least one more than generated so far."""
        return max(self._whole_output(request), request.num_new_tokens + 1)

    def remaining(self, request: Request) -> float:
        """Returns the predicted remaining output tokens, at least 1."""
        return max(self._whole_output(request) - request.num_new_tokens, 1)

    def observe(self, request: Request) -> None:
        """Called when a request has ended."""

    def _whole_output(self, request: Request) -> float:
        return request.predicted_new_tokens or request.max_new_tokens


class Oracle(Predictor):
    """Predicts the true output length."""

    def _whole_output(self, request: Request) -> float:
        spec = spec_of(request)
        return spec.max_new_tokens if spec.true_new_tokens is None else min(spec.true_new_tokens, spec.max_new_tokens)


class _Seeded(Oracle):
    """Models a predictor's errors around the true length, drawn once for each look at a request."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._drawn: WeakKeyDictionary[Request, tuple[int, float]] = WeakKeyDictionary()

    def _whole_output(self, request: Request) -> float:
        look = self._look(request)
        drawn = self._drawn.get(request)
        if drawn is None or drawn[0] != look:
            random = Random(f"{self.seed}.{request.id}.{look}")
            self._drawn[request] = drawn = look, self._draw(super()._whole_output(request), look, random)
        return drawn[1]

    def _look(self, request: Request) -> int:
        """Returns the generated tokens at the latest look."""
        return 0

    @abstractmethod
    def _draw(self, true: float, look: int, random: Random) -> float:
        """Returns the predicted total output tokens, for `true` tokens in the true output."""


class Noisy(_Seeded):
    """Predicts the true length with an error: Gaussian with a mean absolute error in tokens (TRAIL), or uniform (VTC)."""

    def __init__(self, mae: float | None = None, share: float | None = None, seed: int = 0) -> None:
        """
        Args:
            mae: mean absolute error in tokens; the standard deviation is mae * sqrt(pi / 2).
            share: largest relative error, 0.5 for +-50%; give either mae or share.
        """
        super().__init__(seed)
        if (mae is None) == (share is None) or (mae or 0) < 0 or not 0 <= (share or 0) <= 1:
            raise ConfigError("predictor=noisy: give predictor.mae in tokens, or predictor.share from 0 to 1")
        self.mae, self.share = mae, share

    def _draw(self, true: float, look: int, random: Random) -> float:
        if self.share is not None:
            return max(true * (1 + random.uniform(-self.share, self.share)), 1.0)
        return max(true + random.gauss(0, (self.mae or 0.0) * sqrt(pi / 2)), 1.0)


class Bins(_Seeded):
    """Predicts the middle of the length class of the remaining output, renewed every `refresh` tokens (TRAIL).

    The classifier picks a neighbouring class with probability `error`, drawn for each look.
    """

    def __init__(self, bins: int = 10, longest: int = 512, refresh: int = 8, error: float = 0.0, seed: int = 0) -> None:
        super().__init__(seed)
        if bins < 1 or longest < bins or refresh < 1 or not 0 <= error <= 1:
            raise ConfigError("predictor=bins: give bins and refresh >= 1, longest >= bins, and error from 0 to 1")
        self.bins, self.longest, self.refresh, self.error = bins, longest, refresh, error

    def _look(self, request: Request) -> int:
        return request.num_new_tokens // self.refresh * self.refresh

    def _draw(self, true: float, look: int, random: Random) -> float:
        width = self.longest / self.bins
        index = int((true - look) / width)
        if random.random() < self.error:
            index += random.choice((-1, 1))
        return look + (min(max(index, 0), self.bins - 1) + 0.5) * width


class Ranks(_Seeded):
    """Predicts a score that only orders requests (LTR): the true length times a lognormal error with this sigma."""

    def __init__(self, sigma: float = 0.5, seed: int = 0) -> None:
        super().__init__(seed)
        if not 0 <= sigma < inf:
            raise ConfigError(f"predictor.sigma={sigma}: give a finite standard deviation of a logarithm, at least 0")
        self.sigma = sigma

    def output(self, request: Request) -> float:
        return self._whole_output(request)

    def remaining(self, request: Request) -> float:
        return self._whole_output(request) - request.num_new_tokens

    def _draw(self, true: float, look: int, random: Random) -> float:
        return true * exp(random.gauss(0, self.sigma))


class History(Predictor):
    """Predicts the mean output of the last `window` ended requests; before the first end, the limit."""

    def __init__(self, window: int = 200) -> None:
        if window < 1:
            raise ConfigError(f"predictor.window={window}: give the number of ended requests, at least 1")
        self.window = window
        self._ended: deque[int] = deque(maxlen=window)

    def observe(self, request: Request) -> None:
        if request.finish_reason in SERVED:
            self._ended.append(request.num_output_tokens)

    def _whole_output(self, request: Request) -> float:
        return sum(self._ended) / len(self._ended) if self._ended else request.max_new_tokens
