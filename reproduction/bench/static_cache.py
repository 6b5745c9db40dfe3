"""Decodes over a static KV cache, as in Fireworks AI's post: modules of `transformers`, attention over all positions under a mask.

Shapes do not change, so that `torch.compile` can capture graphs by itself: mode `reduce-overhead`, or backend `cudagraphs` without compilation.
Tokens stay on the device until the end of a stretch, so that the host waits for no iteration: an upper limit of what an engine reaches.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, StaticCache

from cbatch import ModelSpec
from cbatch.runtime.weights import transformers_config
from experiments.setup.servers import equal_requests
from experiments.store.provenance import spread

WARM_UP, STRETCHES = 16, 4


class StaticWay(NamedTuple):
    """How decodes run. compiled: arguments of `torch.compile`; None: operation by operation."""

    compiled: Mapping[str, Any] | None = None
    without_gradients: Callable[[], AbstractContextManager[Any]] = torch.inference_mode


WAYS = {
    "static KV, eager": StaticWay(),
    "static KV, eager, no_grad": StaticWay(without_gradients=torch.no_grad),
    "static KV, cudagraphs": StaticWay({"backend": "cudagraphs"}, torch.no_grad),
    "static KV, reduce-overhead": StaticWay({"mode": "reduce-overhead"}, torch.no_grad),
}


class Decoder:
    """Generates tokens of one request greedily."""

    def __init__(self, spec: ModelSpec, way: StaticWay, longest: int, device: str) -> None:
        factory: Any = AutoModelForCausalLM
        with torch.device(device):
            config = transformers_config(spec)
            self._model = factory.from_config(config, dtype=getattr(torch, spec.dtype), attn_implementation="sdpa")
        self._model.eval().requires_grad_(False)
        self._cache: Any = StaticCache(config=config, max_cache_len=longest)
        self._decode = torch.compile(self._next, **way.compiled) if way.compiled is not None else self._next
        self._way, self._device = way, device

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        chosen: torch.Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return chosen

    def generate(
        self, prompt: Sequence[int] | None, new: int, edges: tuple[int, ...] = ()
    ) -> tuple[list[int], list[float]]:
        """Returns the tokens, and the host's time before the first, at each of the edges, and after the last token."""
        with self._way.without_gradients():
            self._cache.reset()
            times = [time.perf_counter()]
            tokens = [self._next(torch.tensor([prompt or []], device=self._device))]
            while len(tokens) < new:
                if len(tokens) in edges:
                    times.append(self._moment())
                tokens.append(self._decode(tokens[-1]).clone())
            times.append(self._moment())
            return torch.cat(tokens).flatten().tolist(), times

    def _moment(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure(
    spec: ModelSpec,
    way: StaticWay,
    prompt: int,
    new: int,
    window: int,
    repeats: int,
    found: dict[str, Any],
    device: str = "cuda",
) -> Iterator[int]:
    """Fills `found` with the cost of one way and its rates, for one request in a cache of just its length; yields 1."""
    torch.compiler.reset()
    begin = time.perf_counter()
    decoder, [request] = Decoder(spec, way, prompt + new, device), equal_requests(1, prompt, new, spec.vocab_size)
    built = time.perf_counter()
    decoder.generate(request.prompt, WARM_UP)
    found |= {
        "build_seconds": built - begin,
        "capture_seconds": 0.0,
        "warm_up_seconds": time.perf_counter() - built,
        "graphs": 0,
    }
    stretch, first = window // STRETCHES, (new - window) // 2
    edges = tuple(range(first, first + window + 1, stretch))
    runs = [decoder.generate(request.prompt, new, edges)[1] for _ in range(repeats)]
    found["output_tokens_per_second"] = spread([new / (run[-1] - run[0]) for run in runs])
    rates = [stretch / (end - start) for start, end in pairwise(runs[-1][1:-1])]
    found["by_batch"] = {"1": spread(rates)}
    yield 1
