"""The engine against a plain model: any arrivals and plans, legal or not, in any order, sync and async, with and without tokens."""

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inventory import take_inventory
from plain_engine import PlainEngine
from told_engine import OTHER, STOP, Clockwork, Told

from cbatch import Engine, Limits, Plan, PlanError, Request, RequestSpec, Status, Step
from cbatch.cost import NO_COST
from cbatch.errors import WorkloadError
from cbatch.plan_check import check_rules
from cbatch.request import FinishReason

HOW = ("decodes", "preempting", "pad", "add", "preempt", "reject")
FAULTS = ("", "", "", "", "any", "tokens", "twice", "preempt", "reject", "reserve", "pad")
RANDOM = st.randoms(use_true_random=True)  # one draw per rule: hypothesis is slower than the engine


class EngineMachine(RuleBasedStateMachine):
    @initialize(random=RANDOM)
    def build(self, random: Random) -> None:
        num_stages, batch = random.choice([1, 1, 2, 3]), random.randint(1, 4)
        most = batch + random.randint(0, 3)
        limits = Limits(batch, random.randint(3, 16), 40, tile=1, num_stages=num_stages, max_running=most)
        size = {"num_blocks": random.randint(3, 8), "block_size": random.randint(1, 4)}
        self.tokens = random.random() < 0.5
        self.policy, self.executor = Told(), Clockwork(self, num_stages, self.tokens)
        asynchronous = random.random() < 0.75
        self.depth = num_stages if asynchronous else num_stages - 1
        self.engine = Engine(self.policy, self.executor, limits, NO_COST, asynchronous=asynchronous, **size)
        self.model = PlainEngine(limits, **size, carries=self.tokens or num_stages > 1)
        self.requests: list[Request] = []
        self.counts: dict[int, tuple[int, ...]] = {}
        for _ in range(random.randint(2, 4)):
            self.arrive(random)

    @precondition(lambda self: self.engine.num_unfinished < 6)
    @rule(random=RANDOM)
    def arrive(self, random: Random) -> None:
        self.submit(random.randint(1, 10), random.randint(1, 6), random.choice([None, random.randint(1, 6)]))

    def submit(self, prompt: int, limit: int, ends_after: int | None) -> None:
        id_, ends = len(self.requests), ends_after if ends_after is not None and ends_after < limit else None
        end = {"prompt": [OTHER] * prompt, "stop_tokens": (STOP,)} if self.tokens else {"true_new_tokens": ends_after}
        request = Request.from_spec(RequestSpec(id_, prompt, limit, arrival_time=self.executor.time, **end))  # type: ignore[arg-type]
        if prompt + limit - 1 > self.engine.state.pool.num_tokens:
            with pytest.raises(WorkloadError):
                self.engine.submit([request])
            return
        self.requests.append(request)
        self.engine.submit([request])
        self.policy.next = Plan([(Request(99, 1, 1), 1)])
        with pytest.raises(PlanError):
            self.engine.step()  # a stranger cannot be planned; but what has arrived waits now
        self.model.arrive(id_, prompt, limit, ends)
        assert self.policy.heard[-2:] == [("arrival", id_), ("wait", id_)]

    @precondition(lambda self: self.engine.num_unfinished)
    @rule(random=RANDOM)
    def build_a_plan(self, random: Random) -> None:
        """The builder makes no plan that a rule refuses, whatever it is asked for."""
        builder = self.engine.view.plan()
        for _ in range(random.randint(1, 6)):
            request = self.some(random)
            match random.choices(HOW, weights=(6, 3, 2, 16, 2, 1))[0]:
                case "decodes" | "preempting" as how:
                    at_most = random.choice([None, random.randint(0, 4)])
                    builder.add_decodes(at_most=at_most, preempt_newest=how == "preempting")
                case "pad":
                    builder.pad_to(random.randint(0, 12))
                case "add":
                    tokens, reserve = (random.choice([none, none, random.randint(0, 12)]) for none in (None, 0))
                    fits = (tokens or 0) <= self.model.limits.max_tokens >= request.num_ready
                    whole = fits and random.random() < 0.5
                    least = {**self.described(builder.plan), "pad_to": None}
                    least["entries"] = [*least["entries"], (request.id, 1)]
                    granted = builder.add(request, tokens, reserve=reserve or 0, whole=whole)
                    assert (builder.refusal is None) == (granted > 0)
                    if not (granted or whole or reserve or tokens == 0):
                        assert not self.model.is_legal(**least), f"refused without need: {builder.refusal}"
                case "preempt" | "reject" as how:
                    try:
                        builder.preempt(request) if how == "preempt" else builder.reject(request, "why")
                    except PlanError:
                        allowed = self.model.running if how == "preempt" else self.model.waiting
                        departed = [*builder.plan.preempt, *(gone for gone, _ in builder.plan.reject)]
                        assert request.id not in allowed or request in departed
        plan, limits = builder.build(), self.model.limits
        made = self.described(plan)
        assert self.model.is_legal(**made), f"the builder made an illegal plan: {made}"
        assert (builder.num_tokens, builder.num_requests) == (sum(plan.num_tokens), len(plan))
        assert builder.tokens_left == limits.max_tokens - builder.num_tokens
        assert builder.rows_left == limits.max_batch - len(plan)
        assert builder.free_blocks == self.model.free_after(made["entries"], made["preempt"], made["reserve"])
        self.turn(plan)

    @precondition(lambda self: self.engine.num_unfinished)
    @rule(random=RANDOM)
    def write_a_plan(self, random: Random) -> None:
        """A plan by hand, often illegal, is refused by the rules, by the engine and by the model alike."""
        if not self.model.flying and random.random() < 0.1:
            seconds = random.randint(1, 3)
            self.turn(Plan(wake_at=self.executor.time + seconds))
            assert self.engine.next_at() == self.executor.time + seconds
            self.engine.sleep_until(self.engine.next_at())
        plan, fault = Plan(), random.choice(FAULTS)
        running, ready = [*self.engine.view.running], [request for request in self.requests if request.num_ready]
        if running and random.random() < 0.3:
            plan.preempt = [random.choice(running)]
        known = self.requests if fault == "any" else [request for request in ready if request not in plan.preempt]
        plan.requests = random.sample(known, min(len(known), random.randint(0, 3)))
        plan.num_tokens = [random.choice([1, max(request.num_ready, 1)]) for request in plan.requests]
        match fault:
            case "tokens" if plan.requests:
                plan.num_tokens[-1] = random.randint(0, 12)
            case "twice":
                plan.requests, plan.num_tokens = plan.requests * 2, plan.num_tokens * 2
            case "preempt":
                plan.preempt = random.choices(self.requests, k=2)
            case "reject":
                plan.reject = [(self.some(random), "why")]
            case "reserve":
                plan.reserve = {random.choice(plan.requests or self.requests): random.randint(0, 12)}
            case "pad":
                plan.pad_to = random.randint(0, 16)
        self.turn(plan)

    def some(self, random: Random) -> Request:
        """Returns a request; often one that could compute tokens now, seldom one that has ended."""
        unfinished = [request for request in self.requests if request.status is not Status.FINISHED]
        ready = [request for request in unfinished if request.num_ready]
        return random.choice(random.choices((ready, unfinished, self.requests), (8, 3, 1))[0] or self.requests)

    @precondition(lambda self: self.model.flying)
    @rule()
    def wait(self) -> None:
        self.turn(Plan())

    @precondition(lambda self: self.requests)
    @rule(random=RANDOM)
    def cancel(self, random: Random) -> None:
        """A client leaves between two turns, perhaps after the end of its request."""
        request, self.model.now = random.choice(self.requests), self.executor.time
        expected = [] if request.status is Status.FINISHED else [("finish", request.id)]
        self.policy.heard.clear()
        self.engine.cancel(request)
        for _, id_ in expected:
            self.model.end(id_, "cancelled")
        assert self.policy.heard == expected

    def turn(self, plan: Plan) -> None:
        """One turn of the engine with this plan, and of the model if the plan is legal."""
        described, model = self.described(plan), self.model
        legal = model.is_legal(**described)
        self.policy.next = plan
        if not legal:
            with pytest.raises(PlanError) as by_rules:
                check_rules(plan, self.engine.view, "Told")
            with pytest.raises(PlanError) as by_engine:
                self.engine.step()
            assert str(by_rules.value) == str(by_engine.value)
            return
        check_rules(plan, self.engine.view, "Told")
        if not (len(plan) or plan.preempt or plan.reject or model.flying or plan.wake_at):
            return  # it would wait for ever
        model.now = self.executor.time
        for id_ in described["preempt"]:
            model.preempt(id_)
        for id_ in described["reject"]:
            model.end(id_, "rejected")
        expected: list[tuple[str, Any]] = [("wait", id_) for id_ in described["preempt"]]
        expected += [("finish", id_) for id_ in described["reject"]]
        self.planned, self.reserved = described["entries"], described["reserve"]
        flying = len(model.flying) + bool(len(plan))
        ended = len(model.ended)
        self.policy.heard.clear()
        self.landing = (flying > self.depth) if len(plan) else flying > 0
        self.engine.step()
        if self.landing:
            model.now = self.executor.time
            receivers = model.land()
            last = self.engine.record.steps[-1]
            assert (*last[8:12], *last[13:17]) == self.counts.pop(last.iteration)
            assert last.num_sampled == len(receivers)
            expected += [("tokens", receivers)] if receivers else []
            expected += [("finish", id_) for id_, _ in model.ended[ended:]]
            assert self.engine.record.receivers[-1].tolist() == receivers
        key = lambda event: (event[0] != "tokens", str(event))  # noqa: E731 - ends of one iteration come in any order
        assert sorted(self.policy.heard, key=key) == sorted(expected, key=key)

    def check_step(self, step: Step) -> None:
        """What the executor is handed is what the model computes, with the places of tokens to carry over."""
        model = self.model
        start = [model.requests[id_].computed for id_, _ in self.planned]
        ends = [first + tokens for first, (_, tokens) in zip(start, self.planned, strict=True)]
        carry = [model.carried_from(id_, end) for (id_, _), end in zip(self.planned, ends, strict=True)]
        decodes = sum(model.requests[id_].decodes for id_, _ in self.planned)
        model.launch(self.planned, self.reserved)
        assert step.index == model.iteration - 1
        padding = step.pad_to - step.num_batch_tokens
        batch = len(self.planned), step.num_batch_tokens - decodes, decodes, padding
        state = model.num_blocks - model.num_free, len(model.waiting), len(model.running)
        self.counts[step.index] = (*batch, model.num_preempted, *state)
        model.num_preempted = 0
        assert [request.id for request in step.requests] == [id_ for id_, _ in self.planned]
        assert (step.start.tolist(), step.num_tokens.tolist()) == (start, [tokens for _, tokens in self.planned])
        assert [step.requests[place].id for place in step.sampled] == model.flying[step.index][1]
        assert (step.num_batch_tokens, step.num_decode_tokens) == (sum(step.num_tokens), decodes)
        assert step.pad_to == (self.policy.next.pad_to or step.num_batch_tokens)
        if model.carries:
            assert step.carry.tolist() == carry

    @staticmethod
    def described(plan: Plan) -> dict[str, Any]:
        """A plan by ids."""
        return {
            "entries": [(request.id, tokens) for request, tokens in plan],
            "preempt": [request.id for request in plan.preempt],
            "reject": [request.id for request, _ in plan.reject],
            "reserve": {request.id: tokens for request, tokens in plan.reserve.items()},
            "pad_to": plan.pad_to,
        }

    @invariant()
    def the_view_is_the_model(self) -> None:
        if not hasattr(self, "engine"):
            return
        view, model = self.engine.view, self.model
        assert [request.id for request in view.waiting] == model.waiting
        assert [request.id for request in view.running] == model.running
        assert sorted(request.id for request in view.decoding) == sorted(model.of_running(True))
        assert sorted(request.id for request in view.prefilling) == sorted(model.of_running(False))
        assert (view.iteration, view.num_in_flight) == (model.iteration, len(model.flying))
        assert (view.kv.num_free, view.kv.num_retiring) == (model.num_free, sum(model.retiring.values()))
        for request, plain in zip(self.requests, model.requests.values(), strict=True):
            assert (request.status is Status.FINISHED) == (plain.status is Status.FINISHED)
            if plain.status is not Status.FINISHED:
                seen = (request.num_known, request.num_tokens, request.num_computed)
                assert seen == (plain.known, plain.total, plain.computed), request
                assert (request.num_ready, view.kv.num_held(request)) == (model.ready(request.id), plain.held)
                assert view.is_in_flight(request) == model.flies(plain)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "engine"):
            return
        inventory, model = take_inventory([self.engine], self.requests), self.model
        assert (inventory.num_requests, inventory.num_blocks) == (len(self.requests), model.num_blocks)
        assert self.engine.num_unfinished == len(self.requests) - len(model.ended)
        assert self.engine.state.num_overshoot_tokens == model.num_overshoot
        ends = {request.id: request for request in self.engine.record.requests}
        assert len(self.engine.record.requests) == len(ends)
        assert {id_: FinishReason(why) for id_, why in model.ended} == {
            id_: request.finish_reason for id_, request in ends.items()
        }
        for id_, request in ends.items():
            output = model.requests[id_].known - request.num_prompt_tokens
            assert request.num_output_tokens == output
            times = model.requests[id_].times
            assert request.token_times == (times.get("first"), times.get("last"))
            assert (request.admitted_at, request.finished_at) == (times.get("admitted"), times["end"])
            if self.tokens:
                stops = request.finish_reason is FinishReason.STOP
                assert request.output == [*[OTHER] * (output - stops), *[STOP] * stops]
                tables = self.engine.state.pool.tables
                held = [tables[row, :count] for row, count in enumerate(self.engine.state.pool.held.tolist())]
                blocks = np.concatenate(held)
                assert len(set(blocks.tolist())) == len(blocks), "a block is held twice"


TestEngine = pytest.mark.long(EngineMachine.TestCase)
TestEngine.settings = settings(max_examples=150, stateful_step_count=30)
