"""Chunks, loops and the prefix cache change no probability: the perplexity of real text is that of whole prompts in transformers."""

import pydoc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from schedules import UnitCost
from tiny_models import plain_model
from transformers import AutoTokenizer

from cbatch import Limits, Request, Server
from cbatch.arrivals import Listed
from cbatch.executor import Step
from cbatch.kv import KVSize
from cbatch.model import ModelSpec
from cbatch.model.checkpoint import MADE, spec_from_checkpoint
from cbatch.runtime import cpu
from experiments.setup.presets import load_spec
from policies.chunking import Fixed
from policies.evictions import LRU
from policies.sarathi_serve import SarathiServe

LENGTHS = (300, 640, 200)
"""Tokens of three texts. The second begins with the first, which the prefix cache then holds."""
CHUNKS = (640, 512, 256, 128, 64)
MODES = ("sync", "async", "prefix cache")
MODULES = ("json", "heapq", "textwrap", "bisect", "shlex", "string")


def text_of_library() -> str:
    """Returns the documentation of some modules of the standard library."""
    return "\n".join(pydoc.render_doc(name, renderer=pydoc.plaintext) for name in MODULES)


@cache
def texts_of(path: str | None) -> list[list[int]]:
    text = text_of_library()
    tokens = AutoTokenizer.from_pretrained(path)(text).input_ids if path else [ord(letter) % 128 for letter in text]
    first, second, third = LENGTHS
    return [tokens[:first], tokens[:second], tokens[second : second + third]]


@cache
def expected(path: str | None) -> float:
    """Returns the perplexity of all texts, each whole, by transformers."""
    model, sums = plain_model(spec_of(path), cpu.CPU), 0.0
    with torch.inference_mode():
        for tokens in map(torch.tensor, texts_of(path)):
            log_probabilities = model(tokens[None]).logits[0, :-1].double().log_softmax(-1)
            sums += float(log_probabilities.gather(1, tokens[1:, None]).sum())
    return perplexity(sums)


def perplexity(log_probability: float) -> float:
    number = sum(LENGTHS) - len(LENGTHS)
    return float(torch.tensor(-log_probability / number, dtype=torch.float64).exp())


def spec_of(path: str | None) -> ModelSpec:
    return spec_from_checkpoint(path, "float32") if path else replace(load_spec("tiny"), max_positions=2048)


class Probabilities:
    """Notes the log-probability of each prompt token that follows a computed one. by_request: by request and position."""

    def __init__(self, executor: Any, texts: Sequence[Sequence[int]]) -> None:
        self.by_request: list[dict[int, float]] = [{} for _ in texts]
        self._texts, self._steps = texts, deque[Step]()
        self._launch, [self._model] = executor.launch, executor._iterations[0].models
        self._inner = self._model._hidden
        executor.launch, self._model._hidden = self._launched, self._hidden

    def _launched(self, step: Step) -> Any:
        self._steps.append(replace(step, start=step.start.copy(), num_tokens=step.num_tokens.copy()))
        return self._launch(step)

    def _hidden(self, *arguments: Any) -> Iterator[Any]:
        hidden = yield from self._inner(*arguments)
        step, first = self._steps.popleft(), 0
        for request, start, number in zip(step.requests, step.start.tolist(), step.num_tokens.tolist(), strict=True):
            following = torch.tensor(self._texts[request.id][start + 1 : start + number + 1])
            logits = self._model._head(hidden[first : first + len(following)])
            found = logits.double().log_softmax(-1).gather(1, following[:, None])[:, 0] if len(following) else following
            self.by_request[request.id].update(enumerate(found.tolist(), start + 1))
            first += number
        return hidden


@pytest.mark.long
@pytest.mark.parametrize("path", [None, pytest.param(str(MADE), id="SmolLM2")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_perplexity_is_that_of_whole_prompts(
    chunk: int, mode: str, path: str | None, pytestconfig: pytest.Config
) -> None:
    if path and not pytestconfig.getoption("--slow"):
        pytest.skip("--slow: takes minutes, and the checkpoint of `make model`")
    path = str(Path(path).expanduser()) if path else None
    texts, spec, cached = texts_of(path), spec_of(path), LRU() if mode == "prefix cache" else None
    limits, kv = Limits(max_batch=4, max_tokens=644, max_request_tokens=max(LENGTHS) + 8), KVSize(100, 16)
    executor = cpu.build(spec, limits, kv)
    noted = Probabilities(executor, texts)
    requests = [Request(index, len(text), 8, prompt=text) for index, text in enumerate(texts)]
    server = Server(executor, limits, UnitCost(), kv, mode != "sync", prefix_cache=cached)
    server.serve(SarathiServe(Fixed(chunk)), Listed(requests, {0: 0, 1: 1 + 300 // chunk, 2: 0}))
    executor.close()
    found = requests[1].num_cached_tokens
    assert found == (288 if cached else 0), "whole blocks of the first text"
    log_probabilities = [dict(each) for each in noted.by_request]
    log_probabilities[1] = {**{at: noted.by_request[0][at] for at in range(1, found + 1)}, **log_probabilities[1]}
    assert [sorted(each) for each in log_probabilities] == [list(range(1, length)) for length in LENGTHS]
    total = sum(sum(each.values()) for each in log_probabilities)
    assert perplexity(total) == pytest.approx(expected(path), rel=1e-6)
