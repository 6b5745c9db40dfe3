"""How a server ends, and what happens when its engine fails."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PATIENCE, command, environment, summary, wait_for
from in_thread import in_thread
from live import Live, events, served, serving

from cbatch import CbatchError
from experiments.report.run_text import run_text
from experiments.server.settings import read_server_settings
from experiments.settings.compose import compose

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 200, "stream": True}
SLOW = ("policy=sarathi_serve", "backend=sim", "batch=64", "port=0")
"""A simulated server in real time: 200 tokens take 0.8 seconds."""


def read_until_cut(stream: http.client.HTTPResponse) -> int:
    """Returns the code of the error after which a stream is cut."""
    with pytest.raises(http.client.IncompleteRead) as cut:
        stream.read()
    return int(json.loads(cut.value.partial.decode().split("data: ")[-1])["error"]["code"])


@pytest.mark.parametrize(("seconds", "signals"), [(30, 1), (0.1, 1), (30, 2)])
def test_a_signal_lets_open_requests_end_for_a_while_or_until_the_next_signal(
    tmp_path: Path, seconds: float, signals: int
) -> None:
    is_cut = seconds < 1 or signals > 1

    def clients(live: Live) -> None:
        stream = live.send(COMPLETIONS, LONG)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        if is_cut:
            assert read_until_cut(stream) == 503
        else:
            assert len(events(stream)) == 200

    figures, _ = served(tmp_path / "run", clients, *SLOW, f"drain_seconds={seconds}", ends=True)
    assert figures["run"].get("cancelled_requests", 0) == is_cut
    assert (figures["about"]["cut"], figures["about"]["cancelled"]) == (is_cut, 0)
    assert ("requests cut as the server ended: 1 of 1" in run_text(figures)) is is_cut


def test_a_failing_engine_cuts_streams_after_an_error_and_ends_the_server(tmp_path: Path) -> None:
    def clients(live: Live) -> None:
        assert read_until_cut(live.send(COMPLETIONS, LONG)) == 500

    fails = ("policy=orca", "policy._target_=failing_policies.Fails", *SLOW[1:])
    with pytest.raises(CbatchError, match="the policy's fault"):
        served(tmp_path / "run", clients, *fails, ends=True)
    figures = summary(tmp_path / "run")
    assert figures["run"]["cancelled_requests"] == 1 and "the policy's fault" in figures["about"]["error"]
    assert 'raise ValueError("the policy\'s fault")' in "".join(figures["about"]["traceback"])
    printed = run_text(figures)
    assert "requests cut as the server ended: 1 of 1" in printed and "client left" not in printed
    assert (
        "ended by an error, see about.traceback in summary.json: policy Fails, iteration 21: plan() raised" in printed
    )


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_third_signal_ends_a_plan_that_does_not_return_and_the_run_is_written(tmp_path: Path, replicas: int) -> None:
    loops = ("policy=orca", "policy._target_=failing_policies.Loops", f"backend.replicas={replicas}", *SLOW[1:])
    with serving(tmp_path, *loops) as live:
        client = http.client.HTTPConnection("127.0.0.1", live.port)
        client.request("POST", COMPLETIONS, json.dumps(LONG), {"Content-Type": "application/json"})
        wait_for((tmp_path / "plans").exists, live.process)
        for _ in range(3):
            live.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        printed, _ = live.process.communicate(timeout=PATIENCE)
    said = r"error: policy Loops, iteration 0: plan\(\) raised ToldToEndError: the server was told .* \(failing_policies\.py:\d+\); results: run; see about\.traceback in its summary\.json\n"
    assert re.search(said, printed) and live.process.returncode == 2, printed
    assert summary(tmp_path / "run")["run"]["cancelled_requests"] == 1


@pytest.mark.long
def test_the_engine_ends_with_a_server_that_is_killed_before_it_serves(tmp_path: Path) -> None:
    sleeps = ("policy=orca", "policy._target_=failing_policies.Sleeps", *SLOW[1:])
    arguments, engine = [sys.executable, "-m", "experiments.server", *sleeps], tmp_path / "pid"
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), text=True) as process:
        wait_for(lambda: engine.is_file() and engine.read_text(), process)
        process.kill()
    wait_for(lambda: not Path("/proc", engine.read_text()).is_dir())


def test_a_run_of_a_server_is_a_run_folder(tmp_path: Path) -> None:
    with in_thread(tmp_path / "run", *SLOW[:-1], "decisions=true") as server:
        for number in range(3):
            server.ask(COMPLETIONS, {"prompt": "a b", "max_tokens": 4, "client": f"c{number}"})
    assert server.summary["run"]["requests"] == server.summary["about"]["requests"] == 3
    assert command("replay", "run", cwd=tmp_path).returncode == 0


def test_a_port_in_use_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = command("server", *SLOW[:-1], f"port={other.getsockname()[1]}", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("error: bind=127.0.0.1 port=")


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("workload=closed", "workload=closed: clients send"),
        ("workload.timeout=2", "workload.timeout: a server's clients send its requests; known: slo, temperature"),
        ("timeout=2", "timeout: no such key; did you mean"),
        ("time_scale=2", "time_scale=2: real tokens"),
        ("stream=true", "stream, bounds:"),
        ("autoscale=wva_v1 backend.replicas=2", "autoscale: a server's number of replicas is fixed"),
        ("port=70000", "port=70000: give a whole number"),
        ("-m seed=1,2", "-m: a server serves its clients once"),
        ("seeds=3", "seeds=3: a server serves its clients once"),
    ],
)
def test_settings_that_a_server_has_not_are_refused(tmp_path: Path, argument: str, error: str) -> None:
    ended = command("server", "backend=cpu", "model=tiny", *argument.split(), cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {error}")


@pytest.mark.parametrize("given", ["api_key=", "api_key=1e5", "api_key=123_456", "api_key=true", "bind="])
def test_a_key_or_address_is_as_it_was_written_and_not_empty(given: str) -> None:
    """An empty key would let anyone in, and an empty address would open all interfaces: a variable of the shell may be unset. The text of a number may differ from what was given."""
    key = given.partition("=")[0]
    with pytest.raises(CbatchError, match="^api_key: give a text" if key == "api_key" else "^bind=.*: give "):
        read_server_settings(compose("policy=orca", "backend=sim", given, name="server"))
    for text in ("null", "0123", "'1e5'"):
        settings = read_server_settings(compose("policy=orca", "backend=sim", f"api_key={text}", name="server"))
        assert settings.server.api_key == (None if text == "null" else text.strip("'"))
