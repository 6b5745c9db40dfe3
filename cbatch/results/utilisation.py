"""Utilisation: the operations and the bytes that a model needs, over what the GPUs could compute and move in the time.

docs/metrics.md has the formulas. This module knows no hardware profile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.model import DTYPE_BYTES, ModelSpec
from cbatch.request import Ints
from cbatch.results.metrics import Floats, StepColumns, Window
from cbatch.sim.attention import flops_per_score

Bools = NDArray[np.bool_]

LIMITED_OVER = 0.06
"""Seconds: a GPU's clock stays for 20 ms after a large product begins, and falls for 40 until its power is at the limit."""

PHASES = ("prefill", "decode", "mixed")


class ModelWork(NamedTuple):
    """What a model's iterations compute, and the least that they move.

    A multiplication and an addition are two operations. flops_per_output: the output head, for a token that is sampled, or that
    verifies a draft in vain.
    bytes_per_iteration: all weights are read once. bytes_per_token: a token's keys and values are written once and read once
    by each iteration that attends to them, and its embedding is read.
    """

    flops_per_token: int
    flops_per_score: int
    flops_per_output: int
    bytes_per_iteration: int
    bytes_per_token: int
    bytes_of_embedding: int

    def flops(self, steps: StepColumns) -> Floats:
        """Returns the operations of each iteration, padding left out."""
        tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"].astype(float)
        outputs = steps["num_sampled"] + steps.get("num_drafts", 0.0) - steps.get("num_accepted", 0.0)
        flops: Floats = tokens * self.flops_per_token + outputs * float(self.flops_per_output)
        flops += steps["num_scores"] * float(self.flops_per_score)
        return flops

    def bytes(self, steps: StepColumns) -> Floats:
        """Returns the bytes of each iteration, without activations."""
        tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"].astype(float)
        moved: Floats = (tokens + steps["num_kv_reads"]) * self.bytes_per_token + tokens * self.bytes_of_embedding
        moved += self.bytes_per_iteration * steps.get("num_passes", 1.0)
        return moved


def work_of(spec: ModelSpec) -> ModelWork:
    """Returns the work of a model, on however many GPUs."""
    layers, head, size = spec.num_layers, spec.hidden_size * spec.vocab_size, DTYPE_BYTES[spec.dtype]
    return ModelWork(
        flops_per_token=2 * layers * spec.layer_weights,
        flops_per_score=layers * flops_per_score(spec),
        flops_per_output=2 * head,
        bytes_per_iteration=(layers * spec.layer_weights + head) * size,
        bytes_per_token=spec.kv_bytes_per_token,
        bytes_of_embedding=spec.hidden_size * size,
    )


class DrafterWork(NamedTuple):
    """The passes of a simulated drafter.

    work: of its layers and output head. parallel, context: see `cbatch.sim.drafter`. whole: whether it is a model of its own, which also reads all that
    the model reads. copies: GPUs that compute all its passes, each.
    """

    work: ModelWork
    parallel: bool
    context: int
    whole: bool = False
    copies: int = 1

    def passes(self, steps: StepColumns) -> StepColumns:
        """Returns the passes before each iteration, as the columns of an iteration that `ModelWork` reads."""
        drafted, drafts, most = (steps[name].astype(float) for name in ("num_drafted", "num_drafts", "most_drafts"))
        if self.whole:  # the first pass reads all tokens but drafts, each draft is read by a later one
            same = {name: steps[name] for name in ("num_prefill_tokens", "num_decode_tokens", "num_scores")}
            reads = steps["num_kv_reads"] + drafts * self.context
            return {**same, "num_sampled": drafts, "num_kv_reads": reads, "num_passes": most + 1}
        in_one_pass = most * drafted, np.minimum(most, 1), drafted
        tokens, passes, read = in_one_pass if self.parallel else (drafts, most, drafts)
        columns = {"num_prefill_tokens": 0 * tokens, "num_decode_tokens": tokens, "num_sampled": tokens}
        attended = {"num_scores": tokens * self.context, "num_kv_reads": read * self.context}
        return {**columns, **attended, "num_passes": passes}


@dataclass(frozen=True, eq=False)
class Machines:
    """The GPUs of a run.

    work: of the model. drafting: None without a simulated drafter. flops_per_second, bytes_per_second: peak rates of all GPUs of each replica, [replicas].
    replica_of: the replica of each iteration, [iterations]; None if there is one replica.
    watts: `cbatch.sim.profile.Watts.of` each replica's GPUs, [replicas, fields]; None: unknown.
    """

    work: ModelWork
    flops_per_second: Floats
    bytes_per_second: Floats
    replica_of: Ints | None = None
    watts: Floats | None = None
    drafting: DrafterWork | None = None

    def flops(self, steps: StepColumns) -> Floats:
        """Returns the operations of each iteration, with the passes of a drafter before it."""
        return self._total("flops", steps)

    def bytes(self, steps: StepColumns) -> Floats:
        """Returns the bytes of each iteration, with the passes of a drafter before it."""
        return self._total("bytes", steps)

    def _total(self, what: Literal["flops", "bytes"], steps: StepColumns, copies: int = 1) -> Floats:
        total: Floats = getattr(self.work, what)(steps)
        if (drafting := self.drafting) is not None:
            total = total + copies * getattr(drafting.work, what)(drafting.passes(steps))
        return total

    def times(self, steps: StepColumns) -> tuple[Ints, Floats]:
        """Returns the replica of each iteration, and the time that the iteration adds to it."""
        replica = self.replica_of if self.replica_of is not None else np.zeros(len(steps["ended"]), np.int64)
        return replica, device_seconds(steps, replica)

    def joules(self, steps: StepColumns, seconds: Floats, watts: Floats, replica: Ints) -> tuple[Floats, Bools]:
        """Returns the predicted joules of each iteration, and whether the limit held. watts: `Watts.of` the GPUs of the replica of each."""
        _, busy, per_byte, per_flop, limit = watts.T
        copies = 1 if self.drafting is None else self.drafting.copies
        moved, flops = self._total("bytes", steps, copies), self._total("flops", steps, copies)
        taken = busy * seconds + moved * per_byte + flops * per_flop
        return limit_power(taken, seconds, limit * seconds, replica)


def machines_of(stated: Mapping[str, Any], replicas: Sequence[int] | Ints = ()) -> Machines:
    """Returns the machines of a run. stated: `work`, `peaks` and any `watts` and `drafting`, as `about` has them. replicas: see `RunRecord`."""
    flops, moved = np.array(stated["peaks"], float).T
    watts = np.array(stated["watts"]) if "watts" in stated else None
    replica_of = np.array(replicas, np.int64) if len(replicas) else None
    drafting = stated.get("drafting")
    passes = drafting and DrafterWork(**{**drafting, "work": ModelWork(**drafting["work"])})
    return Machines(ModelWork(**stated["work"]), flops, moved, replica_of, watts, passes)


def utilisation(machines: Machines, steps: StepColumns, window: Window, present: Floats) -> dict[str, dict[str, float]]:
    """Returns `mfu` and `mbu`: of the whole window, and of the device's time with each phase. NaN for a phase without iterations.

    present: share of the window in which each replica exists, [replicas].
    """
    inside = window.holds(steps["received_at"])
    replica, seconds = machines.times(steps)
    prompts, decodes = steps["num_prefill_tokens"] > 0, steps["num_decode_tokens"] > 0
    of_phase = dict(zip(PHASES, (prompts & ~decodes, decodes & ~prompts, prompts & decodes), strict=True))
    done = {"mfu": machines.flops(steps), "mbu": machines.bytes(steps)}
    peaks = {"mfu": machines.flops_per_second, "mbu": machines.bytes_per_second}
    figures = dict[str, dict[str, float]]()
    for name, peak in peaks.items():
        figures[name] = {"run": _share(done[name][inside], window.seconds * peak * present)}
        for phase, members in of_phase.items():
            chosen = inside & members
            figures[name][phase] = _share(done[name][chosen], (seconds * peak[replica])[chosen])
    return figures


def energy(
    machines: Machines | None, readings: Floats | None, steps: StepColumns, window: Window, present: Floats
) -> dict[str, float] | None:
    """Returns the energy of all GPUs in the window: predicted if the machines' watts are known, else measured; None without readings as well.

    present: as in `utilisation`. readings: see `measured_energy`.
    """
    inside = window.holds(steps["received_at"])
    generated = int(steps["num_sampled"][inside].sum())  # also for requests that were cancelled
    if machines is None or machines.watts is None:
        return None if readings is None else energy_figures(measured_energy(readings, window), window, generated)
    replica, seconds = machines.times(steps)
    joules, limited = machines.joules(steps, seconds, machines.watts[replica], replica)
    replica, seconds = replica[inside], seconds[inside]
    idle, computing = machines.watts[:, 0], np.bincount(replica, seconds, len(machines.watts))
    paused = np.maximum(present * window.seconds - computing, 0.0)
    figures = energy_figures(float(joules[inside].sum() + (idle * paused).sum()), window, generated)
    return {**figures, "at_limit_share": _share(seconds[limited[inside]], seconds)}


def limit_power(joules: Floats, seconds: Floats, most: Floats, replica: Ints) -> tuple[Floats, Bools]:
    """Returns the joules of iterations, at most `most` in each `LIMITED_OVER` of a replica's device time, and whether that limit held."""
    window = windows_of(seconds, replica)
    taken, possible = np.bincount(window, joules), np.bincount(window, most)
    share = np.divide(possible, taken, out=np.ones(len(taken)), where=taken > possible)
    return joules * share[window], (taken >= possible)[window]


def windows_of(seconds: Floats, replica: Ints) -> Ints:
    """Returns the window of each iteration, by number: `LIMITED_OVER` of a replica's device time, over which the power limit holds on average."""
    order, passed = np.argsort(replica, kind="stable"), np.empty(len(seconds))
    sums, first = np.cumsum(seconds[order]), np.searchsorted(replica[order], replica[order])
    passed[order] = (sums - (sums - seconds[order])[first]) // LIMITED_OVER
    return np.unique(passed + replica * (passed.max(initial=0.0) + 1), return_inverse=True)[1]


def measured_energy(readings: Floats, window: Window) -> float:
    """Returns the joules that all GPUs took in the window. readings: seconds, and the joules of each GPU until then, [readings, 1 + GPUs]."""
    times, *gpus = readings.T
    return sum(float(np.diff(np.interp([window.start, window.end], times, joules))[0]) for joules in gpus)


def energy_figures(joules: float, window: Window, generated: int) -> dict[str, float]:
    """Returns the joules, the mean watts, and the joules per token. generated: tokens of the window."""
    watts = joules / (window.seconds or np.nan)
    return {"joules": joules, "watts": watts, "joules_per_token": joules / (generated or np.nan)}


def device_seconds(steps: StepColumns, replica: Ints) -> Floats:
    """Returns the time that each iteration adds to its replica: from its start, or the end of the previous one, to its end."""
    seconds = np.zeros(len(replica))
    for one in np.unique(replica):
        of_replica = replica == one
        ended = steps["ended"][of_replica]
        before = np.concatenate([[-np.inf], np.maximum.accumulate(ended)[:-1]])
        seconds[of_replica] = np.maximum(ended - np.maximum(steps["started"][of_replica], before), 0.0)
    return seconds


def _share(done: Floats, possible: Floats) -> float:
    most = float(possible.sum())
    return float(done.sum()) / most if most > 0 else float("nan")
