"""How a server ends, and what happens when its engine fails: in processes of their own."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import PATIENCE, command, environment, new_process, summary, wait_for
from live import events, serving

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 500, "stream": True}
SLOW = ("policy=sarathi_serve", "backend=sim", "batch=64", "port=0")
"""A simulated server in real time: 500 tokens take two seconds."""


@pytest.mark.parametrize(("seconds", "signals"), [(30, 1), (0.2, 1), (30, 2)])
def test_a_signal_lets_open_requests_end_for_a_while_or_until_the_next_signal(
    tmp_path: Path, seconds: float, signals: int
) -> None:
    is_cut = seconds < 1 or signals > 1
    with serving(tmp_path, *SLOW, f"drain_seconds={seconds}") as live:
        stream = live.send(COMPLETIONS, LONG)
        for _ in range(signals):
            live.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        if is_cut:
            with pytest.raises(http.client.IncompleteRead) as cut:
                stream.read()
            assert json.loads(cut.value.partial.decode().split("data: ")[-1])["error"]["code"] == 503
        else:
            assert len(events(stream)) == 500
        live.process.communicate()
        assert live.process.returncode == 0
    figures = summary(live.folder)
    assert figures["run"].get("cancelled_requests", 0) == is_cut
    assert figures["about"]["chosen"].get("cut") == ("1 requests, as the server ended" if is_cut else None)


def test_a_failing_engine_cuts_streams_after_an_error_and_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "policy=orca", "policy._target_=failing_policies.Fails", *SLOW[1:]) as live:
        stream = live.send(COMPLETIONS, LONG)
        with pytest.raises(http.client.IncompleteRead) as cut:
            stream.read()
        assert json.loads(cut.value.partial.decode().split("data: ")[-1])["error"]["code"] == 503
        printed, _ = live.process.communicate()
        assert live.process.returncode == 2 and "the policy's fault" in printed
    assert summary(live.folder)["run"]["cancelled_requests"] == 1
    assert "the policy's fault" in summary(live.folder)["about"]["chosen"]["ended by"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_engine_ends_with_a_server_that_has_not_begun_to_serve(tmp_path: Path, number: int) -> None:
    arguments = [
        sys.executable,
        "-m",
        "experiments.server",
        "policy=orca",
        "policy._target_=failing_policies.Sleeps",
        *SLOW[1:],
    ]
    engine = tmp_path / "pid"
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), text=True) as process:
        wait_for(lambda: engine.is_file() and engine.read_text(), process)
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) != 0
    end = time.monotonic() + PATIENCE
    while Path("/proc", engine.read_text()).is_dir():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_port_in_use_is_an_error_of_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ended = new_process("server", *SLOW[:-1], f"port={other.getsockname()[1]}", cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith("error: bind=127.0.0.1 port=")


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("workload=closed", "workload=closed: clients send"),
        ("time_scale=2", "time_scale=2: real tokens"),
        ("backend.replicas=2", "backend.replicas=2: a server"),
        ("stream=true", "stream, bounds:"),
        ("port=70000", "port=70000: give a whole number"),
    ],
)
def test_settings_that_a_server_has_not_are_refused(tmp_path: Path, argument: str, error: str) -> None:
    ended = command("server", "backend=cpu", "model=tiny", argument, cwd=tmp_path)
    assert ended.returncode == 2 and ended.stderr.startswith(f"error: {error}")
