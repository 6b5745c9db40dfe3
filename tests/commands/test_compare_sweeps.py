"""Comparisons of sweeps: at each value of the settings that vary beside the policy."""

import itertools
import re
from pathlib import Path

import pandas as pd
from hand_made import write_run
from test_compare import SPEED, printed, write_sweep


def test_a_sweep_of_rates_is_compared_at_each_rate(tmp_path: Path) -> None:
    """Policy b is faster than a by 1 token per second, both at 1 and at 10 requests per second."""
    write_sweep(tmp_path, ["a", "b"], [1, 10])
    every = printed(str(tmp_path), SPEED)
    assert re.findall(r"(.+): 2 replications, paired", every) == ["b over a at rate=1", "b over a at rate=10"]
    assert every.count("+1 [1, 1]") == 2
    one = printed(str(tmp_path), SPEED, "runs=rate=10", "baseline=b")
    assert re.findall(r"(.+): 2 replications, paired", one) == ["a over b"]
    assert one.index("a over b") < one.index("ratio") < one.index("-1 [-1, -1]"), "a table stands below its title"
    assert "-1 [-1, -1]" in one
    labels = "a, rate=1; a, rate=10; b, rate=1; b, rate=10"
    said = f"baseline=c: no run of this policy; known: a, b; or a label: {labels}"
    assert printed(str(tmp_path), "baseline=c") == said
    for key in ("runs", "baseline"):
        assert printed(str(tmp_path), f"{key}=a", f"{key}=b") == f"{key}: is given twice, as a and as b; give it once"


def test_a_sweep_of_batches_is_compared_at_each_batch(tmp_path: Path) -> None:
    """The requests are the same at all batches, so that the workload alone does not say which runs belong together."""
    for place, (policy, batch, seed) in enumerate(itertools.product("ab", (8, 16), (0, 1))):
        settings = {"batch": batch, "workload": {"seed": seed}, "policy": {"_target_": f"policies.{policy}"}}
        about = {"policy": policy, "overrides": [f"batch={batch}"], "number": place}
        write_run(tmp_path / f"{policy},{batch},{seed}", about, settings, speed=100.0 + place)
    pairs = re.findall(r"(.+): 2 replications, paired", printed(str(tmp_path), SPEED))
    assert pairs == ["b over a at batch=8", "b over a at batch=16"]


def test_further_settings_make_a_table_each(tmp_path: Path) -> None:
    """Three policies, the second with an argument that holds a comma, at two batches and two rates; chunks are arguments of a policy."""
    policies, seeds = ("a", "b(x=1, y=2)", "c"), (0, 1)
    for number, (policy, batch, rate, seed) in enumerate(itertools.product(policies, (8, 16), (1, 2), seeds)):
        settings = {"batch": batch, "workload": {"seed": seed, "rate": rate}, "policy": {"_target_": policy}}
        about = {"policy": policy, "overrides": [f"batch={batch}", f"workload.rate={rate}"], "number": number}
        write_run(tmp_path / f"{number}", about, settings, speed=100.0 + 5 * seed + policies.index(policy))
    text = printed(str(tmp_path), SPEED, f"csv={tmp_path / 'all.csv'}")
    titles = re.findall(r"Over a at (.+): 2 replications, paired", text)
    assert titles == [f"batch={batch}, rate={rate}" for batch in (8, 16) for rate in (1, 2)]
    assert re.findall(r"tokens/s +(\S.*?) +higher .* (\+[12]) \[", text) == [("b(x=1, y=2)", "+1"), ("c", "+2")] * 4
    table = pd.read_csv(tmp_path / "all.csv")
    assert table["settings"].tolist() == [title for title in titles for _ in range(2)]


def test_chunks_are_compared_with_the_baseline_of_the_same_chunk(tmp_path: Path) -> None:
    """Also if the other policy reads it as a budget; orca reads none and has one run."""
    policies = {256: ("orca", "serve(chunk=256)", "X(budget=256)"), 512: ("serve(chunk=512)", "X(budget=512)")}
    for size, policy, seed in ((key, name, seed) for key in policies for name in policies[key] for seed in (0, 1)):
        about = {"policy": policy, "chunk": size, "overrides": [f"chunk={size}"]}
        settings = {"workload": {"seed": seed}}
        write_run(tmp_path / f"{policy},{size},{seed}", about, settings, speed=100.0 + 10 * seed + len(policy))

    def pairs(*options: str) -> list[str]:
        return re.findall(r"(.+): 2 replications, paired", printed(str(tmp_path), SPEED, *options))

    matched = ["orca over serve(chunk=256)", "serve(chunk=512) over serve(chunk=256)"]
    one_each = ["X(budget=256) over serve(chunk=256)", "X(budget=512) over serve(chunk=512)"]
    assert sorted(pairs("baseline=serve")) == sorted([*matched, *one_each])
    assert {"serve(chunk=256) over X(budget=256)", "serve(chunk=512) over X(budget=512)"} < set(pairs("baseline=X"))
    for label in ("serve(chunk=512)", "X(budget=256)", "orca"):
        assert {pair.partition(" over ")[2] for pair in pairs(f"baseline={label}")} == {label}
