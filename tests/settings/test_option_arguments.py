"""Options with arguments on the command line, so that a sweep gives each policy its own."""

from contextlib import chdir
from pathlib import Path

import pytest
import yaml
from commands import QUICK, command
from omegaconf import OmegaConf

from cbatch import ConfigError
from experiments.settings.compose import compose, compose_sweep
from experiments.settings.option_arguments import for_hydra

POLICY = """
from cbatch import Plan, View

class Greedy:
    def __init__(self, budget: int = 512, oracle: bool = False) -> None:
        self.budget = budget

    def plan(self, view: View) -> Plan:
        plan = view.plan()
        plan.add_decodes()
        for request in [*view.prefilling, *view.waiting]:
            plan.add(request, self.budget, reserve=request.max_tokens)
        return plan.build()
"""

CHUNKING = {"_target_": "policies.chunking.TileAligned", "chunk": 128}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps write multirun/."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("policy=orca", None),
        ("policy=orca,sarathi", None),
        ("policy=glob(sar*)", None),
        ("model=llama-3.1-8b", None),
        ("chunk=range(1,3)", None),
        ("policy={_target_: a.B, mean: 3}", None),
        ("+workload.lengths={_target_: a.B, mean: 3}", None),
        ("workload.lengths={parts: {long: {lengths: {_target_: a.B}}}}", None),
        ("policy=mine.Own", ["mine.Own"]),
        ("policy=orca,mine.Own", ["orca", "mine.Own"]),
        ("policy=mine.Own(a=1,2,b=x)", ["mine.Own(a=1,b=x)", "mine.Own(a=2,b=x)"]),
        ("policy='mine.Own(a=1)',\"mine.Own(a=2)\"", ["mine.Own(a=1)", "mine.Own(a=2)"]),
        ("policy=mine.Own(a=true,false,b=[1,2])", ["mine.Own(a=true,b=_1,_2_)", "mine.Own(a=false,b=_1,_2_)"]),
        (
            "policy=orca(drafting=mine.Own(k=1,2),none)",
            [f"orca(drafting={rule})" for rule in ("mine.Own(k=1)", "mine.Own(k=2)", "none")],
        ),
        ("policy=mine.Own(a=range(1,6,step=2))", ["mine.Own(a=1)", "mine.Own(a=3)", "mine.Own(a=5)"]),
        ("output=runs/day_a=1,b=2", ["runs/day_a=1,b=2"]),
        ("workload.path=runs/day_chunk=256/requests.csv", ["runs/day_chunk=256/requests.csv"]),
        ("workload.path=a=1,b=2", None),
        ("sweep='a=b'", None),
        ("output=a,b", None),
        ("workload=open_loop(arrivals.rate=1,2)", ["open_loop(arrivals.rate=1)", "open_loop(arrivals.rate=2)"]),
    ],
)
def test_options_with_arguments_become_names(given: str, names: list[str] | None) -> None:
    group = given.partition("=")[0]
    expected = given if names is None else f"{group}={','.join(repr(name) for name in names)}"
    assert for_hydra([given, "chunk=3"]) == [expected, "chunk=3"]


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ("policy=mine.Own(a=1.5,b.c=x)", "policy", {"_target_": "mine.Own", "a": 1.5, "b": {"c": "x"}}),
        (
            "policy=longest_first(per_prompt_token=true)",
            "policy",
            {"_target_": "policies.longest_first.LongestFirst", "chunking": CHUNKING, "per_prompt_token": True},
        ),
        (
            "policy=mine.Own(a=${chunk},b=null,c='x,y')",
            "policy",
            {"_target_": "mine.Own", "a": 128, "b": None, "c": "x,y"},
        ),
        ("policy=qoserve(chunking=slack,alpha=0.5)", "policy.chunking", {"_target_": "policies.chunking.Slack"}),
        ("policy=qoserve(chunking=slack,alpha=0.5)", "policy.alpha", 0.5),
        ("workload=open_loop(arrivals.rate=7)", "workload.arrivals.rate", 7),
    ],
)
def test_arguments_are_keys_of_the_section(given: str, key: str, expected: object) -> None:
    assert OmegaConf.select(OmegaConf.create(compose(given, "chunk=128").keys), key) == expected


@pytest.mark.parametrize("policy", ["mine.Own", "srpt"])
def test_an_argument_may_be_a_section_of_the_run(policy: str) -> None:
    """With the keys that the command line gives of it, which a copy would not have."""
    composed = compose(f"policy={policy}(predictor=${{predictor}})", "predictor=noisy", "predictor.share=0.9")
    assert composed.keys["policy"]["predictor"] == {**composed.keys["predictor"], "share": 0.9}
    assert "predictor" not in composed.unused
    with pytest.raises(ConfigError, match=r"\$\{...\} is the run's own; give predictor.share= outside"):
        compose(f"policy={policy}(predictor=${{predictor}},predictor.share=0.2)", "predictor=noisy")


def test_an_argument_of_the_runs_own_part_does_not_replace_the_part() -> None:
    with pytest.raises(ConfigError, match="the policy has the run's own predictor"):
        compose("policy=srpt(predictor.share=0.2)", "predictor=noisy")


def test_classes_of_routers_take_arguments_as_policies_do() -> None:
    words = ("backend=sim", "backend.router=lmetric,'mine.Own(a=1,2,b=[3,4])'", "sweep=s")
    own = [{"_target_": "mine.Own", "a": a, "b": [3, 4]} for a in (1, 2)]
    assert [job.keys["backend"]["router"] for job in compose_sweep(*words).jobs] == ["lmetric", *own]
    lengths = compose("workload=open_loop", "workload.lengths=mine.Own").keys["workload"]["lengths"]
    assert lengths == {"_target_": "mine.Own"}, "nothing of the preset's object is left"


def test_the_name_of_a_run_has_the_value_of_a_key_that_an_argument_follows() -> None:
    """A key that does not exist stays as it was given; so does `_chunk_` outside of arguments."""
    jobs = compose_sweep("policy=mine.Own(a=${chunk},b=_c_)", "chunk=128,256", "model.name=_chunk_", "sweep=s").jobs
    names = [f"chunk={chunk},name=_chunk_,policy='mine.Own(a={chunk},b=_c_)'" for chunk in (128, 256)]
    assert [job.name for job in jobs] == names


def test_an_object_takes_the_place_of_the_one_of_a_preset() -> None:
    """Not a key of it remains; a name beside objects in a sweep stays a name, and the runs' names have each key once."""
    values = {"{_target_: a.B, mean: 3}": {"_target_": "a.B", "mean": 3}, "least_loaded": "least_loaded"}
    values["{mean: 3, _target_: a.C}"] = {"mean": 3, "_target_": "a.C"}
    for key, preset in {"workload.lengths": "workload=open_loop", "backend.router": "backend=sim"}.items():
        jobs = compose_sweep(preset, f"{key}={','.join(values)}", "sweep=s").jobs
        assert [OmegaConf.select(OmegaConf.create(job.keys), key) for job in jobs] == [*values.values()]
        names = [f"{key.partition('.')[2]}={value.replace(': ', ':').replace(', ', ',')}" for value in values]
        assert [job.name.replace(f",{preset}", "").replace(f"{preset},", "") for job in jobs] == names
        alone = compose(preset, f"{key}={'{_target_: a.B, mean: 3}'}")
        assert OmegaConf.select(OmegaConf.create(alone.keys), key) == {"_target_": "a.B", "mean": 3}
        assert compose(*alone.overrides).keys == alone.keys, "as a command is given again by what runs store of it"


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("workload=clients", "clients", "{zed: {rate: 2}}"),
        ("workload=long_context", "lengths.parts", "{all: {share: 1}}"),
        ("workload=open_loop", "lengths", "{_target_: a.B, mean: 3}"),
    ],
)
def test_entries_by_name_take_the_place_of_a_presets(preset: str, key: str, value: str) -> None:
    """As a key and as an argument of the option; + adds entries."""
    for words in ((preset, f"workload.{key}={value}"), (f"{preset}({key}={value})",)):
        keys = OmegaConf.create(compose(*words).keys)
        assert OmegaConf.select(keys, f"workload.{key}") == yaml.safe_load(value)
    more = compose("workload=clients", "+workload.clients={zed: {rate: 2}}").keys["workload"]["clients"]
    assert [*more] == ["ann", "bob", "zed"]


def test_an_experiment_sweeps_options_with_arguments_unless_the_command_line_does(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    params = {"policy": "orca,'longest_first(per_prompt_token=true)'", "chunk": "128,256"}
    file = {"hydra": {"sweeper": {"params": params}}}
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(file))
    search_path = f"hydra.searchpath=['file://{tmp_path}']"
    with chdir(tmp_path):
        swept = compose_sweep(search_path, "experiment=mine", "sweep=a").jobs
        chosen = compose_sweep(search_path, "experiment=mine", "policy=sarathi", "sweep=b").jobs
    assert {(job.keys["policy"].get("per_prompt_token"), job.keys["chunk"]) for job in swept} == {
        (None, 128),
        (None, 256),
        (True, 128),
        (True, 256),
    }
    assert [(job.keys["policy"]["_target_"], job.keys["chunk"]) for job in chosen] == [
        ("policies.sarathi.Sarathi", 128),
        ("policies.sarathi.Sarathi", 256),
    ]


@pytest.mark.long
def test_a_sweep_crosses_own_arguments_with_built_in_policies(tmp_path: Path) -> None:
    """In other processes, and again in this one."""
    (tmp_path / "greedy.py").write_text(POLICY)
    arguments = ("-m", "sweep=s", "policy=orca,greedy.Greedy(budget=64,128,oracle=true)", "backend=sim", *QUICK)
    done = command("run", *arguments, "hydra/launcher=joblib", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ran = [yaml.safe_load(path.read_text())["policy"] for path in sorted(tmp_path.glob("multirun/s/*/config.yaml"))]
    own = {"_target_": "greedy.Greedy", "oracle": True}
    assert sorted(ran, key=str) == [{**own, "budget": 128}, {**own, "budget": 64}, {"_target_": "policies.orca.Orca"}]
    names = {path.name.split(",~")[0] for path in tmp_path.glob("multirun/s/*/")}
    assert {name.split("policy=")[1].split(",length")[0] for name in names} == {
        "orca",
        "greedy.Greedy_budget=64,oracle=true",
        "greedy.Greedy_budget=128,oracle=true",
    }
    again = command("run", *arguments, cwd=tmp_path)
    assert again.stdout.count(": finished before\n") == 3
