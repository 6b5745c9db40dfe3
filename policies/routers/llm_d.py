"""llm-d's scheduler (Gateway API inference extension): the largest weighted sum of scores between 0 and 1.

    queue       (most - waiting) / (most - least), 1 if all are equal          running     the same for running requests
    kv          share of free KV blocks                                       prefix      matched share of the prompt's full blocks
    load_aware  0.5 if none waits, else 0.5 * (1 - min(waiting, 128) / 128)   tokens      1 - min(outstanding, 4,194,304) / 4,194,304
    session     1 for the replica of the session's latest request, else 0

Sources: llm-d/llm-d-inference-scheduler @520af478, kubernetes-sigs/gateway-api-inference-extension. The default weights are the chart's;
the sample with precise prefixes has weights={queue: 1, kv: 1, prefix: 2}. At most 256 blocks of a prompt match. `approximate` matches the prompts
sent to a replica, its 31,250 latest blocks, in place of reported caches. llm-d's clients keep their sessions' replicas; here the router keeps those of the
latest 100,000 sessions. Left out: filters, saturation, predicted latencies.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from cbatch import ConfigError, Request
from cbatch.cluster import ClusterView, ReplicaView
from policies.shared.latest import Latest
from policies.shared.sent_prefixes import SentPrefixes
from policies.shared.ties import Ties

MOST_MATCHED, MOST_SENT = 256, 31_250  # blocks
MOST_WAITING, MOST_TOKENS = 128, 4_194_304
SCORES = ("queue", "running", "kv", "prefix", "load_aware", "tokens", "session")
CHART = MappingProxyType({"queue": 2.0, "kv": 2.0, "prefix": 3.0})

_LEAST_FIRST = {"queue": attrgetter("num_waiting"), "running": attrgetter("num_running")}
_OF_ONE: dict[str, Callable[[ReplicaView], float]] = {
    "kv": lambda replica: 1 - replica.kv_use,
    "load_aware": lambda replica: 0.5 - 0.5 * min(replica.num_waiting, MOST_WAITING) / MOST_WAITING,
    "tokens": lambda replica: 1 - min(replica.outstanding_tokens, MOST_TOKENS) / MOST_TOKENS,
}


class LlmD:
    depends_on = ("prefix_cache",)

    def __init__(
        self, weights: Mapping[str, float] = CHART, approximate: bool = False, ties: str = "random", seed: int = 0
    ) -> None:
        if unknown := weights.keys() - SCORES:
            raise ConfigError(f"router: weights has no score {min(unknown)}; known: {', '.join(SCORES)}")
        self._weights = dict(weights)
        self._approximate, self._ties = approximate, Ties(ties, seed)
        self._sent: list[SentPrefixes] = []
        self._life_of = Latest[tuple[str, str], int]()  # of the replica, by stage and session

    def choose(self, request: Request, view: ClusterView) -> int:
        SentPrefixes.renew(self._sent, view)
        totals = dict.fromkeys(view.fitting(request), 0.0)
        for name, weight in self._weights.items():
            for index, score in zip(totals, self._score(name, [*totals], request, view), strict=True):
                totals[index] += weight * score
        chosen = self._ties.largest(totals)
        if self._approximate:
            self._sent[chosen].add(view[chosen].block_hashes(request)[:MOST_MATCHED])
            self._sent[chosen].trim(MOST_SENT)
        if request.session is not None:
            self._life_of[view.stage, request.session] = view[chosen].life
        return chosen

    def _score(self, name: str, able: Sequence[int], request: Request, view: ClusterView) -> Sequence[float]:
        shown = [view[index] for index in able]
        if name in _LEAST_FIRST:
            numbers = [*map(_LEAST_FIRST[name], shown)]
            most, least = max(numbers), min(numbers)
            return [(most - number) / (most - least) if most > least else 1 for number in numbers]
        if name in _OF_ONE:
            return [*map(_OF_ONE[name], shown)]
        if name == "session":
            return [each.life == self._life_of.get((view.stage, request.session or "")) for each in shown]
        return [self._prefix(index, request, view[index]) for index in able]

    def _prefix(self, index: int, request: Request, replica: ReplicaView) -> float:
        most = min(request.num_prompt_tokens // replica.block_size, MOST_MATCHED)
        if self._approximate:
            matched = self._sent[index].match(replica.block_hashes(request)[:most])
        else:
            matched = min(replica.cached_tokens(request) // replica.block_size, most)
        return matched / most if most else 0.0
