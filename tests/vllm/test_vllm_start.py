"""What vLLM's scheduler cannot do with a policy is refused at its start, in one line."""

from pathlib import Path
from shlex import join
from typing import Any

import pytest
import vllm.v1.kv_cache_interface as kinds
from hypothesis import HealthCheck, given, settings
from spoiled_settings import IN_VLLM, command_lines
from vllm import __version__
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_rig import Rig

from cbatch import BatchShape, CbatchError, ConfigError, Limits, Plan, PlanError, PolicyError, Request, View
from cbatch.sim import ProfileCost
from cbatch.vllm import Adapter
from experiments.vllm import PolicyScheduler, make_adapter, variable
from policies.orca import Orca

LIMITS = Limits(4, 64, 60)
FULL = ("FullAttentionSpec", {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float16"})


class Greedy:
    """Plans every request whole, whether it fits or not."""

    def plan(self, view: View) -> Plan:
        return Plan((request, request.num_ready) for request in [*view.running, *view.waiting])


class Broken:
    def plan(self, view: View) -> Plan:
        raise ValueError("no idea")


def start(monkeypatch: pytest.MonkeyPatch, overrides: str, **changes: Any) -> Any:
    """vLLM builds the scheduler that `--scheduler-cls` names."""

    def change(config: Any) -> None:
        for path, value in changes.items():
            section, _, name = path.partition("__")
            setattr(getattr(config, section) if name else config, name or section, value)

    monkeypatch.setenv("CBATCH", overrides)
    return Rig(None, LIMITS, 20, 4, change=change).make(PolicyScheduler)


def test_the_variable_chooses_policy_mode_and_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = "policy=qoserve chunking=slack model=llama-3.1-8b vllm.mode=fallback batch=3 policy.alpha=0.5"
    scheduler = start(monkeypatch, overrides)
    planner = scheduler._planner
    assert planner._policy.alpha == 0.5 and planner.mode == "fallback"
    assert planner.view.limits == Limits(3, 64, 60, tile=128)
    assert planner.view.cost.predict(BatchShape((), 8, 8000)) > 1e-3


@pytest.mark.parametrize(
    ("gpu", "ranks", "keys", "profile"),
    [
        (None, 1, [], "h200-vllm"),  # no GPU, or one without a profile
        ("h100", 1, [], "h100-vllm"),
        ("h100", 2, [], "h100"),  # whose links were measured
        ("h100", 1, ["hardware=h200"], "h200"),
    ],
)
def test_predictions_are_of_vllm_on_the_gpu_here(
    gpu: str | None, ranks: int, keys: list[str], profile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("experiments.vllm.profile_of_gpu", lambda: gpu)
    recorded = f"vllm.record={tmp_path / 'kept'}"
    cost = make_adapter(["policy=orca", "model=llama-3.1-8b", recorded, *keys], ranks).cost
    assert isinstance(cost, ProfileCost) and cost.profile.name == profile
    assert f"hardware: {profile}\n" in (tmp_path / "kept" / "config.yaml").read_text(), "a replay reads the keys"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("", "policy: is missing"),
        ("policy=sarathi_server", "policy=sarathi_server: .*sarathi_serve"),
        ("policy=orca workload=closed", "workload: is decided by vLLM"),
        ("policy=orca vllm.mode=strickt", "vllm.mode=strickt"),
        ("policy=orca vllm.node=strict", "vllm.node"),
        ("policy=orca mode=shadow", "mode: no such key; did you mean vllm.mode"),
        ("policy=orca hardware=h200", "hardware=h200: predicts nothing without a model; give model=NAME too"),
        ("policy=orca model.num_layers=2", "model.num_layers=2: predicts nothing without a model; give model=NAME too"),
        ("policy=orca metrics.warmup_requests=3", "metrics.warmup_requests: has no effect here, as vLLM measures"),
        (
            "policy=orca batch=9",
            "batch=9: vLLM runs at most 8 requests; give a smaller one, or a larger --max-num-seqs",
        ),
        ("policy=orca vllm.simulate=maybe", "vllm.simulate=maybe: give true or false"),
        ("policy=orca 'chunk=8", "CBATCH=policy=orca 'chunk=8: No closing quotation; close it"),
        ("policy=broken.Nowhere", "broken"),
        ("policy=orca drafting=fixed", "drafting: vLLM proposes no drafts; give vllm --speculative-config too"),
        ("policy=orca drafter=ngram", "drafter: is decided by vLLM"),
        *(
            (f"policy={policy} vllm.record=kept", "model: is missing; the policy predicts")
            for policy in ("qoserve chunking=slack", "lars", "mlfq")
        ),
    ],
)
def test_settings_that_cannot_be_used(
    overrides: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("class Policy:\n    def plan(self, view)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said) as raised:
        start(monkeypatch, overrides)
    assert "\n" not in str(raised.value) and not Path("kept").exists()


@pytest.mark.long
def test_any_keys_are_taken_or_refused_in_one_line(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As `tests/commands/test_fuzz.py`, which has the commands."""
    number = max(int(pytestconfig.getoption("--fuzz") * 0.03), 2)

    @settings(max_examples=number, suppress_health_check=list(HealthCheck))
    @given(command_lines(IN_VLLM, "vllm"))
    def test(lines: list[str]) -> None:
        monkeypatch.setenv("CBATCH", join(lines))
        try:
            with variable() as overrides:
                recorder = make_adapter(overrides).recorder
        except CbatchError as error:
            text = str(error)
            assert text.startswith("CBATCH=") and "\n" not in text
        else:
            _ = recorder and recorder.close()

    monkeypatch.chdir(tmp_path)
    test()


def test_keys_that_the_policy_does_not_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr("experiments.vllm._log.warning", warned.append)
    make_adapter(["policy=sarathi_serve", "chunk=64"])
    make_adapter(["policy=orca", "chunk=64"])
    assert [text.partition(":")[0] for text in warned] == ["chunk=64"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "context parallelism"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"model_config__is_diffusion": True}, "diffusion"),
        (
            {"speculative_config": type("Spec", (), {"enable_adaptive_verification": True})},
            "enable_adaptive_verification",
        ),
    ],
)
def test_features_that_no_plan_describes(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=said):
        start(monkeypatch, "policy=orca", **change)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([FULL, FULL], "2 KV cache groups"),
        ([("MambaSpec", {"block_size": 4, "shapes": ((1,),), "dtypes": ("float16",)})], "a KV cache of MambaSpec"),
        ([], "0 KV cache groups"),
    ],
)
def test_kinds_of_kv_cache_that_no_view_describes(groups: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = [
        kinds.KVCacheGroupSpec([str(place)], getattr(kinds, kind)(**given))
        for place, (kind, given) in enumerate(groups)
    ]
    monkeypatch.setattr(
        "vllm_rig.KVCacheConfig", lambda blocks, tensors, _: kinds.KVCacheConfig(blocks, tensors, built)
    )
    with pytest.raises(ConfigError, match=f"cbatch cannot schedule vLLM with {said}"):
        start(monkeypatch, "policy=orca")


def test_a_seam_that_a_version_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_mamba_block_aligned_split")
    with pytest.raises(ConfigError, match=f"vLLM {__version__}: its scheduler has no _mamba_block_aligned_split"):
        start(monkeypatch, "policy=orca")


@pytest.mark.parametrize(("policy", "error"), [(Greedy, PlanError), (Broken, PolicyError)])
def test_modes(policy: Any, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that fails: strict ends the engine; in fallback and shadow mode vLLM's own rule serves the request."""
    requests = [Request(0, 50, 3), Request(1, 50, 3)]
    for mode in ("strict", "fallback", "shadow"):
        rig = Rig(Adapter(policy(), mode), LIMITS, 40, 4)
        for request in requests:
            rig.scheduler.add_request(rig.request(request))
        if mode == "strict":
            with pytest.raises(error, match=policy.__name__):
                rig.step()
            continue
        own = rig.make(Scheduler)
        for request in requests:
            own.add_request(rig.request(request))
        while rig.scheduler.has_requests():
            assert rig.schedule().num_scheduled_tokens == own.schedule().num_scheduled_tokens
            own.update_from_output(rig.in_flight[0][0], rig.result(*rig.in_flight[0]))
            rig.update()
        assert rig.scheduler.counts.fallbacks > 0


def test_vllm_serves_in_shadow_mode_what_the_policy_could_never_plan() -> None:
    """Orca computes a prompt of 100 tokens at once, of which an iteration has 64: strict refuses it, in shadow mode vLLM serves it in two chunks."""
    limits, request, served = Limits(4, 64, 200), Request(0, 100, 2), dict[str, list[dict[str, int]]]()
    for mode in ("strict", "shadow"):
        rig = Rig(Adapter(Orca(), mode), limits, 100, 4)
        rig.scheduler.add_request(rig.request(request))
        served[mode] = []
        while rig.scheduler.has_requests():
            served[mode].append(dict(rig.schedule().num_scheduled_tokens))
            rig.update()
    assert [*filter(None, served["strict"])] == []
    assert [*filter(None, served["shadow"])] == [{"0": 64}, {"0": 36}, {"0": 1}]
    assert rig.scheduler.counts.different > 0
