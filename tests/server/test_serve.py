"""The command: what it says, and how it stops."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from freewheel.cli import main


class Command(NamedTuple):
    """A server's address, its process, and the id of its engine's."""

    url: str
    process: "subprocess.Popen[str]"
    engine: int


@contextmanager
def command(path: Path, *options: str) -> Iterator[Command]:
    """``freewheel serve`` on any free port. Killed at the end, if it has not ended: its engine has to end as well."""
    arguments = ["serve", "--model", str(path), "--dtype", "float32", "--port", "0", "--served-model-name", "tiny"]
    with subprocess.Popen(
        [sys.executable, "-m", "freewheel", *arguments, *options], stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"model 'tiny' at (http://127\.0\.0\.1:\d+)/v1", line):
                break
        else:
            pytest.fail(said)
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engine = os.pidfd_open(int(child))
        try:
            yield Command(found[1], process, int(child))
        finally:
            process.kill()
            ended, _, _ = select.select([engine], [], [], 20)
            os.close(engine)
            assert ended, "the engine's process goes on"


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_who_is_being_answered_gets_the_rest_when_it_is_told_to_stop(tiny_model: Path, told: signal.Signals) -> None:
    with command(tiny_model) as (url, process, engine):
        body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            for pid in (engine, process.pid):  # Ctrl-C, and some supervisors, tell all
                os.kill(pid, told)
            rest = [line for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(20) in (0, 130, -told)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_being_told_twice_to_stop_changes_nothing_and_nobody_new_is_taken(tiny_model: Path) -> None:
    with command(tiny_model) as (url, process, _), httpx.Client(timeout=30) as idle:
        assert idle.get(f"{url}/health").status_code == 200
        body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 20}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            for _ in range(100):  # until it no longer listens
                try:
                    idle.get(f"{url}/health")
                except httpx.TransportError:
                    break
            else:
                pytest.fail("it still takes requests")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in line for line in rest) == 20
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_a_line_for_each_request_is_written_if_asked(tiny_model: Path) -> None:
    with command(tiny_model, "--log-requests") as (url, process, _):
        headers = {"X-Request-Id": "mine-1"}
        httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 3}, headers=headers)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.search(r"mine-1 POST /v1/completions 200, 2 \+ \d tokens, \d\.\d{3} s$", line)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGKILL])
def test_who_takes_too_long_is_left_behind(tiny_model: Path, told: signal.Signals) -> None:
    with command(tiny_model, "--grace", "0", "--max-num-seqs", "1") as (url, process, _):
        body = {"prompt": "Hi", "max_tokens": 100, "n": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            next(reply.iter_lines())
            process.send_signal(told)
            assert process.wait(20) in (0, -told)


def test_without_its_engine_it_says_so(tiny_model: Path) -> None:
    with command(tiny_model) as (url, process, engine):
        body = {"prompt": "Hi", "max_tokens": 100, "n": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "ended by SIGKILL" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "Hi"})
        assert refused.status_code == 503
        assert "ended by SIGKILL" in refused.json()["error"]["message"]
        assert "freewheel_running 0.0" in httpx.get(f"{url}/metrics").text
        process.terminate()
        assert process.stderr is not None
        assert "ended by SIGKILL" in process.stderr.read()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "port"),
        (["--max-requests", "0"], "max_requests"),
        (["--timeout", "0"], "timeout"),
        (["--api-key", ""], "api_key"),
        (["--model", "/nowhere"], "nowhere"),
    ],
)
def test_wrong_options_are_named(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_so(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(tiny_model), "--port", port]) == 2
    assert port in capsys.readouterr().err
