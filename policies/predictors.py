"""Predictors of output lengths, for policies that plan by them: `predictor=none|oracle|noisy|bins|ranks|history`.

A predictor may look at a request's hidden true length, which no policy may: it stands for a model that would have been
trained. What it draws depends on `seed` and the request's id alone, so that a run can be repeated and policies compared
on equal predictions.
"""

from abc import abstractmethod
from collections import deque
from math import exp, pi, sqrt
from random import Random
from weakref import WeakKeyDictionary

from cbatch import SERVED, ConfigError, Described, Request
from cbatch.request import spec_of


class Predictor(Described):
    """Without a model: the workload's `predicted_new_tokens`, or the limit that the client gave (`predictor=none`)."""

    inlined = True  # has no arguments: it is not printed

    def output(self, request: Request) -> float:
        """Predicted output tokens in all, as far as the request has come now; at least one more than it has."""
        return max(self._whole_output(request), request.num_new_tokens + 1)

    def remaining(self, request: Request) -> float:
        """Predicted output tokens that are still to come, at least 1."""
        return max(self._whole_output(request) - request.num_new_tokens, 1)

    def observe(self, request: Request) -> None:
        """A request has ended."""

    def _whole_output(self, request: Request) -> float:
        return request.predicted_new_tokens or request.max_new_tokens


class Oracle(Predictor):
    """The true output length."""

    def _whole_output(self, request: Request) -> float:
        spec = spec_of(request)
        return spec.max_new_tokens if spec.true_new_tokens is None else min(spec.true_new_tokens, spec.max_new_tokens)


class _Seeded(Oracle):
    """A model of a predictor's errors on top of the true length, drawn once for each look at a request."""

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
        """Tokens generated at the latest look."""
        return 0

    @abstractmethod
    def _draw(self, true: float, look: int, random: Random) -> float:
        """Predicted output tokens in all, where the true output has `true`."""


class Noisy(_Seeded):
    """The true length with an error: Gaussian with a mean absolute error in tokens (TRAIL), or uniform (VTC)."""

    def __init__(self, mae: float | None = None, share: float | None = None, seed: int = 0) -> None:
        """
        Args:
            mae: mean absolute error in tokens; the standard deviation is mae * sqrt(pi / 2).
            share: largest relative error, 0.5 for +-50%; give one of the two.
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
    """The middle of the class of lengths that the remaining output falls into, renewed every `refresh` tokens (TRAIL).

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
    """A score that only orders requests (LTR): the true length times a lognormal error with this sigma."""

    def __init__(self, sigma: float = 0.5, seed: int = 0) -> None:
        super().__init__(seed)
        self.sigma = sigma

    def output(self, request: Request) -> float:
        return self._whole_output(request)

    def remaining(self, request: Request) -> float:
        return self._whole_output(request) - request.num_new_tokens

    def _draw(self, true: float, look: int, random: Random) -> float:
        return true * exp(random.gauss(0, self.sigma))


class History(Predictor):
    """The mean output of the last `window` requests that ended; before any has, the limit."""

    def __init__(self, window: int = 200) -> None:
        self.window = window
        self._ended: deque[int] = deque(maxlen=window)

    def observe(self, request: Request) -> None:
        if request.finish_reason in SERVED:
            self._ended.append(request.num_output_tokens)

    def _whole_output(self, request: Request) -> float:
        return sum(self._ended) / len(self._ended) if self._ended else request.max_new_tokens
