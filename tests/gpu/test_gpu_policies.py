"""At full size, bfloat16, on captured graphs: policies chunk and batch the same texts differently, which changes only rounding.

The first policy's tokens are forced upon the others, so that all compute the same texts; the log-probabilities that
each gives to the tokens are compared.
"""

from collections import deque
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from gpu_models import CUDA, LARGE
from schedules import UnitCost

from cbatch import Limits, Policy, Request, Server, Step
from cbatch.kv import KVSize
from cbatch.runtime.batch import Shape, Work
from cbatch.runtime.gpu import build as gpu
from cbatch.runtime.graphs import GraphedIteration
from cbatch.runtime.slots import StageSlot
from policies.chunking import Fixed, TileAligned
from policies.orca import Orca
from policies.request_level import RequestLevel
from policies.sarathi import Sarathi
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(max_batch=8, max_tokens=2048, max_request_tokens=1024)
PROMPTS = (700, 40, 333, 128, 512, 1, 257, 600)
NUM_NEW = 24
KV = KVSize(64, 128)
DEVIATION, TOLERANCE = 0.06, 0.2
"""Bounds on differences of log-probabilities under two policies: standard deviation and maximum.

Two orders of rounding through 32 bfloat16 layers of random weights differ by 0.03 (standard deviation, in plain PyTorch
at a smaller width); of 1152 pairs the greatest is then expected at 4 times that. A wrong or missing key changes them by
ones.
"""

POLICIES: dict[str, Callable[[], Policy]] = {
    "orca": Orca,
    "sarathi": lambda: Sarathi(TileAligned(256)),
    "sarathi_serve": lambda: SarathiServe(Fixed(100)),
}


class Forcing:
    """An `Iteration` around another: records the log-probabilities of the tokens, and may replace the tokens.

    found: log-probability of each token by (request, place in its output); tensors, which the host reads after the run.
    forced: the outputs, by request; None: the model's own samples are kept.
    """

    def __init__(self, inner: GraphedIteration) -> None:
        self._inner = inner
        self._steps: deque[Step] = deque()  # launched, not computed yet
        self.found: dict[tuple[int, int], torch.Tensor] = {}
        self.forced: dict[int, list[int]] | None = None

    def shape(self, step: Step) -> Shape:
        self._steps.append(step)  # computed in turn: the executor asks once for the shape of what it launches
        return self._inner.shape(step)

    @torch.inference_mode()
    def __call__(self, stage: StageSlot, work: Work) -> None:
        self._inner(stage, work)
        step = self._steps.popleft()
        places, leaving = step.sampled.tolist(), stage.ranks[0].leaving
        if not places:
            return
        ends = step.start + step.num_tokens
        keys = [(step.requests[place].id, int(ends[place]) - PROMPTS[step.requests[place].id]) for place in places]
        rows = torch.tensor(places, device=CUDA)
        if self.forced is not None:
            tokens = [self.forced[id_][place] for id_, place in keys]
            leaving[rows] = torch.tensor(tokens, dtype=torch.int32, device=CUDA)
        logits = self._inner._eager.models[0]._logits[rows]  # type: ignore[attr-defined]  # where graphs leave them
        thought = logits.log_softmax(-1).gather(1, leaving[rows].long()[:, None])[:, 0]  # [places]
        self.found.update(zip(keys, thought.unbind(), strict=True))


@pytest.fixture(scope="module")
def executor() -> gpu.GpuExecutor:
    return gpu.build(LARGE, LIMITS, KV)


def serve(executor: gpu.GpuExecutor, policy: Policy, forcing: Forcing) -> tuple[dict[int, list[int]], torch.Tensor]:
    """Outputs by request, and the log-probabilities of their tokens, [requests * NUM_NEW]."""
    random = torch.Generator().manual_seed(11)
    prompts = [torch.randint(LARGE.vocab_size, (length,), generator=random).tolist() for length in PROMPTS]
    requests = [Request(id_, len(prompt), NUM_NEW, prompt=prompt) for id_, prompt in enumerate(prompts)]
    Server(executor, LIMITS, UnitCost(), KV).serve(policy, requests)
    keys = [(request.id, place) for request in requests for place in range(NUM_NEW)]
    assert sorted(forcing.found) == keys
    return {request.id: request.output for request in requests}, torch.stack([forcing.found[key] for key in keys]).cpu()


def test_log_probabilities_of_any_two_policies_agree(executor: gpu.GpuExecutor) -> None:
    graphed = executor.iteration
    forcing = Forcing(graphed)
    executor._iterations = [forcing]
    outputs, expected = serve(executor, RequestLevel(), forcing)
    assert expected.max() < 0
    thoughts = {"request_level": expected}
    forcing.forced = outputs
    for name, make in POLICIES.items():
        forcing.found = {}
        forced, thoughts[name] = serve(executor, make(), forcing)
        assert forced == outputs
    for (one, mine), (other, theirs) in combinations(thoughts.items(), 2):
        difference = mine - theirs
        what = f"{one} and {other}: {difference.std():.3f}, at most {difference.abs().max():.3f}"
        assert difference.std() < DEVIATION, what
        assert difference.abs().max() < TOLERANCE, what
    assert graphed.num_eager == 0
    assert graphed.num_replayed > 0
