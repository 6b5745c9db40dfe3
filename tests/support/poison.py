"""Poison: fills buffers with values that must never be read, and reports tokens that were computed from them."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from cbatch.executor import Step, StepResult
from cbatch.runtime.batch import Work
from cbatch.runtime.executor import StreamExecutor
from cbatch.runtime.gpu.ranks import Steps
from cbatch.runtime.iteration import EagerIteration, Send, copy
from cbatch.runtime.slots import StageSlot
from cbatch.runtime.stage_model import Model

E = TypeVar("E", bound=StreamExecutor)


def poisoned(build: Callable[..., E], *arguments: Any) -> E:
    """Returns a poisoned executor. build: `build` or `assemble` of `cpu` or `gpu`; the arguments are its own."""
    with patch.object(sys.modules[build.__module__], "EagerIteration", PoisonedIteration):
        executor = build(*arguments)
    poison(executor)
    return executor


def poison(executor: StreamExecutor) -> None:
    """Poisons an executor of `PoisonedIteration`s that has computed nothing yet, and checks the tokens of each iteration.

    Token buffers hold -1 and those of hidden states NaN; on a CPU keys and values too: attention libraries multiply masked
    ones, so on a GPU these must be finite.
    """
    for slot in executor._slots:
        slot.tokens.fill_(-1)
        for sampled in slot.sampled:
            sampled[1:] = -1
        for rank in (rank for stage in slot.stages[1:] for rank in stage.ranks):
            rank.arriving.fill_(torch.nan)
        if sampled.is_cuda:
            for device in {rank.device.device for stage in slot.stages for rank in stage.ranks}:
                torch.cuda.synchronize(device)
    for cache in chain(*executor.caches):
        if cache.keys.is_cpu:
            cache.keys.fill_(torch.nan)
            cache.values.fill_(torch.nan)
    for rank in (rank for copies in executor.host_copies for rank in copies._ranks):
        for memory in (*rank._pieces, rank._gathered):
            memory.fill_(torch.nan)
    _check_tokens(executor)


class PoisonedIteration(EagerIteration):
    """Samples -1 where logits are NaN."""

    def __init__(self, models: Sequence[Model], *, send: Send = copy, **drafts: Any) -> None:
        super().__init__([_Poisoned(model, send) for model in models], send=send, **drafts)

    def sample(self, stage: StageSlot, outputs: Sequence[torch.Tensor], work: Work) -> None:
        super().sample(stage, outputs, work)
        for rank in stage.ranks:
            out = rank.leaving[: work.shape.num_rows]
            out.copy_(_mark(out.to(outputs[0].device, copy=True), outputs[0]))


class _Poisoned:
    """A model that chooses -1 where logits are NaN. Ranks have the same hidden states: one's logits are NaN where all are."""

    def __init__(self, model: Model, send: Send) -> None:
        self._model, self._send = model, send

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def choose(self, logits: torch.Tensor, out: torch.Tensor) -> Steps[None]:
        tokens = torch.empty_like(out, device=logits.device)
        yield from self._model.choose(logits, tokens)
        self._send(_mark(tokens, logits), out)


def _mark(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return tokens.masked_fill_(logits.isnan().any(dim=-1), -1)


def _check_tokens(executor: StreamExecutor) -> None:
    """From here on `wait` raises RuntimeError if a sampled token is poisoned."""
    launch, wait, in_flight = executor.launch, executor.wait, deque[Step]()

    def noted_launch(step: Step) -> Any:
        in_flight.append(step)
        return launch(step)

    def checked_wait(handle: Any) -> StepResult:
        result, step = wait(handle), in_flight.popleft()
        assert result.tokens is not None
        if (result.tokens[step.split().sampled] < 0).any():
            rows = np.flatnonzero(result.tokens < 0).tolist()
            raise RuntimeError(f"poison: the tokens of rows {rows} were computed from memory that was never written")
        return result

    executor.launch, executor.wait = noted_launch, checked_wait  # type: ignore[method-assign]
