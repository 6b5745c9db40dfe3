"""Lower bounds of a set of requests, which no policy can beat, preemptive or not, even if it knows the future."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from cbatch.bounds.machine import Floats, fewest_late, makespan, srpt
from cbatch.bounds.minorants import Minorant
from cbatch.bounds.shared import Findable
from cbatch.errors import ConfigError
from cbatch.limits import Limits
from cbatch.request import Request, spec_of

_SPLITS = [
    (first / 2, second / 2, 1 - (first + second) / 2)
    for first, second in product(range(3), repeat=2)
    if first + second <= 2
]

_MOST_TRIED = 8  # pairs of minorant and shares tried for B9: those with the most work


class Bounds:
    """The bounds of these requests on a machine of these limits, in seconds.

    Work. A minorant (`Minorant`) is charged to the members of an iteration: its slopes to their tokens and contexts, its
    fixed part in shares th1 + th2 + th3 = 1: th1 / max_batch to each request, th2 / max_tokens to each token, th3 / kv_tokens
    to each token of KV cache that a member holds. As an iteration has at most max_batch requests, max_tokens tokens and
    kv_tokens tokens of KV cache, its members are charged no more than its time. A request's work w is the least that it is
    charged under any schedule: its prompt once, and for each further token a decode or the recomputation of all before it,
    whichever is less. Every choice of minorant and shares is valid; the best is reported.

    Relaxation. Divide each iteration among its members by their charges: every schedule becomes one of a single machine that
    does w seconds of each request, after its arrival, and ends no request later. R replicas are one machine R times as fast.

    Recomputation, padding, host time and idle time only add to a schedule.

    With a prefix cache, a token of a prompt that others share is charged to the first of them to arrive, as it is computed
    after that arrival and before this request ends; to all others it may be free. A request is charged iterations for the tokens
    that no other request holds, two tokens for a further token after a preemption, and nothing for its KV cache, which is shared.

    Args:
        minorants: those of the cost model, as from `minorants_of`, or others that lie below it.
        kv_tokens: size of one replica's KV cache.
        findable: by id, from `findable_tokens` over all requests of the run; None without a prefix cache.

    Raises:
        ConfigError: a request arrives by iteration, so that its arrival depends on the schedule; or there is no request.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        minorants: Sequence[Minorant],
        limits: Limits,
        kv_tokens: int,
        replicas: int = 1,
        findable: Mapping[int, Findable] | None = None,
    ) -> None:
        specs = [spec_of(request) for request in requests]
        if not specs or any(spec.arrival_iteration for spec in specs):
            problem = "a request arrives by iteration" if specs else "there are no requests"
            raise ConfigError(f"lower bounds: {problem}; give requests with arrival times")
        outputs = [min(spec.max_new_tokens, spec.true_new_tokens or spec.max_new_tokens) for spec in specs]
        self.arrival = np.array([spec.arrival_time for spec in specs], float)
        self._slo = np.array([(spec.slo.ttft or np.inf, spec.slo.total or np.inf) for spec in specs])
        self._asks_all = np.array([spec.slo.tbt is not None or spec.slo.total is not None for spec in specs])
        self.prompt, self.output = np.array([spec.num_prompt_tokens for spec in specs]), np.array(outputs)
        nothing = Findable(0, 0)
        self._earlier, self._ever = np.array([findable[spec.id] if findable else nothing for spec in specs]).T
        self._shares = findable is not None
        self._minorants, self._limits, self._kv_tokens, self._replicas = minorants, limits, kv_tokens, replicas

    @cached_property
    def prefill(self) -> Floats:
        """B1: a lower bound of the time from arrival to the first token, [requests].

        Proof. The prompt takes ceil(prompt / max_tokens) iterations one after the other. Each takes at least the minorant's fixed
        part plus the time of the prompt's own tokens, whatever else it holds.
        """
        return self._alone[0]

    @cached_property
    def service(self) -> Floats:
        """B1: a lower bound of the time from arrival to the last token, [requests].

        Proof. The first token needs `prefill`; each further token an iteration of its own after the one before, which takes at
        least the fixed part plus one decode at its context (or a recomputation of all tokens before it, if that is less).
        """
        return self._alone[0] + self._alone[1]

    @cached_property
    def _alone(self) -> tuple[Floats, Floats]:
        """The seconds of the prompt and of the decodes of each request alone."""
        alone = [
            self._work(self._ever, line.fixed + line.per_request, line.per_token, line.per_score, line.per_context)
            for line in self._minorants
        ]
        prompts, decodes = zip(*alone, strict=True)
        return np.max(prompts, axis=0), np.max(decodes, axis=0)

    @cached_property
    def work(self) -> list[tuple[Floats, Floats]]:
        """The machine's seconds for prompt and for decodes of each request, for each minorant and shares."""
        limits, kv_tokens = self._limits, self._kv_tokens
        seconds = []
        for minorant, (members, tokens, held) in product(self._minorants, _SPLITS):
            fixed = minorant.fixed
            member = members * fixed / min(limits.max_batch, limits.max_tokens) + minorant.per_request
            token = minorant.per_token + tokens * fixed / limits.max_tokens
            if member >= 0 and not (held and self._shares):
                slopes = minorant.per_score, minorant.per_context, held * fixed / kv_tokens
                seconds.append(self._work(self._earlier, member, token, *slopes, machines=self._replicas))
        return seconds

    def _work(
        self,
        shared: Floats,
        member: float,
        token: float,
        score: float,
        context: float,
        held: float = 0.0,
        machines: int = 1,
    ) -> tuple[Floats, Floats]:
        """Returns the seconds charged to each request for its prompt and for its further tokens.

        The charges of the members of an iteration sum to at most the seconds of the iteration.

        Args:
            shared: leading tokens that others compute, [requests].
            member: seconds per iteration. token, score, context: as in `Minorant`. held: per token of KV cache and iteration.
        """
        prompt, last = self.prompt, self.prompt + self.output - 1
        size = np.arange(1, int(last.max()) + 1, dtype=float)  # tokens in the KV cache when a token is sampled
        passes = np.ceil(size / self._limits.max_tokens)
        again = member * passes + token * size + score * size * (size + 1) / 2
        first = again[prompt - 1] + held * prompt
        if self._shares:
            spared = passes[prompt - 1] - passes[prompt - self._ever - 1]
            first -= member * spared + token * shared + score * shared * (shared + 1) / 2
            again = member + token * np.minimum(size, 2) + score * (2 * size - 1)  # its two newest tokens, at least
        decode = member + token + context * size
        until = np.concatenate(([0.0], np.cumsum(np.minimum(again, decode) + held * size)))
        return first / machines, (until[last] - until[prompt]) / machines

    @property
    def makespan(self) -> float:
        """B2: the end of the last request.

        Proof. A request ends no earlier than its arrival plus `service`; and for every s, the work that arrives from s on is
        done after s, on the relaxed machine.
        """
        ends = [makespan(self.arrival, prompt + decodes) for prompt, decodes in self.work]
        return max(float((self.arrival + self.service).max()), *ends)

    @property
    def rate(self) -> float:
        """B3: an upper bound of the requests per second that any policy can sustain.

        Proof. Requests like these bring rate * E[w] seconds of work per second, which must be at most 1 for every w.
        """
        return 1 / max(float((prompt + decodes).mean()) for prompt, decodes in self.work)

    def rate_attained(self, share: float) -> float:
        """B3 for objectives: an upper bound of the rate at which `share` of the requests with objectives can meet them in the long run.

        Proof. As for `rate`, with less work: requests that miss their objectives may wait forever, at best those with the most
        work. So may requests without objectives, and all tokens after the first if TTFT is the only objective.

        Raises:
            ConfigError: no request has an objective.
        """
        with_objectives = self._asks_all | np.isfinite(self._slo[:, 0])
        if not with_objectives.any():
            raise ConfigError("lower bounds: no request has an objective; give workload.slo or workload.tiers")
        kept = math.ceil(share * with_objectives.sum() * (1 - 1e-12))
        work = [(prompt + np.where(self._asks_all, decodes, 0.0))[with_objectives] for prompt, decodes in self.work]
        return len(with_objectives) / max(float(np.sort(seconds)[:kept].sum()) for seconds in work)

    @cached_property
    def ends(self) -> Floats:
        """The earliest possible k-th end of a request, for k = 1, 2, ... (B6).

        Proof. Both are order statistics that any schedule's k-th end cannot precede: the k-th end under shortest remaining
        processing time, for every w, and the k-th smallest of arrival plus `service`.
        """
        ends = np.sort(self.arrival + self.service)
        for work in self.work:
            ends = np.maximum(ends, srpt(self.arrival, np.add(*work)))
        return ends

    @property
    def latency(self) -> float:
        """B6: mean latency, from arrival to last token: the mean of `ends` less the mean arrival."""
        return float(self.ends.mean() - self.arrival.mean())

    @property
    def violations(self) -> int:
        """B9: a lower bound of the requests that miss their objective of TTFT or total time; objectives of gaps are left out.

        Proof. A request whose `prefill` or `service` exceeds its objective misses it under any policy. Of the others with the
        same objectives, at least `fewest_late` are late on the relaxed machine, even if no other request uses it: equal
        objectives are due in the order of arrival. Classes of objectives share no request, so their numbers add up.
        """
        classes = np.unique(self._slo[np.isfinite(self._slo).any(axis=1)], axis=0)
        return sum(self._late((self._slo == limits).all(axis=1), *limits) for limits in classes)

    def _late(self, members: NDArray[np.bool_], ttft: float, total: float) -> int:
        hopeless = (self.prefill[members] > ttft) | (self.service[members] > total)
        arrival = self.arrival[members][~hopeless]
        heaviest = sorted(self.work, key=lambda work: -float(np.add(*work).sum()))[:_MOST_TRIED]
        late = [
            fewest_late(arrival, arrival + limit, seconds[members][~hopeless])
            for work in heaviest
            for limit, seconds in ((ttft, work[0]), (total, np.add(*work)))
            if np.isfinite(limit)
        ]
        return int(hopeless.sum()) + max(late)
