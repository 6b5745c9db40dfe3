"""Computes lower bounds that no policy can beat on a set of requests, even if it preempts and knows the future."""

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

_HALVES = [halves for halves in product(range(3), repeat=3) if sum(halves) == 2]
_SPLITS = [(first / 2, second / 2, third / 2) for first, second, third in _HALVES]
"""Shares of an iteration's fixed part, which sum to 1."""

_MOST_TRIED = 8  # B9 tries only the pairs of minorant and shares with the most work


class Bounds:
    """Bounds for the requests on a machine with the given limits, in seconds.

    Work. The time of a minorant (`Minorant`) is charged to the members of an iteration. Slopes are charged to the members'
    tokens and contexts. The fixed part is divided into shares th1 + th2 + th3 = 1: th1 / max_batch to each request, th2 /
    max_tokens to each token, th3 / kv_tokens to each token of KV cache that a member holds. An iteration has at most max_batch
    requests, max_tokens tokens and kv_tokens tokens of KV cache, so its members are charged at most the iteration's time. A
    request's work w is the least charge under any schedule: the prompt once, and for each further token the lesser of a decode
    and the recomputation of all preceding tokens. Every choice of minorant and shares is valid; the best bound is reported.

    Relaxation. Divide each iteration among its members by their charges. Every schedule then becomes a schedule of a single
    machine that works w seconds on each request, after its arrival, and ends no request later. R replicas are relaxed to one
    machine R times as fast. Recomputation, padding, host time and idle time only add to a schedule.

    With a prefix cache, a shared prompt token is charged to the first request that arrives with the token: it is computed after
    that arrival and before that request ends. For all other requests the token may be free. A request is charged iterations for the
    tokens that no other request holds, and two tokens for a further token after a preemption. Its KV cache may be shared: free.

    Args:
        minorants: from `minorants_of` the cost model, or other lines below the cost model.
        kv_tokens: size of one replica's KV cache.
        findable: by id, from `findable_tokens` over all requests of the run; None without a prefix cache.

    Raises:
        ConfigError: there is no request, or the limits allow drafts, with which an iteration gives a request several tokens.
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
        if not specs:
            raise ConfigError("lower bounds: there are no requests; give at least one")
        if limits.max_drafts:
            problem = "they hold where an iteration gives a request one token, not with a drafter"
            raise ConfigError(f"lower bounds: {problem}; leave out the drafter, or bounds=true and workload.load")
        outputs = [min(spec.max_new_tokens, spec.true_new_tokens or spec.max_new_tokens) for spec in specs]
        self.arrival = np.array([spec.arrival_time for spec in specs], float)
        self._slo = np.array([(spec.slo.ttft or np.inf, spec.slo.total or np.inf) for spec in specs])
        self._needs_all = np.array([bool(spec.slo.tbt or spec.slo.total or spec.slo.tpot) for spec in specs])
        self.prompt, self.output = np.array([spec.num_prompt_tokens for spec in specs]), np.array(outputs)
        nothing = Findable(0, 0)
        self._earlier, self._ever = np.array([findable[spec.id] if findable else nothing for spec in specs]).T
        self._shares = findable is not None
        self._minorants, self._limits, self._kv_tokens, self._replicas = minorants, limits, kv_tokens, replicas

    @cached_property
    def prefill(self) -> Floats:
        """B1: Returns lower bounds of the time from arrival to the first token, [requests].

        Proof. The prompt takes ceil(prompt / max_tokens) consecutive iterations. Each iteration takes at least the minorant's fixed
        part plus the time of the prompt's tokens, whatever else the iteration computes.
        """
        return self._isolated[0]

    @cached_property
    def service(self) -> Floats:
        """B1: Returns lower bounds of the time from arrival to the last token, [requests].

        Proof. The first token takes `prefill`. Each further token needs a separate, later iteration, which takes at least the fixed
        part plus the lesser of one decode at the token's context and a recomputation of all preceding tokens.
        """
        return self._isolated[0] + self._isolated[1]

    @cached_property
    def _isolated(self) -> tuple[Floats, Floats]:
        """Returns the seconds of prompt and decodes of each request if it is computed without other requests."""
        seconds = []
        for line in self._minorants:
            slopes = line.per_token, line.per_score, line.per_context
            seconds.append(self._work(self._ever, line.fixed + line.per_request, *slopes))
        prompts, decodes = zip(*seconds, strict=True)
        return np.max(prompts, axis=0), np.max(decodes, axis=0)

    @cached_property
    def work(self) -> list[tuple[Floats, Floats]]:
        """Returns the machine's seconds for the prompt and the decodes of each request, by minorant and shares."""
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
            shared: leading tokens that other requests compute, [requests].
            member: seconds per iteration. token, score, context: as in `Minorant`. held: seconds per token of KV cache and iteration.
        """
        prompt, last = self.prompt, self.prompt + self.output - 1
        size = np.arange(1, int(last.max()) + 1, dtype=float)  # tokens in the KV cache when a token is sampled
        passes = np.ceil(size / self._limits.max_tokens)
        again = member * passes + token * size + score * size * (size + 1) / 2
        first = again[prompt - 1] + held * prompt
        if self._shares:
            spared = passes[prompt - 1] - passes[prompt - self._ever - 1]
            first -= member * spared + token * shared + score * shared * (shared + 1) / 2
            again = member + token * np.minimum(size, 2) + score * (2 * size - 1)  # at least the two newest tokens
        decode = member + token + context * size
        until = np.concatenate(([0.0], np.cumsum(np.minimum(again, decode) + held * size)))
        return first / machines, (until[last] - until[prompt]) / machines

    @property
    def makespan(self) -> float:
        """B2: Returns a lower bound of the end of the last request.

        Proof. A request ends no earlier than its arrival plus `service`. For every time s, the relaxed machine does the work that
        arrives from s on after s.
        """
        ends = [makespan(self.arrival, prompt + decodes) for prompt, decodes in self.work]
        return max(float((self.arrival + self.service).max()), *ends)

    @property
    def rate(self) -> float:
        """B3: Returns an upper bound of the requests per second that any policy can sustain.

        Proof. Such requests bring rate * E[w] seconds of work per second, which must be at most 1 for every w.
        """
        return 1 / max(float((prompt + decodes).mean()) for prompt, decodes in self.work)

    def rate_attained(self, share: float) -> float:
        """B3 with objectives: Returns an upper bound of the rate at which `share` of the requests with objectives meet them in the long run.

        Proof. As for `rate`, with less work. Requests that miss their objectives may wait forever, preferably the requests with the
        most work. Requests without objectives may also wait forever, as may all tokens after the first if only TTFT has an objective.

        Raises:
            ConfigError: no request has an objective.
        """
        with_objectives = self._needs_all | np.isfinite(self._slo[:, 0])
        if not with_objectives.any():
            raise ConfigError("lower bounds: no request has an objective; give workload.slo or workload.tiers")
        kept = math.ceil(share * with_objectives.sum() * (1 - 1e-12))
        work = [(prompt + np.where(self._needs_all, decodes, 0.0))[with_objectives] for prompt, decodes in self.work]
        return len(with_objectives) / max(float(np.sort(seconds)[:kept].sum()) for seconds in work)

    @cached_property
    def ends(self) -> Floats:
        """B6: Returns the earliest possible k-th end of a request, for k = 1, 2, ...

        Proof. The k-th end of any schedule precedes neither the k-th end under shortest remaining processing time, for every w, nor
        the k-th smallest arrival plus `service`.
        """
        ends = np.sort(self.arrival + self.service)
        for work in self.work:
            ends = np.maximum(ends, srpt(self.arrival, np.add(*work)))
        return ends

    @property
    def latency(self) -> float:
        """B6: Returns a lower bound of the mean latency from arrival to last token: the mean of `ends` minus the mean arrival."""
        return float(self.ends.mean() - self.arrival.mean())

    @property
    def violations(self) -> int:
        """B9: Returns a lower bound of the requests that miss their TTFT or total-time objective; gap objectives are ignored.

        Proof. A request whose `prefill` or `service` exceeds its objective misses the objective under any policy. Among the other
        requests with the same objectives, at least `fewest_late` are late on the relaxed machine even without other requests:
        requests with equal objectives are due in the order of arrival. Classes of objectives are disjoint, so the numbers add up.
        """
        classes = np.unique(self._slo[np.isfinite(self._slo).any(axis=1)], axis=0)
        return sum(self._late((self._slo == limits).all(axis=1), *limits) for limits in classes)

    def _late(self, members: NDArray[np.bool_], ttft: float, total: float) -> int:
        hopeless = (self.prefill[members] > ttft) | (self.service[members] > total)
        arrival = self.arrival[members][~hopeless]
        heaviest = sorted(self.work, key=lambda work: -float(np.add(*work).sum()))[:_MOST_TRIED]
        late = list[int]()
        for prompt, decodes in heaviest:
            for limit, seconds in ((ttft, prompt), (total, prompt + decodes)):
                if np.isfinite(limit):
                    late.append(fewest_late(arrival, arrival + limit, seconds[members][~hopeless]))
        return int(hopeless.sum()) + max(late)
