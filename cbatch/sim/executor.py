"""The simulated executor: no tokens, a virtual clock, and iteration times from a cost model.

Host and device run concurrently, as in the real loop. A launch takes host time. The device starts a step once the step has
been launched and the previous step has ended. A synchronous engine therefore takes the sum of host and device time, an
asynchronous engine the larger of the two. With pipeline stages, one step per stage is in flight. A step without a captured
graph is launched operation by operation: the device starts with the first operations, and the host's next work is delayed.

If the profile describes how the GPU's clock follows its power, an iteration's time also depends on the preceding
iterations: see `cbatch.sim.power`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import islice
from time import thread_time
from typing import Any

import numpy as np

from cbatch.cost import BatchShape, CostModel
from cbatch.executor import BlockCopies, Executor, Step, StepResult, Turn
from cbatch.kv import Copies
from cbatch.model.topology import Topology
from cbatch.request import Ints
from cbatch.sim.cost import ProfileCost, following_decodes
from cbatch.sim.drafter import SurvivalsDrafter
from cbatch.sim.measured import HostTime
from cbatch.sim.power import GpuClock
from cbatch.sim.stages import Cause, Span, StageAccount, Stages
from cbatch.sim.times import StageTimes

_HOST, _COMPUTE = Cause.HOST, Cause.COMPUTE


class SimExecutor(Executor):
    """The simulated GPUs of one replica."""

    needs_tokens = False

    def __init__(
        self,
        cost: CostModel,
        host: HostTime | float = 0.0,
        server_seconds: float = 0.0,
        drafter: SurvivalsDrafter | None = None,
    ) -> None:
        """
        cost: predicts the device seconds of a batch shape, for one GPU or, if a `ProfileCost`, for its topology.
        host: host time per iteration; a number means seconds for every batch.
        server_seconds: beside the host's; see `Arrivals`.
        drafter: drafts in the first stage before an iteration, and draws what is accepted; None: no draft is.
        """
        self.cost, self.drafter = cost, drafter
        self.host = host if isinstance(host, HostTime) else HostTime(host)
        self.server_seconds = server_seconds + self.host.server_seconds
        self._profile = cost if isinstance(cost, ProfileCost) else _OneGpu(cost)
        self.num_stages = self._profile.topology.pipeline_stages
        self.graph_tokens = self._profile.graph_tokens
        self.restart()

    def restart(self) -> None:
        self._stages = Stages(self.num_stages)
        self._now = self._ready_at = self._copied_at = self._received_at = self._delay = 0.0
        self._num_in_flight = 0
        self._rejected = deque[tuple[Ints, Ints]]()  # table rows and drafts of each iteration in flight with drafts
        self._latest: deque[Span] = deque(maxlen=self.num_stages)
        power = self._profile.power
        self._gpu_clock = GpuClock(power) if power is not None else None

    def launch(self, step: Step) -> Span:
        shape, profile, host = step.shape(), self._profile, self.host
        times = profile.execute(shape)
        if self._delay:
            times, self._delay = times._replace(embedding=times.embedding + self._delay), 0.0
        drafter = self.drafter
        if drafter is not None and (step.drafts is not None or drafter.model is not None):
            times = times._replace(embedding=times.embedding + drafter.seconds_of(step))
        self._advance(self._now + host.of(len(step.requests), step.found, len(shape.chunks)), _HOST)
        begins = launched = self._now
        if host.eager_seconds and shape.chunks and profile.is_eager(shape):
            launched += host.eager_seconds * profile.topology.tensor_parallel
        blocks = None if step.copies is None else self._copy(step, step.copies)
        if blocks is not None:
            begins = max(begins, blocks.ended)
        if self._received_at > begins:
            self._stages.record_host(begins, self._received_at, Cause.COPIES)
            begins = self._received_at
        saved = 0.0 if self._gpu_clock is None else self._saved(times, self._gpu_clock, begins)
        self._num_in_flight += 1
        if self.num_stages == 1:
            span = self._stages.launch_alone(begins, shape, times, saved, launched)
        else:
            full, carries = self._num_in_flight >= self.num_stages, len(self._latest) == self.num_stages
            carried_from = self._latest[0] if carries and (step.carry >= 0).any() else None
            span = self._stages.launch(
                begins, shape, times, saved=saved, full=full, carried_from=carried_from, launched=launched
            )
        span = span if blocks is None else span._replace(blocks=blocks)
        if step.drafts is not None:
            span = span._replace(accepted=self._draw(step, step.drafts))
        self._latest.append(span)
        self._ready_at = launched
        if not host.receives_in_launch:
            self._advance(launched, _HOST)
        return span

    def wait(self, in_flight: Span) -> StepResult:
        started, ended, shape, _, blocks, accepted = in_flight
        if ended > self._now:
            self._advance(ended, _COMPUTE if self._num_in_flight >= self.num_stages else Cause.NO_WORK, shape)
        self._num_in_flight -= 1
        if accepted is not None:
            self._rejected.popleft()
        return StepResult(None, started, ended, None, self.graph_tokens(shape), None, blocks, accepted)

    def ready_at(self) -> float:
        return self._ready_at

    def delay(self, seconds: float) -> None:
        """Lengthens the next iteration: the device also sends."""
        self._delay += seconds

    def follow(self, time: float) -> None:
        """Lets the next iteration begin no sooner: it reads KV blocks that another replica sends."""
        self._received_at = max(self._received_at, time)

    def ends_at(self, in_flight: Span) -> float:
        return in_flight.ended

    @property
    def repeats(self) -> bool:
        """Returns whether `repeat` can replace `launch` and `wait`: with one stage, no draft model and no delay, unless a subclass overrides them."""
        alone = self.num_stages == 1 and not self._delay and (self.drafter is None or self.drafter.model is None)
        return alone and (type(self).launch, type(self).wait) == (SimExecutor.launch, SimExecutor.wait)

    def repeat(self, step: Step, num_times: int, until: float, in_flight: Span | None) -> Iterator[Turn]:
        """Launches the batches after `step`, a batch of decodes. Like the engine, waits for the previous batch after each launch.

        num_times: most batches; no batch is planned from `until` on. in_flight: `step`, if in flight; None: waits for each batch itself.
        """
        host, stages, clock, now = self.host.of(len(step.requests)), self._stages, self._gpu_clock, self._now
        for shape, times in islice(self._profile.execute_decodes(step.shape()), num_times):
            planned_at, now = now, now + host
            saved = 0.0
            if clock is not None:
                clock.rest(now - stages.free_at)
                saved = clock.run(times.pace)
            if now > planned_at:
                stages.record_host(planned_at, now, _HOST)
            span = stages.launch_alone(now, shape, times, saved, now)
            self._latest.append(span)
            launched_at, ended = now, (in_flight or span).ended
            if ended > now:
                now = ended
            self._now = now
            if in_flight is not None:
                in_flight = span
            yield planned_at, launched_at, span, now
            if now >= until:
                break

    def now(self) -> float:
        return self._now

    def sleep_until(self, time: float) -> None:
        self._advance(min(time, self._ready_at), _HOST)
        self._advance(time, Cause.NO_WORK)

    def accounts(self) -> list[StageAccount]:
        """Returns the time of each stage by cause, from 0 to the end of the last iteration."""
        return self._stages.close_accounts()

    def _advance(self, time: float, cause: Cause, shape: BatchShape = BatchShape()) -> None:  # noqa: B008 - a tuple
        if time > self._now:
            if cause is not _COMPUTE or self.num_stages > 1:  # a single stage is busy while the host waits for it
                self._stages.record_host(self._now, time, cause, shape)
            self._now = time

    def _draw(self, step: Step, drafts: Ints) -> Ints:
        """Returns the accepted drafts of each request."""
        rejected = np.zeros(step.table.num_rows, np.int64)
        for rows, numbers in self._rejected:
            rejected[rows] += numbers
        accepted = np.zeros_like(drafts) if self.drafter is None else self.drafter.draw(step, rejected[step.rows])
        self._rejected.append((step.rows, drafts - accepted))
        return accepted

    def _copy(self, step: Step, copies: Copies) -> BlockCopies:
        """Copies KV blocks on a stream of their own, from the launch of an iteration on, which waits for its copies."""
        num_out, num_back = len(copies.out), len(copies.back)
        now, started = self._now, max(self._now, self._copied_at)
        self._copied_at = ended = started + self._profile.copy_seconds(num_out, num_back, step.pool.block_size)
        could_begin = max(now, self._stages.first_free_at)
        if ended > now:
            self._stages.record_host(now, ended, Cause.COPIES)
        return BlockCopies(step.index, num_out, num_back, started, ended, max(ended - could_begin, 0.0))

    def _saved(self, times: StageTimes, clock: GpuClock, begins: float) -> float:
        """Returns the seconds saved by the GPU's current clock. All stages do equal work, so one clock represents all GPUs."""
        clock.rest(begins - (self._latest[-1].ended if self._latest else 0.0))
        return clock.run(times.pace)


class PlanningExecutor(SimExecutor):
    """Simulated GPUs whose host time includes the time that the policy's code takes on this machine for each plan.

    num_plans, planning_seconds: launched plans, and their processor time.
    delay_seconds: total delay of the device's iterations: planning time beyond the device's slack.
    """

    def restart(self) -> None:
        super().restart()
        self.num_plans, self.planning_seconds, self.delay_seconds = 0, 0.0, 0.0
        self._latest_plan = 0.0  # seconds

    def timed(self, plan: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @wraps(plan)
        def timed_plan(view: Any) -> Any:
            began = thread_time()
            made = plan(view)
            self._latest_plan = thread_time() - began
            return made

        return timed_plan

    def launch(self, step: Step) -> Span:
        """Launches a step after its planning time. Leaps never replace this method: a real engine plans every iteration."""
        host = self.host.of(len(step.requests), step.found, len(step.shape().chunks))
        could_begin = max(self._now + host, self._stages.free_at)
        self._advance(self._now + self._latest_plan, Cause.HOST)
        begins = max(self._now + host, self._stages.free_at)
        self.num_plans += 1
        self.planning_seconds += self._latest_plan
        self.delay_seconds += begins - could_begin
        return super().launch(step)


class _OneGpu:
    """Adapts a cost model to the interface of `ProfileCost`: one GPU with a constant clock and without graphs."""

    topology, power = Topology(), None

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    def copy_seconds(self, num_out: int, num_back: int, block_size: int) -> float:
        return self._cost.copy_seconds(num_out, num_back, block_size)

    def execute(self, shape: BatchShape) -> StageTimes:
        return StageTimes(self._cost.predict(shape), 0.0, 0.0, 0.0, ())

    def execute_decodes(self, shape: BatchShape) -> Iterator[tuple[BatchShape, StageTimes]]:
        return ((following, self.execute(following)) for following in following_decodes(shape))

    def graph_tokens(self, shape: BatchShape) -> None:
        return None

    def is_eager(self, shape: BatchShape) -> bool:
        return False
