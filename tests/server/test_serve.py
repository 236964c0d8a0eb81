"""The command: what it says, and how it stops."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from freewheel.cli import main


@contextmanager
def command(path: Path, *options: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """``freewheel serve`` on any free port: its address and its process, which is ended if it has not."""
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
        try:
            yield found[1], process
        finally:
            process.kill()


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_who_is_being_answered_gets_the_rest_when_it_is_told_to_stop(tiny_model: Path, told: signal.Signals) -> None:
    with command(tiny_model) as (url, process):
        body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            first = next(lines)
            process.send_signal(told)
            rest = [line for line in lines if line]
        assert first.startswith("data: ")
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(20) in (0, 130, -told)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_who_takes_too_long_is_left_behind(tiny_model: Path) -> None:
    with command(tiny_model, "--grace", "0", "--max-num-seqs", "1") as (url, process):
        body = {"prompt": "Hi", "max_tokens": 100, "n": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as reply:
            next(reply.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)


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
