"""Whatever a user gives - settings, files, policies - a command serves it or refuses it in one line, and never shows a traceback.

    python -m pytest tests/commands/test_fuzz.py --fuzz=30000

draws that many inputs; --draw=N draws others. What fails is shrunk.
"""

import gzip
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from commands import ROOT, write_azure_trace
from curve import one_percent_at_7
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from in_process import in_time, outcome
from schedules import make_engine
from spoiled_inputs import jsons, spoiled_bytes, spoiled_gzip, spoiled_json, spoiled_lines
from spoiled_policies import Once, modules, once
from spoiled_settings import CELLS, SEARCHES, SMALL, command_lines, configurations
from spoiled_traces import LENGTHS, OTHERS, spoiled_traces

from cbatch import CbatchError, Limits, Request
from cbatch.arrivals import Listed
from cbatch.model.checkpoint import spec_from_checkpoint
from cbatch.sim.profile_file import PROFILES, load_profile
from experiments.arena import arena
from experiments.capacity.__main__ import COMMAND as SEARCH
from experiments.check.__main__ import main as check
from experiments.check.search import tiny_scenarios
from experiments.plot import main as plot
from experiments.replay import main as replay
from experiments.run import main as run
from experiments.settings.error_lines import one_line
from experiments.settings.settings import Composed, read_settings
from experiments.setup.assemble import assemble
from experiments.store.csv_tables import REQUESTS, STEPS
from experiments.store.run_folder import CONFIG, DECISIONS, SUMMARY, TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a trace and a length table, from which modules are imported."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_azure_trace(folder / "trace.csv")
    (folder / "table.csv").write_bytes(LENGTHS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        yield folder
    sys.modules.pop("mine", None)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, bytes]:
    """The files of a finished run with its decisions."""
    assert outcome(run, [*SMALL, "policy=sarathi_serve", "decisions=true", "output=recorded"]).status == 0
    return {path.name: path.read_bytes() for path in (folder / "recorded").iterdir()}


Fuzz = Callable[[float, st.SearchStrategy[Any], Callable[[Any], None]], None]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Fuzz:
    """Gives inputs of a strategy - a share of all that are asked for - to a test."""
    name, draw = request.node.name, pytestconfig.getoption("--draw")

    def fuzz(share: float, inputs: st.SearchStrategy[Any], test: Callable[[Any], None]) -> None:
        number = max(int(pytestconfig.getoption("--fuzz") * share), 2)  # the first is the simplest
        check_all = settings(max_examples=number, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)(
            given(inputs)(test)
        )
        seed(crc32(f"{name} {draw}".encode()))(check_all)()

    return fuzz


def succeed_or_refuse(action: Callable[[], object]) -> None:
    """Runs the action, which may raise no error but the framework's, in one line."""
    try:
        with in_time():
            action()
    except CbatchError as error:
        text = one_line(error) or ""
        assert len(text) > 20, text


@pytest.mark.long
def test_command_lines(fuzz: Fuzz, folder: Path) -> None:
    def test(lines: list[str]) -> None:
        clean(folder)
        outcome(run, lines)

    fuzz(0.06, command_lines(), test)


@pytest.mark.long
def test_searches_and_arenas(fuzz: Fuzz, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacities of a curve that is known, and cells of two short runs; each failed run of a cell is a line of its own."""
    known = lambda settings, number, rate, *size: one_percent_at_7()([(number, rate)], *size)[0]  # noqa: E731
    monkeypatch.setattr("experiments.capacity.command.simulate", known)
    monkeypatch.setattr("experiments.capacity.control._DRAWN", 20_000)
    search = partial(run, command=SEARCH)

    def test(given_input: tuple[str, list[str]]) -> None:
        clean(folder)
        name, lines = given_input
        if name == "capacity":
            outcome(search, lines)
        else:
            outcome(arena, [*lines, "replications=2"], num_runs=2)

    bases = {"capacity": SEARCHES, "arena": CELLS}
    lines = [st.tuples(st.just(name), command_lines(base, name)) for name, base in bases.items()]
    fuzz(0.03, st.one_of(lines), test)


def test_option_files(fuzz: Fuzz, folder: Path) -> None:
    """A file of settings that a user has written, in a folder of their own."""

    def test(content: bytes) -> None:
        clean(folder)
        path = folder / "conf" / "policy" / "own.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        outcome(run, ["--config-dir=conf", "policy=own", *SMALL])

    contents = spoiled_bytes((ROOT / "experiments" / "conf" / "policy" / "longest_first.yaml").read_bytes())
    fuzz(0.02, contents, test)


@pytest.mark.long
def test_settings(fuzz: Fuzz, folder: Path) -> None:
    def serve(config: Any) -> None:
        made = assemble(read_settings(Composed(config)))
        try:
            made.engine.run()
        finally:
            made.engine.executor.close()

    fuzz(0.2, configurations, lambda config: succeed_or_refuse(partial(serve, config)))


@pytest.mark.long
def test_traces(fuzz: Fuzz, folder: Path) -> None:
    for name, content in OTHERS.items():
        (folder / name).write_bytes(content)
    fuzz(0.3, spoiled_traces, lambda trace: succeed_or_refuse(partial(trace.read, folder)))


def test_plans(fuzz: Fuzz) -> None:
    """A policy whose answer is once no plan, or no plan that could be carried out."""

    def serve(policy: Once) -> None:
        engine = make_engine(policy, Limits(3, 100, 64, tile=4), num_blocks=20, asynchronous=policy.when % 2 == 0)
        engine.attach(Listed([Request(id_, 5 + 7 * id_, 4 + id_) for id_ in range(5)], {id_: id_ for id_ in range(5)}))
        engine.run()

    fuzz(0.25, once, lambda policy: succeed_or_refuse(partial(serve, policy)))


def test_policies_that_raise_or_change_what_is_not_theirs(fuzz: Fuzz, folder: Path) -> None:
    def test(text: str) -> None:
        clean(folder)
        outcome(run, [mine(folder, text.encode()), *SMALL], (0, 2, 130))

    fuzz(0.04, modules, test)


def test_policy_files_to_check(fuzz: Fuzz, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are hardly Python any more, and policies that go wrong; a few workloads are enough to come upon it."""
    few = lambda chunk: islice(tiny_scenarios(chunk), 0, None, 500)  # noqa: E731
    monkeypatch.setattr("experiments.check.__main__.tiny_scenarios", few)
    texts = spoiled_bytes((ROOT / "policies" / "orca.py").read_bytes().replace(b"class Orca", "class Höchst".encode()))

    def test(text: bytes) -> None:
        arguments = [mine(folder, text), "random=0"]
        outcome(check, arguments, (0, 1, 2, 130))

    fuzz(0.03, texts | modules.map(str.encode), test)


def mine(folder: Path, text: bytes) -> str:
    """Write a module; returns the override that takes its policy."""
    (folder / "mine.py").write_bytes(text)
    sys.modules.pop("mine", None)
    importlib.invalidate_caches()
    return "policy='mine.Höchst'"


@pytest.mark.long
def test_recorded_decisions(fuzz: Fuzz, folder: Path, recorded: dict[str, bytes]) -> None:
    def test(given_input: tuple[str, bytes, list[str]]) -> None:
        name, content, overrides = given_input
        put(folder / "recorded", recorded, name, content)
        outcome(replay, ["recorded", *overrides], (0, 1, 2))

    lines = gzip.decompress(recorded[DECISIONS]).decode().splitlines()
    files = st.tuples(st.just(DECISIONS), spoiled_gzip(spoiled_lines(lines) | spoiled_bytes("\n".join(lines).encode())))
    configs = st.tuples(st.just(CONFIG), spoiled_bytes(recorded[CONFIG]))
    overrides = st.sampled_from(([], [], ["policy=orca"], ["chunk=64"], ["chunk=x"], ["nothing=1"]))
    fuzz(0.05, st.builds(lambda file, rest: (*file, rest), files | files | configs, overrides), test)


@pytest.mark.long
def test_results_to_plot(fuzz: Fuzz, folder: Path, recorded: dict[str, bytes]) -> None:
    summary = json.loads(recorded[SUMMARY])
    spoiled = spoiled_json(summary).map(lambda value: json.dumps(value).encode())
    files = st.one_of(
        st.tuples(st.just(SUMMARY), spoiled | spoiled_bytes(recorded[SUMMARY])),
        *(st.tuples(st.just(name), spoiled_bytes(recorded[name])) for name in (CONFIG, REQUESTS, STEPS, TOKENS)),
    )

    def test(given_input: tuple[str, tuple[str, bytes]]) -> None:
        name, file = given_input
        put(folder / "recorded", recorded, *file)
        outcome(plot, [name, "recorded"])

    names = st.sampled_from(("table", "table", "latency_cdf", "composition", "throughput_vs_pd", "nothing"))
    fuzz(0.02, st.tuples(names, files), test)


def test_profiles_and_checkpoints(fuzz: Fuzz, folder: Path) -> None:
    profile = json.loads((PROFILES / "a6000-llama-13b.json").read_text())
    checkpoint = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }

    def test(given_input: tuple[str, Any]) -> None:
        kind, content = given_input
        (folder / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        reads = {"profile": partial(load_profile, "config.json"), "checkpoint": partial(spec_from_checkpoint, ".")}
        succeed_or_refuse(reads[kind])

    wholes = {"profile": profile, "checkpoint": checkpoint}
    inputs = [
        st.tuples(st.just(kind), spoiled_json(whole) | spoiled_bytes(json.dumps(whole).encode()) | jsons)
        for kind, whole in wholes.items()
    ]
    fuzz(0.03, st.one_of(*inputs), test)


def put(folder: Path, files: dict[str, bytes], name: str, content: bytes) -> None:
    """Have a folder hold files, one of which is another."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for other, whole in {**files, name: content}.items():
        (folder / other).write_bytes(whole)


def clean(folder: Path) -> None:
    """Removes what the runs before have left."""
    for path in folder.iterdir():
        if path.name not in ("trace.csv", "table.csv", "recorded"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
