"""Where a profile's numbers come from: entry by entry, in every result, and the runs that its error holds for."""

import json
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from commands import command

from cbatch.cost import BatchShape
from cbatch.model import ModelSpec
from cbatch.model.topology import Topology
from cbatch.sim.cost import ProfileCost
from cbatch.sim.measured import HostTime
from cbatch.sim.profile_file import PROFILES, load_profile, profile_names
from cbatch.sim.provenance import NOT_COMPARED, not_measured, put_origins, take_origins
from experiments.profile.__main__ import main
from experiments.setup.presets import load_spec

LLAMA_13B, LLAMA_8B = load_spec("llama-13b"), load_spec("llama-3.1-8b")

FITTED = "captured_graphs captured_rows chunks decode_only decodes embedding head host linear mixed_decodes other power shared_reads"


def test_an_entry_has_its_own_origin_or_that_of_the_object_around_it() -> None:
    tables = {"from": "measured A", "num_layers": 2, "tensor_parallel": {"1": {"head": {"seconds": [1]}}}}
    data: dict[str, Any] = {
        "ceilings": {"tile": 1},
        "host": {"from": "assumed B", "sync": {"seconds": 0}, "async": {"from": "derived C", "seconds": 0}},
        "models": {"m": tables},
    }
    content = deepcopy(data)
    origins = take_origins(content)
    assert put_origins(content, origins) == data != content
    profile = replace(load_profile("h200"), source="a source", origins=origins)
    expected = {"ceilings": "a source", "host sync": "assumed B", "host async": "derived C"}
    expected["models m tensor_parallel 1 head"] = "measured A"
    assert {place: profile.origin(*place.split()) for place in expected} == expected


def test_what_was_not_measured_is_listed_by_kind_and_once_per_table() -> None:
    """The first word of an origin is its kind."""
    origins = {"z": "fallback", "d.one": "derived: from two", "d.two": "derived", "ok": "measured by a command"}
    origins |= {"x": "data sheet: 864 GB/s", "a": "assumed, as usual", "y": ""}
    assert not_measured(origins) == [
        *("d (derived)", "a (assumed)", "z (fallback)", "x (not stated)", "y (not stated)")
    ]


@pytest.mark.parametrize("name", profile_names())
def test_every_entry_of_a_profile_states_its_origin(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"hardware={name}"]) == 0
    printed = capsys.readouterr().out
    assert "memory_bytes  " in printed and "not stated" not in printed


@pytest.mark.parametrize(
    ("spec", "tensor_parallel", "others"),
    [
        (LLAMA_13B, 1, "captured_rows (derived)"),
        # every table is that of another model
        (
            replace(LLAMA_13B, name="mine", intermediate_size=13312),
            1,
            ", ".join(f"{name} (fallback)" for name in FITTED.split()),
        ),
        # rates of kernels stand in for tables
        (
            replace(LLAMA_13B, name="mine", dtype="float32"),
            1,
            "attention (assumed), other (assumed), head (fallback), host (fallback), linear (fallback)",
        ),
        (LLAMA_13B, 2, "captured_rows (derived), power (derived)"),
        # inferred from the tables of one GPU
        (
            LLAMA_13B,
            4,
            "all_reduce (assumed), attention (fallback), head (fallback), linear (fallback), other (fallback)",
        ),
    ],
)
def test_a_result_lists_the_entries_that_were_not_measured(spec: ModelSpec, tensor_parallel: int, others: str) -> None:
    cost = ProfileCost(load_profile("h200"), spec, Topology(tensor_parallel))
    assert cost.provenance(True)["not_measured"] == others.split(", ")
    without = [other for other in others.split(", ") if "host" not in other]
    assert cost.provenance(None)["not_measured"] == without


@pytest.mark.parametrize(
    ("model", "topology", "asynchronous", "compared"),
    [
        ("llama-3.1-8b", Topology(), True, "async"),
        ("llama-3.1-8b", Topology(), None, "async"),  # single iterations
        ("llama-13b", Topology(), None, ""),
        ("llama-13b", Topology(), True, ""),
        ("llama-3.1-8b", Topology(tensor_parallel=2), True, "async, 2 GPUs"),
        ("llama-3.1-8b", Topology(tensor_parallel=2), False, ""),
        ("llama-3.1-8b", Topology(tensor_parallel=4), True, ""),
        ("llama-3.1-8b", Topology(pipeline_stages=2), True, "async"),  # of one replica and stage: results name the rest
        ("llama-3.1-8b", Topology(replicas=2), True, "async"),
        ("llama-3.1-8b", Topology(tensor_parallel=2, replicas=2), True, "async, 2 GPUs"),
    ],
)
def test_an_error_is_stated_only_where_it_was_established(
    model: str, topology: Topology, asynchronous: bool | None, compared: str
) -> None:
    profile = load_profile("h200")
    found = ProfileCost(profile, load_spec(model), topology).provenance(asynchronous)
    texts = {
        "async": "largest error: mean 8%, P50 15%, P90 65%, P99 43%; batch 32-128, load 45-90% of capacity",
        "async, 2 GPUs": "largest error: mean 7%, P50 4%, P90 11%, P99 17%; batch 48, load 70-90% of capacity",
    }
    assert found["error"] == texts.get(compared, NOT_COMPARED)
    assert found["compared"] == (asdict(profile.compared[compared]) if compared else {})
    json.dumps(found)


def test_a_checkpoint_of_any_name_has_the_tables_and_the_error_of_its_shape() -> None:
    profile = load_profile("h100")
    own, mine = (
        ProfileCost(profile, spec) for spec in (LLAMA_8B, replace(LLAMA_8B, name="my-llama", path="somewhere"))
    )
    assert mine.predict(shape := BatchShape(((512, 0),), 3, 900)) == own.predict(shape)
    assert (mine.provenance(True), mine.estimated) == (own.provenance(True), ())
    assert profile.host_time(True, mine.spec) == profile.host_time(True, LLAMA_8B)
    unstated = replace(profile, models={"llama-3.1-8b": replace(profile.models["llama-3.1-8b"], shape={})})
    assert "linear" in ProfileCost(unstated, mine.spec).estimated, "tables without a shape are those of a name"


@pytest.mark.parametrize("change", [{"hidden_size": 2048}, {"dtype": "float32"}, {"num_layers": 16}])
def test_tables_and_errors_are_those_of_a_shape_and_not_of_a_name(change: dict[str, Any]) -> None:
    """A model of another shape is estimated, whatever its name; one with fewer layers takes the time of its layers."""
    whole, other = (
        ProfileCost(load_profile("h200"), spec, max_batch=16) for spec in (LLAMA_8B, replace(LLAMA_8B, **change))
    )
    assert other.provenance(True)["error"] == NOT_COMPARED != whole.provenance(True)["error"]
    shape, layers = BatchShape(((512, 0),)), other.spec.num_layers / LLAMA_8B.num_layers
    if "num_layers" in change:
        assert other.estimated == () and other.parts(shape).linear == pytest.approx(layers * whole.parts(shape).linear)
    else:
        assert {"linear", "head"} <= {*other.estimated} and other.parts(shape).linear != whole.parts(shape).linear


def test_each_loop_states_its_own_error() -> None:
    """One that was not compared has none, whatever the other has."""
    profile = load_profile("h200")
    assert profile.compared.keys() == {
        of + end for of in ("async", "sync", "async, 2 GPUs") for end in ("", ", in graphs")
    }
    profile = replace(profile, compared={"async": profile.compared["async"]})
    assert profile.error_of(LLAMA_8B, Topology(), asynchronous=False) is None
    sync = replace(
        profile.compared["async"], largest_error={"TTFT mean": 0.08, "TBT P90": 0.11}, batches=(48, 48), loads=(0.75,)
    )
    both = replace(profile, compared={**profile.compared, "sync": sync})
    assert sync.text == "largest error: mean 8%, P90 11%; batch 48, load 75% of capacity"
    assert both.error_of(LLAMA_8B, Topology(), asynchronous=False) == sync
    inside = replace(sync, in_graphs=True, loads=())
    assert inside.text == "largest error: mean 8%, P90 11%; batch 48, all iterations in graphs"
    of_both = replace(profile, compared={"sync": sync, "sync, in graphs": inside, **profile.compared})
    for in_graphs, known in ((True, inside), (False, sync)):
        assert of_both.error_of(LLAMA_8B, Topology(), False, in_graphs) == known
        assert ProfileCost(of_both, LLAMA_8B).provenance(False, in_graphs=in_graphs)["error"] == known.text
    assert both.error_of(LLAMA_8B, Topology(), False, in_graphs=True) == sync, (
        "without a statement of its own, that of all runs"
    )
    stated = ProfileCost(replace(profile, compared={}, error="within 5%"), LLAMA_8B)
    errors = [stated.provenance(True, own_host=own_host)["error"] for own_host in (False, True)]
    assert errors == ["within 5%", NOT_COMPARED]
    given = ProfileCost(profile, LLAMA_13B).provenance(True, own_host=True)
    assert "host (assumed)" in given["not_measured"] and given["error"] == NOT_COMPARED, "no error covers an assumption"


def test_a_model_may_have_its_own_host_time(tmp_path: Path) -> None:
    data = json.loads((PROFILES / "h200.json").read_text())
    times = {loop: {"seconds": seconds, "seconds_per_request": 0} for loop, seconds in (("sync", 0.1), ("async", 0.2))}
    data["models"]["llama-13b"]["host"] = times
    (path := tmp_path / "p.json").write_text(json.dumps(data))
    profile = load_profile(str(path))
    assert [profile.host_time(loop, LLAMA_13B).of(9) for loop in (False, True)] == [0.1, 0.2]
    for loop, seconds in (("sync", 0.1), ("async", 0.2)):
        words = (f"hardware={path}", "model=llama-13b", f"runtime={loop}", "workload.num_requests=1", f"output={loop}")
        assert command("run", "policy=orca", "backend=sim", *words, cwd=tmp_path).returncode == 0
        steps = pd.read_csv(tmp_path / loop / "steps.csv")
        assert (steps["launched_at"] - steps["planned_at"]).to_list() == pytest.approx([seconds] * len(steps))
    del data["models"]["llama-3.1-8b"]["host"], data["host"]["from"]
    path.write_text(json.dumps(data))
    profile = load_profile(str(path))
    assert profile.host and profile.host_time(True, LLAMA_8B) == profile.host_time(True) == profile.host["async"]
    assert replace(profile, host=None).host_time(True) == HostTime(0.0)
