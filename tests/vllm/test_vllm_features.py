"""What vLLM does beside scheduling goes on under a policy: adapters, images, KV blocks from elsewhere, grammars."""

from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_plans import Kept
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus
from vllm_rig import Rig

from cbatch import Limits, Plan, Request, View
from cbatch.request import FinishReason
from cbatch.vllm import Adapter
from policies.chunking import Fixed
from policies.orca import Orca
from policies.sarathi_serve import SarathiServe

LIMITS = Limits(4, 64, 60)
LATE = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def rig_of(policy: Any, **given: Any) -> Any:
    return Rig(Adapter(policy), LIMITS, 60, 4, **given)


def add(rig: Any, *requests: Request, **attributes: Any) -> None:
    for request in requests:
        made = rig.request(request)
        for name, value in attributes.items():
            setattr(made, name, value)
        rig.scheduler.add_request(made)


def serve(rig: Any) -> list[dict[str, int]]:
    """Returns the tokens of each iteration, by request."""
    scheduled = []
    while rig.scheduler.has_requests():
        output = rig.schedule()
        if output.num_scheduled_tokens:
            scheduled.append(output.num_scheduled_tokens)
        rig.update()
    return scheduled


def test_a_request_beyond_the_adapters_that_fit_waits_and_is_counted() -> None:
    """max_loras=1: the policy plans both requests, vLLM admits the second when the first has ended."""
    rig = rig_of(Orca())
    rig.scheduler.lora_config = SimpleNamespace(max_loras=1)
    for id_ in range(2):
        add(rig, Request(id_, 10, 3), lora_request=SimpleNamespace(lora_int_id=id_ + 1))
    assert serve(rig) == [{"0": 10}, {"0": 1}, {"0": 1}, {"1": 10}, {"1": 1}, {"1": 1}]
    assert rig.scheduler.counts.short == 3


class Image:
    """Tokens 20 to 29 of a prompt."""

    offset, length = 20, 10

    def get_num_embeds(self) -> int:
        return self.length

    def get_embeds_indices_in_range(self, begin: int, end: int) -> tuple[int, int]:
        return begin, end


def test_an_image_is_encoded_when_the_plan_reaches_it() -> None:
    """vLLM would compute the prompt at once, and so encode its image in the first iteration."""
    rig = rig_of(SarathiServe(Fixed(16)))
    scheduler = rig.scheduler
    scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = 32, EncoderCacheManager(32)
    scheduler.scheduler_config.disable_chunked_mm_input = False
    feature = SimpleNamespace(mm_position=Image(), identifier="image", modality="image", mm_hash="image", data=None)
    add(rig, Request(0, 40, 2), mm_features=[feature])
    encoded = []
    while scheduler.has_requests():
        output = rig.schedule()
        encoded.append((output.total_num_scheduled_tokens, output.scheduled_encoder_inputs))
        rig.update()
    assert encoded == [(16, {}), (16, {"0": [0]}), (8, {}), (1, {}), (0, {})]


class Elsewhere:
    """A KV connector that holds the first 8 tokens of every prompt. asynchronous: vLLM waits for them."""

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 8 - computed, self.asynchronous

    def request_finished(self, request: Any, blocks: Any) -> tuple[bool, None]:
        return False, None

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "later"])
def test_blocks_that_a_connector_brings_need_not_be_computed(asynchronous: bool) -> None:
    """A request whose blocks are on their way is hidden from the policy until they are there."""
    rig = rig_of(Orca())
    rig.scheduler.connector = Elsewhere(asynchronous)
    add(rig, Request(0, 20, 2))
    first = rig.schedule()
    if asynchronous:
        assert not first.num_scheduled_tokens
        rig.in_flight.clear()
        assert not rig.schedule().num_scheduled_tokens and not rig.scheduler._planner.population.waiting
        rig.in_flight.clear()
        rig.scheduler.finished_recving_kv_req_ids.add("0")
        first = rig.schedule()
    assert first.num_scheduled_tokens == {"0": 12}
    rig.update()
    assert serve(rig) == [{"0": 1}]
    assert rig.scheduler.counts.short == 1


class Reserving:
    """Chunks of four tokens, with all blocks reserved. hook: called once, in a plan that then fails. ended: reasons by request."""

    def __init__(self, hook: Any = None) -> None:
        self.hook, self.arrived, self.ended = hook, list[int](), dict[int, FinishReason]()

    def plan(self, view: View) -> Plan:
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
            raise ValueError("no plan")
        plan = view.plan()
        plan.add_decodes()
        for request in [*view.prefilling, *view.waiting]:
            plan.add(request, 4, reserve=request.num_tokens + 8)
        return plan.build()

    def on_arrival(self, request: Request) -> None:
        if request.id not in self.arrived:
            self.arrived.append(request.id)

    def on_finish(self, request: Request) -> None:
        assert request.id in self.arrived and request.finish_reason is not None
        self.ended[request.id] = request.finish_reason


@pytest.mark.parametrize(("asynchronous", "held"), [(False, 7), (True, 2)], ids=["at once", "later"])
def test_reserved_blocks_count_what_a_connector_brings(asynchronous: bool, held: int) -> None:
    """28 reserved tokens are 7 blocks, the connector's among them. Those that are fetched are as many as the other machine has: 2."""
    rig = rig_of(Reserving())
    rig.scheduler.connector = Elsewhere(asynchronous)
    add(rig, Request(0, 20, 8))
    rig.schedule()
    assert len(rig.scheduler.kv_cache_manager.get_block_ids("0")[0]) == held


@pytest.mark.parametrize("mode", ["fallback", "shadow"])
def test_a_request_that_vllm_schedules_as_its_grammar_is_ready_is_shown(mode: Any) -> None:
    """The grammar is ready while the policy plans, so that vLLM's own rule admits the request; it outlives the other one."""
    policy, kept = Reserving(lambda: setattr(late.structured_output_request, "grammar", "compiled")), Kept()
    rig = Rig(Adapter(policy, mode, recorder=kept), LIMITS, 60, 4)
    late = rig.request(Request(1, 8, 9))
    late.status, late.structured_output_request = LATE, SimpleNamespace(grammar=None)
    add(rig, Request(0, 20, 2))
    rig.scheduler.add_request(late)
    for num_decodes in range(9):
        assert rig.schedule().num_scheduled_tokens["1"] == (1 if num_decodes else 8)
        rig.update()
    assert not rig.scheduler._planner.population.by_id
    assert rig.scheduler.counts.different == 0
    again = Reserving()
    assert not any(comparison.problem for comparison in kept.replay(again))
    assert again.arrived == policy.arrived == [0, 1] and again.ended == policy.ended


def test_a_request_that_vllm_fails_is_not_served() -> None:
    """Its grammar refuses the token: the policy hears of a request that was broken off, not of one that stopped."""
    policy = Reserving()
    rig = rig_of(policy)
    manager, refuses = rig.scheduler.structured_output_manager, lambda id_, tokens: False
    manager.should_advance = lambda request: request.request_id == "0"  # vLLM 0.22.1
    manager.accept_tokens = lambda request, tokens: request.request_id == "1"  # vLLM 0.33.0
    grammar = SimpleNamespace(grammar=SimpleNamespace(accept_tokens=refuses))
    add(rig, Request(0, 4, 9), structured_output_request=grammar)
    add(rig, Request(1, 4, 1))
    serve(rig)
    assert policy.ended == {0: FinishReason.CANCELLED, 1: FinishReason.LENGTH}


class Noting(Orca):
    """asked: the iterations for which it was asked."""

    steady = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def plan(self, view: View) -> Plan:
        self.asked.append(view.iteration)
        return super().plan(view)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_steady_policy_is_asked_when_a_request_arrives_ends_or_frees_blocks(asynchronous: bool) -> None:
    """Request 1 arrives for iteration 5 and samples its last token in 6, which async frees its blocks after 7 is planned."""
    policy = Noting()
    rig = rig_of(policy, asynchronous=asynchronous)
    add(rig, Request(0, 10, 12))
    while rig.scheduler._planner.view.iteration < 5:
        rig.step()
    add(rig, Request(1, 10, 2))
    while rig.scheduler.has_requests() or rig.in_flight:
        rig.step()
    assert policy.asked == ([0, 1, 5, 6, 7, 8] if asynchronous else [0, 1, 5, 6, 7])
    assert rig.scheduler.counts.iterations == 12 and rig.scheduler.counts.short == 0


def test_a_paused_vllm_computes_nothing_and_then_goes_on() -> None:
    rig = rig_of(Noting())
    add(rig, Request(0, 10, 9))
    for _ in range(4):
        rig.step()
    for state, scheduled in ((PauseState.PAUSED_ALL, {}), (PauseState.UNPAUSED, {"0": 1})):
        rig.scheduler.set_pause_state(state)
        assert rig.schedule().num_scheduled_tokens == scheduled
        rig.update()
    assert rig.scheduler.counts.short == 0


class HoldsBack:
    """Chunks of four tokens at even iterations only."""

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in [] if view.iteration % 2 else [*view.prefilling, *view.waiting]:
            plan.add(request, 4)
        return plan.build()


def test_vllm_computes_decodes_alone_while_a_policy_holds_a_begun_prompt_back() -> None:
    rig = rig_of(HoldsBack())
    add(rig, Request(0, 4, 6), Request(1, 12, 1))
    alone, both = {"0": 1}, {"0": 1, "1": 4}
    assert serve(rig) == [{"0": 4, "1": 4}, alone, both, alone, both, alone]
